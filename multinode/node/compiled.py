"""A copy of the agent's archive with compiled modules, so that the next start is faster.

Python compiles the modules of an archive at every start and does not keep the result. The copy lies beside the archive
and is used by interpreters of the version that made it. If it cannot be written, starts only take longer.
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

# Flags of a compiled module (PEP 552): it holds the hash of its source, and Python does not check it.
_UNCHECKED_HASH = (1).to_bytes(4, "little")


_DIGEST_BYTES = 64
_DAY_S = 86400.0
_UNUSED_S = 30 * _DAY_S
_OURS = re.compile(r"\.?([0-9a-f]{16})\..*")


def keep_compiled() -> None:
    """Make the copy if it does not exist, then remove unused archives of other releases."""
    archive = os.path.abspath(sys.argv[0])
    # transport/agent.py starts the copy under this name.
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
    """Remove old archives, but none of a run that goes on: jobs import from their archive as long as they run."""
    from .run.runs import list_runs
    from .run.status import has_ended, read_status

    going_on = (run.read("request.json") for run in list_runs() if not has_ended(read_status(run)))
    used = {str((request or {}).get("archive"))[:16] for request in going_on} | {os.path.basename(archive)[:16]}
    folder = os.path.dirname(archive)
    for name in os.listdir(folder):
        ours = _OURS.fullmatch(name)
        path = os.path.join(folder, name)
        # A writer that was killed leaves a partial file.
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
        # The archive's comment is the end of the file: the digest takes its place.
        target.comment = bytes(_DIGEST_BYTES)
    data = buffer.getvalue()[:-_DIGEST_BYTES]
    return data + hashlib.sha256(data).hexdigest().encode()
