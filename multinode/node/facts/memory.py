"""The memory that a process can have, and the kills for lack of it.

It is the machine's, or less where control groups allow less, of version 1 or 2. Limits of groups around a container,
which are not mounted in it, cannot be seen from here. GPUs have memory of their own, which is not spoken of.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Optional

from ..kernel_files import read_number, read_text
from .cgroups import Group, GroupFinder

_BYTES_PER_KIB = 1 << 10
_KILLS_INTERVAL_S = 1.0
# The kills of the whole machine, whoever they belonged to. Like the counters of groups, it tells them since Linux 4.13.
_MACHINE_KILLS = "/proc/vmstat"


class Memory(NamedTuple):
    """In bytes."""

    total: int
    available: int  # of it, what could still be had without swapping


class GroupMemory(NamedTuple):
    """Of a control group with a limit, in bytes."""

    limit: int  # what its processes may hold together
    held: Optional[int]  # what they do, less what the kernel would take back for them; None where it does not tell


class _Files(NamedTuple):
    """Where a version tells a group's figures, and which of memory.stat the kernel takes back when memory is short.

    They are those that MemAvailable of the machine counts as available, too (proc_meminfo(5)): the page cache, however
    lately it was used, and of the kernel's own memory what version 2 tells.
    """

    limit: str
    used: str
    given_back: frozenset[str]


_VERSION_1 = _Files(
    "memory.limit_in_bytes", "memory.usage_in_bytes", frozenset({"total_inactive_file", "total_active_file"})
)
_VERSION_2 = _Files("memory.max", "memory.current", frozenset({"inactive_file", "active_file", "slab_reclaimable"}))


class MemoryReader:
    """Reads it for a process that may be moved to another group at any time."""

    def __init__(self, mountinfo: str = "/proc/self/mountinfo") -> None:
        self._finder = GroupFinder("memory", mountinfo)

    def read(self, pid: Optional[int] = None) -> Memory:
        """What this process can have; we ourselves where there is none, or no more."""
        return usable_memory(read_meminfo(), self._groups(pid))

    def limit(self) -> Optional[int]:
        """The lowest limit, in bytes, of our control groups; None if the machine has no more."""
        lowest = min((group.limit for group in self._groups(None)), default=None)
        return lowest if lowest is not None and lowest < read_meminfo().total else None

    def _groups(self, pid: Optional[int]) -> list[GroupMemory]:
        """Those that limit it; what cannot be seen limits nothing."""
        with contextlib.suppress(OSError, ValueError):
            group = self._finder.find(pid)
            return [] if group is None else list(limited_groups(group))
        return []


class MemoryKills:
    """Processes that the kernel killed for lack of memory in a job's own control group, or on the whole machine.

    Counts from its first look on. A job may be moved to another group meanwhile: look again and again.

    Args:
        find: the file that counts where a process is, and where we are ourselves if there is none, or no more.
    """

    def __init__(self, find: Optional[Callable[[Optional[int]], str]] = None) -> None:
        self.count: Optional[int] = None  # kills that were seen so far; None where the kernel tells none
        self._groups = GroupFinder("memory")
        self._find = self._find_counter if find is None else find
        self._file: Optional[str] = None
        self._told: Optional[int] = None
        self._due = 0.0

    def watch(self, pid: int) -> None:
        """Look where this process is, once a second at most."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _KILLS_INTERVAL_S
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

    def _find_counter(self, pid: Optional[int]) -> str:
        try:
            return counter_of(self._groups.find(pid))
        except OSError:
            return _MACHINE_KILLS

    def _follow(self, file: str) -> None:
        if file != self._file:
            # What it tells of already was before this job came there.
            self._file, self._told = file, read_counter(file)
            if self._told is not None and self.count is None:
                self.count = 0


def read_meminfo(path: str = "/proc/meminfo") -> Memory:
    """The machine's."""
    lines = dict(line.split(":", 1) for line in read_text(path).splitlines())
    total, available = (int(lines[name].split()[0]) * _BYTES_PER_KIB for name in ("MemTotal", "MemAvailable"))
    return Memory(total, available)


def usable_memory(machine: Memory, groups: list[GroupMemory]) -> Memory:
    """The least of what the machine has, and each of the groups, any of which can stop the process."""
    lefts = [group.limit - group.held for group in groups if group.held is not None]
    total = min([machine.total, *(group.limit for group in groups)])
    return Memory(total, max(0, min([total, machine.available, *lefts])))


def limited_groups(group: Group) -> Iterator[GroupMemory]:
    """This group and those around it, as far as they are mounted and have a limit (cgroups(7)).

    Unlike processors, of which the kernel gives each group its share anew, memory is counted in every group around: the
    lowest limit is the one that counts, however far up it is.
    """
    files = _VERSION_2 if group.hierarchy.unified else _VERSION_1
    for path in group.upwards():
        # Version 2 writes `max` for none; version 1 a number beyond any machine's memory. The root of version 2, and a
        # group to which the controller was not handed down, have no such file.
        limit = read_number(os.path.join(path, files.limit))
        if limit is not None:
            yield GroupMemory(limit, _held(path, files))


def counter_of(group: Optional[Group]) -> str:
    """The file that counts kills in this group, or on the whole machine where none can be seen.

    A group without the controller is accounted for by the nearest one around it that has it.
    """
    if group is None:
        return _MACHINE_KILLS
    name = "memory.events" if group.hierarchy.unified else "memory.oom_control"
    files = (os.path.join(path, name) for path in group.upwards())
    return next((file for file in files if read_counter(file) is not None), _MACHINE_KILLS)


def read_counter(file: str) -> Optional[int]:
    """Kills that a file tells of; None where it tells none."""
    with contextlib.suppress(OSError, ValueError):
        rows = map(str.split, read_text(file).splitlines())
        return next((int(row[1]) for row in rows if row[:1] == ["oom_kill"]), None)
    return None


def _held(group: str, files: _Files) -> Optional[int]:
    used = read_number(os.path.join(group, files.used))
    if used is None:
        return None
    given_back = 0
    with contextlib.suppress(OSError, ValueError):
        rows = map(str.split, read_text(os.path.join(group, "memory.stat")).splitlines())
        given_back = sum(int(size) for name, size in rows if name in files.given_back)
    return max(0, used - given_back)
