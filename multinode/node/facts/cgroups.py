"""Control groups, version 1 and 2: the CPU quota and the memory of a process, and OOM kills.

Memory is the machine's, or less if a control group has a limit. Limits of groups around a container are not visible
inside it. GPU memory is not part of this.
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

    controller: str  # `cpu` or `memory`
    unified: bool  # whether it is version 2, which has one tree for all controllers
    root: str  # path of the group that is mounted
    place: str  # mount point

    def group_of(self, membership: str) -> Optional[ControlGroup]:
        """The group of a process, by the text of its /proc/PID/cgroup; None if it is outside the mounted tree."""
        for line in membership.splitlines():
            _, controllers, path = line.split(":", 2)
            if (not controllers) if self.unified else (self.controller in controllers.split(",")):
                below = os.path.relpath(path, self.root)
                # A group above the root of our namespace is written as /.. (cgroup_namespaces(7)).
                outside = path.startswith("/..") or below.startswith("..")
                return None if outside else ControlGroup(self, os.path.normpath(os.path.join(self.place, below)))
        return None


class ControlGroup(NamedTuple):
    """A control group: its tree, and its directory there."""

    hierarchy: Hierarchy
    path: str

    def upwards(self) -> Iterator[str]:
        """Directories of this group and its parents, as far as they are mounted."""
        path = self.path
        yield path
        while path != self.hierarchy.place:
            path = os.path.dirname(path)
            yield path


class GroupFinder:
    """Finds the group of a process. A process may be moved at any time; the tree of groups is found once."""

    def __init__(self, controller: str, mountinfo: str = "/proc/self/mountinfo") -> None:
        self._controller = controller
        self._mountinfo = mountinfo
        self._hierarchy: Optional[Hierarchy] = None
        self._has_looked = False

    def find(self, pid: Optional[int]) -> Optional[ControlGroup]:
        """The group of a process, or our own if the process is gone or None; None if the group is not visible."""
        if not self._has_looked:
            self._has_looked, self._hierarchy = True, find_hierarchy(self._controller, self._mountinfo)
        if self._hierarchy is None:
            return None
        theirs = None if pid is None else try_read(f"/proc/{pid}/cgroup")
        return self._hierarchy.group_of(read_text("/proc/self/cgroup") if theirs is None else theirs)


def find_hierarchy(controller: str, mountinfo: str = "/proc/self/mountinfo") -> Optional[Hierarchy]:
    """The mounted tree with this controller, version 1 before version 2; None if there is none."""
    hierarchies: dict[bool, Hierarchy] = {}
    for mount in read_mounts(mountinfo):
        unified = mount.filesystem == "cgroup2"
        has_it = unified or (mount.filesystem == "cgroup" and controller in mount.options.split(","))
        # A mount that another one hides shows no groups.
        if has_it and os.path.exists(os.path.join(mount.place, "cgroup.procs")):
            hierarchies[unified] = Hierarchy(controller, unified, mount.root, mount.place)
    return hierarchies.get(False) or hierarchies.get(True)


def read_cpu_limit(group: Optional[ControlGroup]) -> Record:
    """A `cgroup` record of the tightest limit among this group and its parents; of equal limits the nearest.

    Raises:
        OSError, ValueError: the group is not visible, is gone, or has unreadable files.
    """
    if group is None:
        raise OSError("no control group with the cpu controller can be seen")
    unified = group.hierarchy.unified
    limits = []
    for path in group.upwards():
        try:
            quota = _read_quota(path, unified=unified)
        except PermissionError:
            # A parent group may be unreadable; our own quota still counts.
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
    """Cores that a group may use; None if it has no limit of its own."""
    try:
        if unified:
            quota, period = read_text(f"{group}/cpu.max").split()
        else:
            quota, period = read_text(f"{group}/cpu.cfs_quota_us"), read_text(f"{group}/cpu.cfs_period_us")
    except FileNotFoundError:
        # The root has no such file, nor has a group without the controller.
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
# It counts all OOM kills of the machine, since Linux 4.13, as do the counters of groups.
_MACHINE_KILLS = "/proc/vmstat"


class Memory(NamedTuple):
    """Memory in bytes."""

    total: int
    available: int  # what can still be allocated without swapping


class GroupMemory(NamedTuple):
    """Memory of a control group with a limit, in bytes."""

    limit: int  # what its processes may hold together
    held: Optional[int]  # what they hold, without what the kernel can reclaim; None if unknown


class _Files(NamedTuple):
    """Names of a version's files, and the fields of memory.stat that the kernel reclaims when memory is short.

    MemAvailable counts the same memory as available (proc_meminfo(5)): the page cache, and for version 2 reclaimable
    slab memory.
    """

    limit: str
    used: str
    given_back: frozenset[str]


_VERSION_1 = _Files(
    "memory.limit_in_bytes", "memory.usage_in_bytes", frozenset({"total_inactive_file", "total_active_file"})
)
_VERSION_2 = _Files("memory.max", "memory.current", frozenset({"inactive_file", "active_file", "slab_reclaimable"}))


class MemoryReader:
    """Reads the memory of a process, which may be moved to another group at any time."""

    def __init__(self, mountinfo: str = "/proc/self/mountinfo") -> None:
        self._finder = GroupFinder("memory", mountinfo)

    def read(self, pid: Optional[int] = None) -> Memory:
        """Memory that a process can use, or we ourselves if the process is gone or None."""
        return usable_memory(read_meminfo(), self._groups(pid))

    def limit(self) -> Optional[int]:
        """The lowest limit of our control groups in bytes; None if none is below the machine's memory."""
        lowest = min((group.limit for group in self._groups(None)), default=None)
        return lowest if lowest is not None and lowest < read_meminfo().total else None

    def _groups(self, pid: Optional[int]) -> list[GroupMemory]:
        """Groups with a limit, of a process; a group that is not visible counts as unlimited."""
        with contextlib.suppress(OSError, ValueError):
            group = self._finder.find(pid)
            return [] if group is None else list(limited_groups(group))
        return []


