"""Sample files: records of a run, one JSON object per line; read whole, by offset, or in stretches of a long run."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

LONGEST_LINE = 1 << 24
"""A record with the times of a million calls."""
_TO_THE_END = 1 << 62
# The kind of a record is at the beginning of its line; step records are as many as steps.
_HEAD_BYTES = 64
_KIND = re.compile(rb'"kind": ?"(\w+)"')
_OF_A_STEP = {b"step", b"ddp", b"device_wait", b"sync"}
_STEP = re.compile(rb'"step": ?(\d{1,18})\b')
_TRAFFIC = re.compile(rb'"traffic": ?(\d{1,18})\b')
# Records that occur once are at the ends of a file.
_END_BYTES = 1 << 20
# This close to a step, the file is read line by line.
_NEAR_BYTES = 1 << 16
# Offsets at which a file is checked for a restarted worker.
_LOOKS = 64
# Steps per stretch, or bytes if there are no steps.
_LEAST_STEPS = 100
_LEAST_BYTES = 1 << 14
# Whatever number of steps a node reports.
_MOST_STRETCHES = 1000


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


class _Mark(NamedTuple):
    """A step's record, and its offset."""

    at: int
    step: int


class _Training(NamedTuple):
    """The last training in a file: its offset, first step and last step."""

    begin: int
    first: _Mark
    last: _Mark


