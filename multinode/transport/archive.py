"""Builds the agent's zipapp from its sources, byte for byte the same each time, and names it by its content."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import io
import zipfile
from pathlib import Path

import multinode

__all__ = ["AgentArchive", "build_archive", "load_archive"]

_PACKAGE = "multinode_agent"
_MAIN = f"from {_PACKAGE}.main import main\n\nmain()\n"
# Zip needs a date; one for all keeps the archive's hash a function of its content alone.
_EPOCH = (2000, 1, 1, 0, 0, 0)


class AgentArchive:
    """The zipapp: its bytes, and the path under which a node keeps it.

    Attributes:
        digest: the first 16 hex digits of its SHA-256.
        path: where it lies on a node, relative to the user's home directory.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.digest = hashlib.sha256(data).hexdigest()[:16]
        self.path = f".multinode/agent/{self.digest}.pyz"


@functools.cache
def load_archive() -> AgentArchive:
    """The archive of the agent that belongs to this multinode, built once a process."""
    return AgentArchive(build_archive())


def build_archive() -> bytes:
    """Pack `multinode/agent` (and pynvml, one pure-Python module, where it is installed) into a zipapp.

    Files are stored uncompressed: a worker imports from it before zlib is sure to be there, and it is small.
    """
    source = Path(multinode.__file__).parent / "agent"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        _add(archive, "__main__.py", _MAIN.encode())
        for path in sorted(source.rglob("*.py")):
            _add(archive, f"{_PACKAGE}/{path.relative_to(source).as_posix()}", path.read_bytes())
        pynvml = importlib.util.find_spec("pynvml")
        if pynvml is not None and pynvml.origin is not None:
            _add(archive, "pynvml.py", Path(pynvml.origin).read_bytes())
    return buffer.getvalue()


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    info = zipfile.ZipInfo(name, date_time=_EPOCH)
    info.external_attr = 0o600 << 16
    archive.writestr(info, data)
