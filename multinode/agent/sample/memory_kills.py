"""MemoryKills: processes that the kernel killed for lack of memory while a job ran, in the job's own control group.

Where no group can be seen they are those of the whole machine, whoever they belonged to.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Optional

from ..facts.cgroups import Hierarchy, find_hierarchy, group_of, read_membership

__all__ = ["MemoryKills", "counter_of", "find_counter", "read_counter"]

_INTERVAL_S = 1.0
# Like the counters of groups, it tells kills since Linux 4.13.
_MACHINE = "/proc/vmstat"


def find_counter(pid: Optional[int]) -> str:
    """The file that counts kills where this process is; where we are ourselves if there is none, or no more."""
    try:
        return counter_of(find_hierarchy("memory"), read_membership(pid))
    except OSError:
        return _MACHINE


def counter_of(hierarchy: Optional[Hierarchy], membership: str) -> str:
    """The file that counts kills in the group of a process, or on the whole machine.

    Args:
        hierarchy: the tree that knows memory; None is none to be seen.
        membership: the text of the process's /proc/PID/cgroup.
    """
    group = None if hierarchy is None else group_of(hierarchy, membership)
    if hierarchy is None or group is None:
        return _MACHINE
    name = "memory.events" if hierarchy.unified else "memory.oom_control"
    # A group without the controller is accounted for by the nearest one around it that has it.
    while group != hierarchy.place and read_counter(os.path.join(group, name)) is None:
        group = os.path.dirname(group)
    file = os.path.join(group, name)
    return _MACHINE if read_counter(file) is None else file


def read_counter(file: str) -> Optional[int]:
    """Kills that a file tells of; None where it tells none."""
    try:
        with open(file, encoding="ascii") as lines:
            found = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
        return int(found[0]) if found else None
    except (OSError, ValueError):
        return None


class MemoryKills:
    """Counts from its first look on. A job may be moved to another group meanwhile: look again and again.

    Args:
        find: the file that counts where a process is.

    Attributes:
        count: kills that were seen so far; None where the kernel tells none.
    """

    def __init__(self, find: Callable[[Optional[int]], str] = find_counter) -> None:
        self.count: Optional[int] = None
        self._find = find
        self._file: Optional[str] = None
        self._told: Optional[int] = None
        self._due = 0.0

    def watch(self, pid: int) -> None:
        """Look where this process is, once a second at most."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _INTERVAL_S
            self.look()
            self._follow(self._find(pid))

    def look(self) -> None:
        """Count what came since the last look, where that was; at first where we are ourselves."""
        if self._file is None:
            self._follow(self._find(None))
            return
        now = read_counter(self._file)
        if now is not None and self._told is not None:
            self.count = (self.count or 0) + now - self._told
            self._told = now

    def _follow(self, file: str) -> None:
        if file != self._file:
            # What it tells of already was before this job came there.
            self._file, self._told = file, read_counter(file)
            if self._told is not None and self.count is None:
                self.count = 0
