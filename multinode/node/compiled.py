"""The archive that we run from, once more with what Python makes of its modules, so that the next start is sooner.

Python compiles what it imports from an archive at every start, and keeps nothing of it. The copy lies beside the
archive and is used by interpreters of the version that made it; where it cannot be written, nothing is lost but time.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import marshal
import os
import re
import sys
import time

from .files import replace_file

# Of a compiled module (PEP 552): it is named by the hash of its source, and never compared with it.
_UNCHECKED_HASH = (1).to_bytes(4, "little")


_DIGEST_BYTES = 64
_DAY_S = 86400.0
_UNUSED_S = 30 * _DAY_S
_OURS = re.compile(r"\.?([0-9a-f]{16})\..*")


def keep_compiled() -> None:
    """Make the copy, unless it is there; then take away what other releases left that is not used any more."""
    archive = os.path.abspath(sys.argv[0])
    # The archive looks for it under this name (transport/agent.py).
    copy = f"{os.path.splitext(archive)[0]}.{sys.implementation.cache_tag}.pyz"
    with contextlib.suppress(OSError):
        if time.time() - os.stat(archive).st_mtime > _DAY_S:
            os.utime(archive)
    if os.path.exists(copy) or not os.path.isfile(archive):
        return
    with contextlib.suppress(OSError, ImportError, SyntaxError, ValueError):
        replace_file(copy, _compile(archive, copy), sync=True)
        _remove_unused(archive)


def _remove_unused(archive: str) -> None:
    """Jobs import from their archive as long as they run, here or on another node with this home directory."""
    from .run.runs import list_runs
    from .run.status import has_ended, read_status

    going_on = (run.read("request.json") for run in list_runs() if not has_ended(read_status(run)))
    used = {str((request or {}).get("archive"))[:16] for request in going_on} | {os.path.basename(archive)[:16]}
    folder = os.path.dirname(archive)
    for name in os.listdir(folder):
        ours = _OURS.fullmatch(name)
        path = os.path.join(folder, name)
        # What whoever wrote it was killed over has no place yet.
        is_partial = name.startswith(".") or not name.endswith(".pyz")
        if ours is None or (ours[1] in used and not is_partial):
            continue
        if time.time() - os.stat(path).st_mtime > (_DAY_S if is_partial else _UNUSED_S):
            os.remove(path)


def _compile(archive: str, copy: str) -> bytes:
    import zipfile

    buffer = io.BytesIO()
    with zipfile.ZipFile(archive) as source, zipfile.ZipFile(buffer, "w") as target:
        for name in source.namelist():
            text = source.read(name)
            target.writestr(name, text)
            if name.endswith(".py") and "/" in name:
                code = compile(text, os.path.join(copy, name), "exec", dont_inherit=True)
                header = importlib.util.MAGIC_NUMBER + _UNCHECKED_HASH + importlib.util.source_hash(text)
                target.writestr(name + "c", header + marshal.dumps(code))
        # The comment is the end of the file.
        target.comment = bytes(_DIGEST_BYTES)
    data = buffer.getvalue()[:-_DIGEST_BYTES]
    return data + hashlib.sha256(data).hexdigest().encode()