class MemoryKills:
    """Counts OOM kills in a job's control group, or on the whole machine if the group has no counter.

    It counts from the first look on. A job may be moved to another group, so look repeatedly.

    Args:
        find: returns the file with the counter for a process, or for ourselves if the process is gone or None.
    """

    def __init__(self, find: Optional[Callable[[Optional[int]], str]] = None) -> None:
        self.count: Optional[int] = None  # kills so far; None if the kernel does not count them
        self._groups = GroupFinder("memory")
        self._find = self._find_counter if find is None else find
        self._file: Optional[str] = None
        self._told: Optional[int] = None
        self._due = 0.0

    def watch(self, pid: int) -> None:
        """Count kills and follow this process to its group, at most once a second."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _KILLS_INTERVAL_S
            self.look()
            self._follow(self._find(pid))

    def look(self) -> None:
        """Count kills since the last look, in the group that was followed; the first look follows our own group."""
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
            # These kills predate the job.
            self._file, self._told = file, read_counter(file)
            if self._told is not None and self.count is None:
                self.count = 0


def read_meminfo(path: str = "/proc/meminfo") -> Memory:
    """Memory of the machine."""
    lines = dict(line.split(":", 1) for line in read_text(path).splitlines())
    total, available = (int(lines[name].split()[0]) * _BYTES_PER_KIB for name in ("MemTotal", "MemAvailable"))
    return Memory(total, available)


def usable_memory(machine: Memory, groups: list[GroupMemory]) -> Memory:
    """The least of the machine's memory and that of each group, since any of them can stop the process."""
    lefts = [group.limit - group.held for group in groups if group.held is not None]
    total = min([machine.total, *(group.limit for group in groups)])
    return Memory(total, max(0, min([total, machine.available, *lefts])))


def limited_groups(group: ControlGroup) -> Iterator[GroupMemory]:
    """This group and its parents, as far as they are mounted and have a limit (cgroups(7)).

    As with cores, the lowest limit counts, however far up it is.
    """
    files = _VERSION_2 if group.hierarchy.unified else _VERSION_1
    for path in group.upwards():
        # Without a limit, version 2 has `max`, and version 1 a number beyond any machine's memory. The root of version
        # 2, and a group without the controller, have no such file.
        limit = read_number(os.path.join(path, files.limit))
        if limit is not None:
            yield GroupMemory(limit, _held(path, files))


def counter_of(group: Optional[ControlGroup]) -> str:
    """The file that counts kills of this group, or of the whole machine if no group is visible.

    If a group lacks the controller, its nearest parent with the controller counts.
    """
    if group is None:
        return _MACHINE_KILLS
    name = "memory.events" if group.hierarchy.unified else "memory.oom_control"
    files = (os.path.join(path, name) for path in group.upwards())
    return next((file for file in files if read_counter(file) is not None), _MACHINE_KILLS)


def read_counter(file: str) -> Optional[int]:
    """OOM kills in a counter's file; None if it has no such line."""
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
