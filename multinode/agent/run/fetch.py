"""The verb `fetch`: sends files of the job home, one after the other. Follows no link out of a directory."""

from __future__ import annotations

import binascii
import os
import stat
from collections.abc import Iterator

from ..channel import AgentError, Channel, Record

_CHUNK_BYTES = 1 << 18
_MOST_FILES = 100_000


def run(request: Record, channel: Channel) -> None:
    """One record `files` with names and sizes; `data` records with `file` (its number) and base64; then `fetched`.

    Raises:
        AgentError: a path is not there, or holds too many files.
    """
    cwd = os.path.expanduser(request.get("cwd") or "~")
    files = [found for path in request["paths"] for found in _find(cwd, path)]
    if len(files) > _MOST_FILES:
        raise AgentError(f"more than {_MOST_FILES} files were requested", hint="choose a smaller directory")
    listed: list[Record] = [{"name": name, "size_bytes": os.stat(path).st_size} for name, path in files]
    channel.emit({"kind": "files", "files": listed})
    for number, (_, path) in enumerate(files):
        # A file that grows while it is sent is told as it was when it was listed.
        for data in _read(path, listed[number]["size_bytes"]):
            text = binascii.b2a_base64(data, newline=False).decode()
            channel.emit({"kind": "data", "file": number, "data": text})
    channel.emit({"kind": "fetched"})


def _find(cwd: str, asked: str) -> list[tuple[str, str]]:
    """Name, beginning with the last part of what was asked for, and absolute path of each regular file."""
    start = os.path.normpath(os.path.join(cwd, os.path.expanduser(asked)))
    base = os.path.dirname(start)
    if os.path.isfile(start):
        return [(os.path.relpath(start, base), start)]
    if not os.path.isdir(start):
        raise AgentError(f"{asked} does not exist", hint=f"looked for {start}")
    found = []
    for folder, _, names in os.walk(start):
        for name in sorted(names):
            path = os.path.join(folder, name)
            if stat.S_ISREG(os.lstat(path).st_mode):
                found.append((os.path.relpath(path, base), path))
    return found


def _read(path: str, size_bytes: int) -> Iterator[bytes]:
    with open(path, "rb", buffering=0) as file:
        while data := file.read(min(_CHUNK_BYTES, size_bytes)):
            size_bytes -= len(data)
            yield data
