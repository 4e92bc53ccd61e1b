"""The archive that we run from, once more with what Python makes of its modules, so that the next start is sooner.

Python compiles what it imports from an archive at every start, and keeps nothing of it. The copy lies beside the
archive and is used by interpreters of the version that made it; where it cannot be written, nothing is lost but time.
"""

from __future__ import annotations

import contextlib
import importlib.util
import marshal
import os
import sys

__all__ = ["keep_compiled"]

# Of a compiled module (PEP 552): it is named by the hash of its source, and never compared with it.
_UNCHECKED_HASH = (1).to_bytes(4, "little")


def keep_compiled() -> None:
    """Make the copy, unless it is there."""
    archive = os.path.abspath(sys.argv[0])
    # The archive looks for it under this name (transport/agent.py).
    copy = f"{os.path.splitext(archive)[0]}.{sys.implementation.cache_tag}.pyz"
    if os.path.exists(copy) or not os.path.isfile(archive):
        return
    # Nodes may share the home directory, and process ids are a node's own.
    partial = f"{copy}.{os.uname().nodename}.{os.getpid()}"
    with contextlib.suppress(OSError, ImportError, SyntaxError, ValueError):
        try:
            _write(archive, copy, partial)
            os.replace(partial, copy)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.remove(partial)


def _write(archive: str, copy: str, partial: str) -> None:
    import zipfile

    with zipfile.ZipFile(archive) as source, zipfile.ZipFile(partial, "w") as target:
        for name in source.namelist():
            text = source.read(name)
            target.writestr(name, text)
            if name.endswith(".py") and "/" in name:
                code = compile(text, os.path.join(copy, name), "exec", dont_inherit=True)
                header = importlib.util.MAGIC_NUMBER + _UNCHECKED_HASH + importlib.util.source_hash(text)
                target.writestr(name + "c", header + marshal.dumps(code))