class EvenStretches:
    """At most `most_bytes` of a long run's files: evenly spread stretches, of the same steps in each file.

    Records that occur once are read at the ends of each file, and the calls of a step wherever they are. A file without
    steps is read in as many stretches, spread over its bytes.

    Args:
        least_steps: per stretch.
    """

    def __init__(self, paths: Iterable[Path], most_bytes: int, least_steps: int = 0) -> None:
        sizes = {path: path.stat().st_size for path in paths}
        self._share = min(1.0, most_bytes / max(1, sum(sizes.values())))
        self._trainings = {path: _last_training(path, size) for path, size in sizes.items()}
        trainings = [training for training in self._trainings.values() if training is not None]
        first = min((training.first.step for training in trainings), default=1)
        last = max((training.last.step for training in trainings), default=0)
        self.recorded = last - first + 1
        self._length = max(_LEAST_STEPS, least_steps)
        self._count = max(2, min(_MOST_STRETCHES, int(self.recorded * self._share) // self._length))
        apart = max(float(self._length), (self.recorded - self._length) / (self._count - 1))
        self._starts = [first + int(number * apart) for number in range(self._count)]

    def lines(self, path: Path) -> Iterator[bytes]:
        """The selected lines of one of the files."""
        training = self._trainings[path]
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if training is None:
                for begin, end in self._of_bytes(size):
                    yield from (line for _, line in _lines(file, begin, end))
            else:
                yield from _read(file, training, list(self._of_steps(file, training, size)), size)

    def _of_bytes(self, size: int) -> Iterator[tuple[int, int]]:
        each = max(_LEAST_BYTES, int(size * self._share / self._count))
        if size <= max(_END_BYTES, self._count * each):
            yield 0, size
            return
        for number in range(self._count):
            begin = number * (size - each) // (self._count - 1)
            yield begin, begin + each

    def _of_steps(self, file: BinaryIO, training: _Training, size: int) -> Iterator[tuple[int, int]]:
        low = training.first
        for start in self._starts:
            if start > training.last.step:
                return
            begin = training.begin
            if start > training.first.step:
                begin = _find(file, start - 1, low, training.last) + 1
                low = _Mark(begin, start - 1)
            end = start + self._length
            yield begin, size if end > training.last.step else _find(file, end, low, training.last)


def _read(file: BinaryIO, training: _Training, stretches: Sequence[tuple[int, int]], size: int) -> Iterator[bytes]:
    """The stretches, and the rare records at the ends of the file and at the start of the training, in order.

    The calls of a step are recorded once, before the first step with them: possibly between two stretches.
    """
    seen: set[bytes] = set()
    called: set[bytes] = set()
    gaps: list[tuple[int, int]] = []
    for begin, end, is_read in _pieces(training, stretches, size):
        if is_read is None:
            gaps.append((max(begin, training.begin), end))
            continue
        for at, line in _lines(file, begin, end):
            kind = _kind(line)
            if is_read or kind not in _OF_A_STEP:
                match = _TRAFFIC.search(line) if at >= training.begin and kind in {b"step", b"traffic"} else None
                if match is not None:
                    (seen if kind == b"traffic" else called).add(match[1])
                yield line
    for begin, end in gaps:
        for _, line in _lines(file, begin, end if called - seen else begin):
            match = _TRAFFIC.search(line) if _kind(line) == b"traffic" else None
            if match is not None and match[1] in called - seen:
                seen.add(match[1])
                yield line


def _pieces(
    training: _Training, stretches: Sequence[tuple[int, int]], size: int
) -> Iterator[tuple[int, int, bool | None]]:
    ends = sorted({(at, at + _END_BYTES) for at in (0, training.begin, max(0, size - _END_BYTES))})
    at = 0
    for begin, end in [*stretches, (size, size)]:
        for low, high in ends:
            if max(at, low) < min(begin, high):
                yield at, max(at, low), None
                yield max(at, low), min(begin, high), False
                at = min(begin, high)
        yield at, begin, None
        yield begin, end, True
        at = end


def _kind(line: bytes) -> bytes:
    match = _KIND.search(line, 0, _HEAD_BYTES)
    return match[1] if match is not None else b""


def _steps(file: BinaryIO, begin: int, end: int) -> Iterator[_Mark]:
    for at, line in _lines(file, begin, end):
        match = _STEP.search(line) if _kind(line) == b"step" else None
        if match is not None:
            yield _Mark(at, int(match[1]))


def _last_training(path: Path, size: int) -> _Training | None:
    with path.open("rb") as file:
        at_end = list(_steps(file, max(0, size - _END_BYTES), size))
        if not at_end:
            return None
        last = at_end[-1]
        looks = (next(_steps(file, size * number // _LOOKS, last.at), last) for number in range(1, _LOOKS))
        marks = sorted({*_steps(file, 0, min(_END_BYTES, last.at)), *looks, last})
        # A restarted worker counts its steps from 1.
        anew = [place for place in range(1, len(marks)) if marks[place].step < marks[place - 1].step]
        if not anew:
            return _Training(0, marks[0], last)
        earlier, later = marks[anew[-1] - 1 : anew[-1] + 1]
        low, high = earlier.at, later.at
        while high - low > _NEAR_BYTES:
            mark = next(_steps(file, (low + high) // 2, later.at), later)
            low, high = (low, (low + high) // 2) if mark.step <= later.step else (mark.at, high)
        begin = low
        for mark in _steps(file, low, later.at):
            if mark.step <= later.step:
                return _Training(begin, mark, last)
            begin = mark.at
        return _Training(begin, later, last)


def _find(file: BinaryIO, step: int, low: _Mark, high: _Mark) -> int:
    """Offset of the first step record from `step` on, between that of an earlier one and a later one."""
    for turn in itertools.count():
        width = high.at - low.at
        if width <= _NEAR_BYTES:
            break
        # Step records have nearly equal lengths.
        near = int(width * (step - low.step) / max(1, high.step - low.step))
        guess = (near - _NEAR_BYTES // 2, near + _NEAR_BYTES // 2, width // 2)[turn % 3]
        guess = low.at + min(max(guess, 1), width - 1)
        mark = next(_steps(file, guess, high.at), high)
        low, high = (mark, high) if mark.step < step else (low, _Mark(guess, mark.step))
    return next((mark.at for mark in _steps(file, low.at, _TO_THE_END) if mark.step >= step), _TO_THE_END)
