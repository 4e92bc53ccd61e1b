"""Control groups: the CPU quota and the memory of a process, and kills for lack of memory.

Memory is the machine's, or less where control groups allow less, of version 1 or 2. Limits of groups around a
container, which are not mounted in it, cannot be seen from here. GPUs have memory of their own, which is not spoken of.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Optional

from ..channel import Record
from ..files import read_mounts, read_number, read_text, try_read

_US_PER_NS = 1e-3


class Hierarchy(NamedTuple):
    """A mounted tree of control groups."""

    controller: str  # what its groups are wanted for, `cpu` or `memory`
    unified: bool  # whether it is version 2, which has one tree for all controllers
    root: str  # the group that is mounted
    place: str  # where it is mounted

    def group_of(self, membership: str) -> Optional[ControlGroup]:
        """The group of a process, by the text of its /proc/PID/cgroup; None where what is mounted does not hold it."""
        for line in membership.splitlines():
            _, controllers, path = line.split(":", 2)
            if (not controllers) if self.unified else (self.controller in controllers.split(",")):
                below = os.path.relpath(path, self.root)
                # A group above the root of our namespace is written as /.. (cgroup_namespaces(7)).
                outside = path.startswith("/..") or below.startswith("..")
                return None if outside else ControlGroup(self, os.path.normpath(os.path.join(self.place, below)))
        return None


class ControlGroup(NamedTuple):
    """A control group: its directory in a tree."""

    hierarchy: Hierarchy
    path: str

    def upwards(self) -> Iterator[str]:
        """This group and those around it, as far as they are mounted."""
        path = self.path
        yield path
        while path != self.hierarchy.place:
            path = os.path.dirname(path)
            yield path


class GroupFinder:
    """Finds the group of a process, which may be moved to another at any time; the tree of groups is found once."""

    def __init__(self, controller: str, mountinfo: str = "/proc/self/mountinfo") -> None:
        self._controller = controller
        self._mountinfo = mountinfo
        self._hierarchy: Optional[Hierarchy] = None
        self._has_looked = False

    def find(self, pid: Optional[int]) -> Optional[ControlGroup]:
        """The group of this process; our own where there is none, or no more. None where it cannot be seen."""
        if not self._has_looked:
            self._has_looked, self._hierarchy = True, find_hierarchy(self._controller, self._mountinfo)
        if self._hierarchy is None:
            return None
        theirs = None if pid is None else try_read(f"/proc/{pid}/cgroup")
        return self._hierarchy.group_of(read_text("/proc/self/cgroup") if theirs is None else theirs)


def find_hierarchy(controller: str, mountinfo: str = "/proc/self/mountinfo") -> Optional[Hierarchy]:
    """The tree with this controller: version 1 where that is mounted with it, else version 2; None is neither."""
    hierarchies: dict[bool, Hierarchy] = {}
    for mount in read_mounts(mountinfo):
        unified = mount.filesystem == "cgroup2"
        has_it = unified or (mount.filesystem == "cgroup" and controller in mount.options.split(","))
        # A mount that another one hides shows no groups.
        if has_it and os.path.exists(os.path.join(mount.place, "cgroup.procs")):
            hierarchies[unified] = Hierarchy(controller, unified, mount.root, mount.place)
    return hierarchies.get(False) or hierarchies.get(True)


def read_cpu_limit(group: Optional[ControlGroup]) -> Record:
    """A `cgroup` record of this group or the one around it whose limit is the tightest; of equals the nearest.

    Raises:
        OSError, ValueError: the group cannot be seen, is gone, or does not answer as groups do.
    """
    if group is None:
        raise OSError("no control group with the cpu controller can be seen")
    unified = group.hierarchy.unified
    limits = []
    for path in group.upwards():
        try:
            quota = _read_quota(path, unified=unified)
        except PermissionError:
            # A group around may be closed to us; our own quota still counts.
            if path == group.path:
                raise
            continue
        if quota is not None:
            limits.append((path, quota))
    limited, quota_cores = min(limits, key=lambda limit: limit[1], default=(group.path, None))
    stat = _read_stat(limited)
    return {
        "kind": "cgroup",
        "quota_cores": quota_cores,
        "throttled_us": stat.get("throttled_usec", stat.get("throttled_time", 0) * _US_PER_NS),
        "periods": stat.get("nr_periods", 0),
        "throttled_periods": stat.get("nr_throttled", 0),
    }


def _read_quota(group: str, *, unified: bool) -> Optional[float]:
    """Processors that a group may use; None is without a limit of its own."""
    try:
        if unified:
            quota, period = read_text(f"{group}/cpu.max").split()
        else:
            quota, period = read_text(f"{group}/cpu.cfs_quota_us"), read_text(f"{group}/cpu.cfs_period_us")
    except FileNotFoundError:
        # The root has none, nor has a group to which the controller was not handed down.
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)


def _read_stat(group: str) -> dict[str, int]:
    try:
        lines = read_text(f"{group}/cpu.stat").splitlines()
    except FileNotFoundError:
        return {}
    return {name: int(value) for name, value in (line.split() for line in lines)}


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


def limited_groups(group: ControlGroup) -> Iterator[GroupMemory]:
    """This group and those around it, as far as they are mounted and have a limit (cgroups(7)).

    As with processors, the lowest limit is the one that counts, however far up it is.
    """
    files = _VERSION_2 if group.hierarchy.unified else _VERSION_1
    for path in group.upwards():
        # Version 2 writes `max` for none; version 1 a number beyond any machine's memory. The root of version 2, and a
        # group to which the controller was not handed down, have no such file.
        limit = read_number(os.path.join(path, files.limit))
        if limit is not None:
            yield GroupMemory(limit, _held(path, files))


def counter_of(group: Optional[ControlGroup]) -> str:
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
