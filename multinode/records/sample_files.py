"""Sample files: records of a run, one JSON object per line; read whole, by offset, or in stretches of a long run."""

from __future__ import annotations

import io
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

LONGEST_LINE = 1 << 24
"""A record with the times of a million calls."""
_TO_THE_END = 1 << 62
# The kind of a record is at the beginning of its line; step records are as many as steps.
_HEAD_BYTES = 64
_KIND = re.compile(rb'"kind": ?"(\w+)"')
_STEP = re.compile(rb'"step": ?(\d{1,18})\b')
_OF_A_STEP = {b"step", b"ddp", b"device_wait", b"sync"}
_STEP_RECORD = re.compile(rb'"kind": ?"step"[^\n]*?"step": ?(\d{1,18})\b')
_END_OF_OTHERS = re.compile(rb'\n(?![^\n]{0,%d}?"kind": ?"(?:%s)")' % (_HEAD_BYTES, b"|".join(sorted(_OF_A_STEP))))
# Of each kind of other records, this much is read at the beginning of a file and at its end.
_END_BYTES = 1 << 19
# Whatever kinds a node invents.
_MOST_KINDS = 64
# A block without a step to read is searched for other records only.
_BLOCK_BYTES = 1 << 16
# Several records of steps fit into the end of it.
_BLOCK_END_BYTES = 1 << 12
_LEAST_STEPS = 100
# That are read of a file without steps.
_LEAST_STRETCHES = 16


def read_lines(path: Path, begin: int = 0, end: int = _TO_THE_END) -> Iterator[tuple[int, bytes]]:
    """The lines that begin between two offsets, with their offsets; overlong ones in pieces."""
    with path.open("rb") as file:
        yield from _lines(file, begin, end)


def read_tail(path: Path, size_bytes: int) -> Iterator[bytes]:
    """The last lines."""
    for _, line in read_lines(path, max(0, path.stat().st_size - size_bytes)):
        yield line


def _lines(file: BinaryIO, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Like `read_lines`; nothing else may move the file position meanwhile."""
    at = file.seek(max(0, begin - 1))
    if begin:
        at += len(file.readline(LONGEST_LINE))
    while at < end and (line := file.readline(LONGEST_LINE)):
        yield at, line
        at += len(line)


class EvenStretches:
    """About `most_bytes` of a long run's files: evenly spread stretches of steps, the same ones in each file.

    Each file is read once, from its beginning to its end. Of each other kind of record, the first and the last ones are
    read. A file without steps is read in stretches of its bytes.

    Args:
        least_steps: per stretch.
    """

    def __init__(self, paths: Iterable[Path], most_bytes: int, least_steps: int = 0) -> None:
        paths = list(paths)
        self._every = max(2, -(-sum(path.stat().st_size for path in paths) // max(1, most_bytes)))
        self._length = max(_LEAST_STEPS, least_steps)
        self._stepped = {path: step for path in paths if (step := _last_step(path)) is not None}
        self._last = max(self._stepped.values(), default=0)
        self._first = self._last + 1

    @property
    def recorded(self) -> int:
        """Steps of the last training, in the files that have been read."""
        return self._last - self._first + 1

    def lines(self, path: Path) -> Iterator[bytes]:
        """The selected lines of one of the files."""
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            yield from self._of_steps(file) if path in self._stepped else self._of_bytes(file, size)

    def _of_bytes(self, file: BinaryIO, size: int) -> Iterator[bytes]:
        # As long as the stretches of steps, if the records of a file are spread evenly over the steps.
        count = max(self._last // self._length, _LEAST_STRETCHES * self._every)
        each = size // count + 1 if size > _END_BYTES else size
        for begin in [*range(0, max(0, size - each), each * self._every), max(0, size - each)]:
            yield from (line for _, line in _lines(file, begin, begin + each))

    def _of_steps(self, file: BinaryIO) -> Iterator[bytes]:
        others: dict[bytes, _Ends] = {}
        first = before = 0
        while block := file.read(_BLOCK_BYTES) + file.readline(LONGEST_LINE):
            span = _span(block)
            is_skipped = span is not None and span[0] >= before and not self._selects(*span)
            if is_skipped and span is not None:
                first, before = first or span[0], span[1]
            for line in _others(block) if is_skipped else io.BytesIO(block):
                kind = _kind(line)
                if kind in _OF_A_STEP:
                    match = _STEP.search(line)
                    step = int(match[1]) if match is not None else 0
                    if kind == b"step":
                        # A restarted worker counts its steps from 1.
                        first, before = first if first and step >= before else step, step
                    if self._selects(step, step):
                        yield line
                else:
                    kind = kind if kind in others or len(others) < _MOST_KINDS else b""
                    yield from others.setdefault(kind, _Ends()).take(line)
        self._first = min(self._first, first or self._first)
        for ends in others.values():
            yield from ends.last

    def _selects(self, first: int, last: int) -> bool:
        """Whether one of these steps is read: those of every n-th stretch, and the last ones."""
        begin, end = ((step - 1) // self._length for step in (first, last))
        is_in_gap = begin % self._every > 0 and begin // self._every == end // self._every
        return not is_in_gap or (first <= self._last and last > self._last - self._length)


class _Ends:
    """The first and the last lines of a kind."""

    def __init__(self) -> None:
        self.last: deque[bytes] = deque()
        self._first_left = self._last_left = _END_BYTES

    def take(self, line: bytes) -> Iterator[bytes]:
        """The line if it is one of the first; otherwise it is kept while it is one of the last."""
        if self._first_left > 0:
            self._first_left -= len(line)
            yield line
            return
        self.last.append(line)
        self._last_left -= len(line)
        while self._last_left < 0:
            self._last_left += len(self.last.popleft())


def _kind(line: bytes) -> bytes:
    match = _KIND.search(line, 0, _HEAD_BYTES)
    return match[1] if match is not None else b""


def _last_step(path: Path) -> int | None:
    steps = [match[1] for line in read_tail(path, _END_BYTES) for match in _STEP_RECORD.finditer(line)]
    return int(steps[-1]) if steps else None


def _span(block: bytes) -> tuple[int, int] | None:
    """The first and the last step of whole lines, if they have some and no worker began anew between them."""
    first = _STEP_RECORD.search(block)
    last = deque(_STEP_RECORD.finditer(block, max(0, len(block) - _BLOCK_END_BYTES)), maxlen=1)
    if first is None or not last or int(first[1]) > int(last[0][1]):
        return None
    return int(first[1]), int(last[0][1])


def _others(block: bytes) -> Iterator[bytes]:
    """The lines of a block that are no records of steps."""
    block = b"\n" + block
    for match in _END_OF_OTHERS.finditer(block):
        begin = match.end()
        end = block.find(b"\n", begin) + 1
        if begin < len(block):
            yield block[begin:end] if end else block[begin:]
