"""The log of a run, kept within a limit while the job writes it, and read by the offsets at which the job wrote.

The beginning and passages about errors are copied to `log.kept`. Then the oldest blocks are given back to the file
system, which keeps all offsets (fallocate(2), FALLOC_FL_PUNCH_HOLE). If the file system does not support that, the end
of the log is copied to `log.tail`, and the file is truncated; the job's descriptor appends at its new end. Copies are
pieces, each after its offset and length. `log.json` has the offset of the file's first byte, and the offset from which
on the file has everything.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple, Optional

from ..channel import Record
from ..rundir import RunDir

INDEX = "log.json"
KEPT = "log.kept"
TAIL = "log.tail"
PIECE = struct.Struct("<QQ")
"""Header of a piece: its offset in the log, and its length, in bytes."""


class LogIndex(NamedTuple):
    """Content of log.json."""

    base: int = 0  # offset of the first byte of the file
    whole_from: int = 0  # offset from which on the file has everything that the job wrote
    busy: bool = False  # whether the file is being truncated, and cannot be read

    def record(self) -> Record:
        """The index as JSON data of log.json."""
        return {"schema": 1, "base_bytes": self.base, "whole_from_bytes": self.whole_from, "busy": self.busy}


class Piece(NamedTuple):
    """The next piece of a file of the run: its offset in what the job wrote, and the data there.

    `gone_bytes` are missing from `offset` on; then there is no data. Both are empty at the end, or for now.
    """

    offset: int
    data: bytes = b""
    gone_bytes: int = 0


class _LogCopy(NamedTuple):
    name: str
    offset: int
    length: int
    place: int


class LogReader:
    """Reads the log of one run, from the offset that the reader has already."""

    def __init__(self, run: RunDir, offset: int = 0) -> None:
        self._run = run
        self._offset = offset
        self._seen: Optional[tuple[int, int, int]] = None
        self._index = LogIndex()
        self._states: tuple[Optional[tuple[int, int, int]], ...] = ()
        self._copies: list[_LogCopy] = []

    def read(self, most: int) -> Piece:
        """The next piece, at most this long."""
        offset = self._offset
        index = self._read_index()
        if index.busy:
            return Piece(offset)
        if offset >= index.whole_from:
            piece = Piece(offset, _read_file(self._run.log, offset - index.base, most))
        else:
            piece = self._read_aside(offset, most, index.whole_from)
        # If the index changed meanwhile, the data may be from another offset.
        if self._read_index() != index:
            return Piece(offset)
        self._offset += piece.gone_bytes + len(piece.data)
        return piece

    def gone_bytes(self) -> int:
        """Bytes of the log that are gone."""
        index = self._read_index()
        gone = at = 0
        for copy in sorted(self._list_copies(), key=lambda copy: copy.offset):
            gone += max(0, min(copy.offset, index.whole_from) - at)
            at = max(at, copy.offset + copy.length)
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

    def _read_aside(self, offset: int, most: int, whole_from: int) -> Piece:
        next_offset = whole_from
        for copy in self._list_copies():
            end = copy.offset + copy.length
            if copy.offset <= offset < end:
                place = copy.place + offset - copy.offset
                path = os.path.join(self._run.path, copy.name)
                return Piece(offset, _read_file(path, place, min(most, end - offset, whole_from - offset)))
            if copy.offset > offset:
                next_offset = min(next_offset, copy.offset)
        return Piece(offset, gone_bytes=next_offset - offset)

    def _list_copies(self) -> list[_LogCopy]:
        paths = {name: os.path.join(self._run.path, name) for name in (TAIL, KEPT)}
        states = tuple(map(_state, paths.values()))
        if states != self._states:
            self._states = states
            self._copies = [copy for name, path in paths.items() for copy in _copies(name, path)]
        return self._copies


def _read_file(path: str, place: int, most: int) -> bytes:
    try:
        fd = open_own(path, os.O_RDONLY)
        try:
            return os.pread(fd, most, place)
        finally:
            os.close(fd)
    except OSError:
        return b""


def _copies(name: str, path: str) -> Iterator[_LogCopy]:
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
        place = 0
        while len(head := os.pread(file.fileno(), PIECE.size, place)) == PIECE.size:
            offset, length = PIECE.unpack(head)
            yield _LogCopy(name, offset, length, place + PIECE.size)
            place += PIECE.size + length


def _state(path: str) -> Optional[tuple[int, int, int]]:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def open_own(path: str, flags: int) -> int:
    """Open a file of the run. The job may have replaced it by a link or a device, which is refused.

    Raises:
        OSError: it does not exist, or is not a regular file.
    """
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise FileNotFoundError(f"{path} is not a file")
    return os.open(path, flags | os.O_NOFOLLOW)


_HEAD_BYTES = 16 << 20
_TAIL_BYTES = 16 << 20
# Beginning and passages may each take this fraction of the limit, 1 / 4.
_SHARE = 4
# 1 / 16 of the limit is given back at a time.
_STEP_SHARE = 16
_BLOCK_BYTES = 4096
_READ_BYTES = 1 << 20
# Bytes that one look may search: the supervisor does nothing else meanwhile.
_LOOK_BYTES = 64 << 20
# Marks that begin a passage, and the bytes after each that belong to it.
_MARKS = {b"Traceback (most recent call last)": 16 << 10, b"terminate called": 4 << 10, b"NCCL WARN": 1 << 10}
_LONGEST_MARK = max(map(len, _MARKS))
_LINE_BYTES = 256
_OVERLAP_BYTES = _LINE_BYTES + _LONGEST_MARK
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Give blocks of a file back to its file system. They then read as zeros; the size of the file stays.

    Raises:
        OSError: the file system does not support that.
    """
    try:
        import ctypes
    except ImportError:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
    libc = ctypes.CDLL(None, use_errno=True)
    fallocate = getattr(libc, "fallocate64", None) or libc.fallocate
    if fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, ctypes.c_int64(offset), ctypes.c_int64(length)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class LogLimit:
    """Keeps the log of one run within its limit. Call `look` repeatedly while the job lives.

    Args:
        limit_bytes: the most that the log and its copies may take on the disk; None is unlimited.
        punch: gives back blocks of a file.
    """

    def __init__(
        self, run: RunDir, limit_bytes: Optional[int], punch: Callable[[int, int, int], None] = punch_hole
    ) -> None:
        self.gone_bytes = 0  # bytes of the log that are gone
        self._run = run
        self._limit = limit_bytes
        self._punch: Optional[Callable[[int, int, int], None]] = punch
        self._index = LogIndex()
        self._size = 0
        # Bytes of the copies, and of the passages among them; then the offsets of the log up to which there is a copy,
        # and up to which passages were searched for.
        self._aside = self._passages = 0
        self._kept_to = self._looked_to = 0

    def look(self) -> bool:
        """Give back space if the log is over its limit; True if more of the log is gone now."""
        before = self.gone_bytes
        # The disk may be full, or the directory removed: the next look tries again.
        with contextlib.suppress(OSError):
            self._look()
        return self.gone_bytes != before

    def _look(self) -> None:
        fd = open_own(self._run.log, os.O_RDWR)
        try:
            size = os.fstat(fd).st_size
            if size < self._size:
                # The job has truncated it: its content is gone, and new lines continue at the old end's offset.
                self._cut_at(self._index.base + self._size)
            self._size = size
            if self._limit is not None and (over := self._used() - self._limit) > 0:
                self._give_back(fd, self._limit, over)
        finally:
            os.close(fd)

    @property
    def _end(self) -> int:
        return self._index.base + self._size

    def _used(self) -> int:
        """Bytes that the log and its copies take, with the copy of its beginning that is still to come."""
        head = 0 if self._kept_to else self._head_bytes()
        return self._end - self._index.whole_from + self._aside + head

    def _head_bytes(self) -> int:
        return min(_HEAD_BYTES, (self._limit or _HEAD_BYTES) // _SHARE)

    def _give_back(self, fd: int, limit: int, over: int) -> None:
        if self._kept_to == 0:
            self._keep(fd, -self._index.base, 0, self._head_bytes())
            self._looked_to = self._kept_to = max(self._kept_to, 1)
        wanted = self._index.whole_from + over + limit // _STEP_SHARE
        begin = max(self._looked_to, self._index.whole_from)
        if self._punch is None:
            wanted = self._end
        to = min(wanted, begin + _LOOK_BYTES, self._end)
        self._keep_passages(fd, -self._index.base, max(begin - _OVERLAP_BYTES, self._index.whole_from), to)
        self._looked_to = to
        if self._punch is not None:
            # A mark may begin before `to` and end after it: keep these bytes for the next search.
            place = (to - _OVERLAP_BYTES - self._index.base) // _BLOCK_BYTES * _BLOCK_BYTES
            self._punch_to(fd, self._index.base + place, self._punch)
        if self._punch is None and self._looked_to >= self._end:
            self._cut(fd)

    def _punch_to(self, fd: int, to: int, punch: Callable[[int, int, int], None]) -> None:
        begin = self._index.whole_from
        if to <= begin:
            return
        # The index is written first, so that no reader takes a hole for data.
        self._set_index(self._index._replace(whole_from=to))
        try:
            punch(fd, begin - self._index.base, to - begin)
        except OSError:
            self._punch = None
            self._set_index(self._index._replace(whole_from=begin))

    def _cut(self, fd: int) -> None:
        """Truncate the file to nothing, after its end was copied."""
        tail = min(_TAIL_BYTES, self._end - self._index.whole_from, (self._limit or _TAIL_BYTES) // _SHARE)
        offset = self._end - tail
        pieces = [data for _, data in _read(fd, offset - self._index.base, self._end - self._index.base)]
        self._set_index(self._index._replace(busy=True))
        # Bytes that were written meanwhile.
        size = os.fstat(fd).st_size
        pieces += [data for _, data in _read(fd, self._size, size)]
        os.ftruncate(fd, 0)
        before = self._tail_bytes()
        data = b"".join(pieces)
        try:
            with self._open_aside(TAIL, os.O_TRUNC) as file:
                file.write(PIECE.pack(offset, len(data)) + data)
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(self._path(TAIL), 0)
        self._aside += self._tail_bytes() - before
        # The next cut overwrites `log.tail`, so passages in it are copied now, those that came last included.
        self._size = size
        with contextlib.suppress(OSError), open(open_own(self._path(TAIL), os.O_RDONLY), "rb", buffering=0) as file:
            begin = max(self._looked_to - _OVERLAP_BYTES, offset)
            self._keep_passages(file.fileno(), PIECE.size - offset, begin, self._end)
        self._cut_at(self._end)
        self._size = 0

    def _tail_bytes(self) -> int:
        try:
            return os.stat(self._path(TAIL)).st_size
        except OSError:
            return 0

    def _cut_at(self, offset: int) -> None:
        self._looked_to = max(self._looked_to, offset)
        self._set_index(LogIndex(base=offset, whole_from=offset))

    def _set_index(self, index: LogIndex) -> None:
        self._run.write(INDEX, index.record())
        self._index = index
        self.gone_bytes = LogReader(self._run).gone_bytes()

    def _keep_passages(self, fd: int, shift: int, begin: int, to: int) -> None:
        """Copy passages that begin in this part of the log; `shift` turns an offset of the log into one of the file."""
        for place, block in _read(fd, begin + shift, to + shift, overlap=_OVERLAP_BYTES):
            for start, end in _find_passages(block):
                self._keep(fd, shift, place + start - shift, place + end - shift, is_passage=True)

    def _keep(self, fd: int, shift: int, begin: int, end: int, *, is_passage: bool = False) -> None:
        """Copy a part of the log, if it has no copy yet and there is room."""
        begin, end = max(begin, self._kept_to), min(end, self._end)
        if is_passage and self._limit is not None:
            end = min(end, begin + self._limit // _SHARE - self._passages - PIECE.size)
        length = end - begin
        if length <= 0:
            return
        # On a full disk this fails; the space that is given back afterwards makes room for the next piece.
        try:
            self._append(fd, shift, begin, length)
        except OSError:
            return
        self._kept_to = end
        self._aside += PIECE.size + length
        self._passages += PIECE.size + length if is_passage else 0

    def _append(self, fd: int, shift: int, begin: int, length: int) -> None:
        place = begin + shift
        with self._open_aside(KEPT, os.O_APPEND) as file:
            before = os.fstat(file.fileno()).st_size
            try:
                file.write(PIECE.pack(begin, length))
                for _, data in _read(fd, place, place + length):
                    file.write(data)
            except OSError:
                os.ftruncate(file.fileno(), before)
                raise

    def _open_aside(self, name: str, flags: int) -> io.FileIO:
        flags |= os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
        return open(os.open(self._path(name), flags, 0o600), "wb", buffering=0)

    def _path(self, name: str) -> str:
        return os.path.join(self._run.path, name)


def _read(fd: int, begin: int, end: int, *, overlap: int = 0) -> Iterator[tuple[int, bytes]]:
    """Offsets and data of a file's blocks; each but the first repeats `overlap` bytes of the one before."""
    place = begin
    while place < end and (data := os.pread(fd, min(_READ_BYTES, end - place), place)):
        yield place, data
        if place + len(data) >= end:
            return
        place += max(1, len(data) - overlap)


def _find_passages(block: bytes) -> list[tuple[int, int]]:
    """Begin and end of passages, in order; an end may lie beyond the block."""
    places = []
    for mark, length in _MARKS.items():
        at = block.find(mark)
        while at >= 0:
            places.append((max(block.rfind(b"\n", 0, at) + 1, at - _LINE_BYTES), at + length))
            at = block.find(mark, at + 1)
    passages: list[tuple[int, int]] = []
    for start, end in sorted(places):
        if passages and start <= passages[-1][1]:
            passages[-1] = (passages[-1][0], max(end, passages[-1][1]))
        else:
            passages.append((start, end))
    return passages
