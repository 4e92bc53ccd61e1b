"""The log of a run that may have outgrown its limit: what is left of it, by the offset at which the job wrote it.

log_limit.py gives back what is oldest. Of that, `log.kept` has the beginning and what tells of errors, and `log.tail`,
where the file had to be cut, its last words before that: pieces, each behind its offset and length. `log.json` says
from which offset on the log itself has everything, and which offset its first byte has.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
from collections.abc import Iterator
from typing import NamedTuple, Optional

from ..channel import Record
from ..rundir import RunDir

INDEX = "log.json"
KEPT = "log.kept"
TAIL = "log.tail"
PIECE = struct.Struct("<QQ")
"""Before each piece: its offset in the log, and its length."""


class LogIndex(NamedTuple):
    """What log.json says.

    Attributes:
        base: offset of the first byte of the file.
        whole_from: from there on the file has all that the job has written.
        busy: the file is just being cut, and cannot be read.
    """

    base: int = 0
    whole_from: int = 0
    busy: bool = False

    def record(self) -> Record:
        """It, as log.json has it."""
        return {"schema": 1, "base_bytes": self.base, "whole_from_bytes": self.whole_from, "busy": self.busy}


class _Piece(NamedTuple):
    name: str
    offset: int
    length: int
    place: int


class KeptLog:
    """Reads the log of one run."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._seen: Optional[tuple[int, int, int]] = None
        self._index = LogIndex()
        self._states: tuple[Optional[tuple[int, int, int]], ...] = ()
        self._pieces: list[_Piece] = []

    def read(self, offset: int, most: int) -> tuple[int, bytes]:
        """How many bytes from `offset` on are gone; where none are, what is there, empty at the end and for now."""
        index = self._read_index()
        if index.busy:
            return 0, b""
        if offset >= index.whole_from:
            gone, data = 0, _read_file(self._run.log, offset - index.base, most)
        else:
            gone, data = self._read_aside(offset, most, index.whole_from)
        # What was read while that changed may be something else.
        return (gone, data) if self._read_index() == index else (0, b"")

    def gone_bytes(self) -> int:
        """How much of it is gone."""
        index = self._read_index()
        gone = at = 0
        for piece in sorted(self._list_pieces(), key=lambda piece: piece.offset):
            gone += max(0, min(piece.offset, index.whole_from) - at)
            at = max(at, piece.offset + piece.length)
        return gone + max(0, index.whole_from - at)

    def _read_index(self) -> LogIndex:
        seen = _state(os.path.join(self._run.path, INDEX))
        if seen is not None and seen != self._seen:
            record = self._run.read(INDEX)
            if record is None:
                return LogIndex(busy=True)
            self._seen = seen
            self._index = LogIndex(record["base_bytes"], record["whole_from_bytes"], record["busy"])
        return self._index

    def _read_aside(self, offset: int, most: int, whole_from: int) -> tuple[int, bytes]:
        next_offset = whole_from
        for piece in self._list_pieces():
            end = piece.offset + piece.length
            if piece.offset <= offset < end:
                place = piece.place + offset - piece.offset
                path = os.path.join(self._run.path, piece.name)
                return 0, _read_file(path, place, min(most, end - offset, whole_from - offset))
            if piece.offset > offset:
                next_offset = min(next_offset, piece.offset)
        return next_offset - offset, b""

    def _list_pieces(self) -> list[_Piece]:
        paths = {name: os.path.join(self._run.path, name) for name in (TAIL, KEPT)}
        states = tuple(map(_state, paths.values()))
        if states != self._states:
            self._states = states
            self._pieces = [piece for name, path in paths.items() for piece in _pieces(name, path)]
        return self._pieces


def _read_file(path: str, place: int, most: int) -> bytes:
    try:
        fd = open_own(path, os.O_RDONLY)
        try:
            return os.pread(fd, most, place)
        finally:
            os.close(fd)
    except OSError:
        return b""


def _pieces(name: str, path: str) -> Iterator[_Piece]:
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
        place = 0
        while len(head := os.pread(file.fileno(), PIECE.size, place)) == PIECE.size:
            offset, length = PIECE.unpack(head)
            yield _Piece(name, offset, length, place + PIECE.size)
            place += PIECE.size + length


def _state(path: str) -> Optional[tuple[int, int, int]]:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def open_own(path: str, flags: int) -> int:
    """Open a file of the run; a link or a device that the job has put in its place is none.

    Raises:
        OSError: it is not there, or no file.
    """
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise FileNotFoundError(f"{path} is no file")
    return os.open(path, flags | os.O_NOFOLLOW)
