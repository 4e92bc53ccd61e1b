"""Processor time: of all cores of the node, and of all processes of a job together, those that have ended included."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from typing import NamedTuple, Optional

from ..kernel_files import read_text
from ..run.processes import list_pids, stat_fields

# Columns of the first line of /proc/stat (proc(5)). Guest time, after these, is counted in the first two already.
_IDLE, _IOWAIT, _STEAL, _COLUMNS = 3, 4, 7, 8
# Fields after the name in /proc/PID/stat (proc(5)): the parent; user and system time, then both of children waited for.
_PARENT = 1
_TIMES = slice(11, 15)
_LOOK_AGAIN_S = 30.0
# Clock ticks are 10 ms: over less time than this they say little.
_LEAST_SPAN_S = 0.5


class Ticks(NamedTuple):
    """Clock ticks of all cores since boot.

    Attributes:
        idle: in which nothing ran; `iowait` those of them in which a disk was waited for.
        steal: taken by the hypervisor.
    """

    all: int
    idle: int
    iowait: int
    steal: int


def read_ticks(path: str = "/proc/stat") -> Ticks:
    """What the cores did so far.

    Raises:
        OSError, ValueError: the kernel does not tell.
    """
    columns = [int(word) for word in read_text(path).partition("\n")[0].split()[1:]][:_COLUMNS]
    if len(columns) < _COLUMNS:
        raise ValueError(f"{path} does not begin with the times of all cores")
    return Ticks(sum(columns), columns[_IDLE] + columns[_IOWAIT], columns[_IOWAIT], columns[_STEAL])


class JobClock:
    """Processor seconds of all descendants of a process that adopts its orphans.

    Of strangers no more is read than their names: whose child a process is, is asked once. As its number may come to
    mean another process, all are asked again every half minute.

    Args:
        root: the process, which is the caller: it has waited for those of its children that are gone.
        spared: pids that do not count, nor do their children; may change.
    """

    def __init__(self, root: int, spared: Collection[int]) -> None:
        self._root = root
        self._spared = spared
        self._members: set[int] = set()
        self._strangers: set[int] = set()
        self._look_again = 0.0
        self._before: Optional[tuple[float, float]] = None

    def read_cores(self) -> Optional[float]:
        """Cores used since this was asked before; None at first, or where that is too short a time.

        Raises:
            OSError: /proc cannot be read.
        """
        before, now = self._before, time.monotonic()
        if before is not None and now - before[0] < _LEAST_SPAN_S:
            return None
        self._before = (now, self.read_s())
        # A process that ends between two looks may be missing for a moment.
        return None if before is None else round(max(0.0, self._before[1] - before[1]) / (now - before[0]), 3)

    def read_s(self) -> float:
        """Processor seconds so far.

        Raises:
            OSError: /proc cannot be read.
        """
        self._meet()
        own = os.times()
        ticks = 0
        for pid in sorted(self._members):
            fields = stat_fields(pid)
            ticks += sum(map(int, fields[_TIMES])) if fields else 0
        return own.children_user + own.children_system + ticks / os.sysconf("SC_CLK_TCK")

    def _meet(self) -> None:
        """Tell new processes apart: ours and strangers."""
        there = list_pids()
        now = time.monotonic()
        if now >= self._look_again:
            self._look_again = now + _LOOK_AGAIN_S
            self._members, self._strangers = set(), set()
        self._members &= there - set(self._spared)
        self._strangers &= there
        new = {}
        for pid in there - self._members - self._strangers - {self._root, *self._spared}:
            fields = stat_fields(pid)
            if fields:
                new[pid] = int(fields[_PARENT])
        ours = {self._root, *self._members}
        while found := {pid for pid, parent in new.items() if parent in ours} - ours:
            ours |= found
        self._members = ours - {self._root}
        self._strangers |= new.keys() - ours
