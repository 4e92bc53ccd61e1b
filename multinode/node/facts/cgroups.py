"""A process's control groups, of version 1 or 2, and what limits its processor time: the nearest one with a quota.

Limits of groups around a container, which are not mounted in it, cannot be seen from here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple, Optional

from ..channel import Record
from ..kernel_files import read_mounts, read_text, try_read

_US_PER_NS = 1e-3


class Hierarchy(NamedTuple):
    """A mounted tree of control groups."""

    controller: str  # what its groups are wanted for, `cpu` or `memory`
    unified: bool  # whether it is version 2, which has one tree for all controllers
    root: str  # the group that is mounted
    place: str  # where it is mounted

    def group_of(self, membership: str) -> Optional[Group]:
        """The group of a process, by the text of its /proc/PID/cgroup; None where what is mounted does not hold it."""
        for line in membership.splitlines():
            _, controllers, path = line.split(":", 2)
            if (not controllers) if self.unified else (self.controller in controllers.split(",")):
                below = os.path.relpath(path, self.root)
                # A group above the root of our namespace is written as /.. (cgroup_namespaces(7)).
                outside = path.startswith("/..") or below.startswith("..")
                return None if outside else Group(self, os.path.normpath(os.path.join(self.place, below)))
        return None


class Group(NamedTuple):
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

    def find(self, pid: Optional[int]) -> Optional[Group]:
        """The group of this process; our own where there is none, or no more. None where it cannot be seen."""
        if not self._has_looked:
            self._has_looked, self._hierarchy = True, find_hierarchy(self._controller, self._mountinfo)
        if self._hierarchy is None:
            return None
        theirs = None if pid is None else try_read(f"/proc/{pid}/cgroup")
        return self._hierarchy.group_of(read_text("/proc/self/cgroup") if theirs is None else theirs)


def find_hierarchy(controller: str, mountinfo: str = "/proc/self/mountinfo") -> Optional[Hierarchy]:
    """The tree with this controller: version 1 where that is mounted with it, else version 2; None is neither."""
    found: dict[bool, Hierarchy] = {}
    for mount in read_mounts(mountinfo):
        unified = mount.filesystem == "cgroup2"
        has_it = unified or (mount.filesystem == "cgroup" and controller in mount.options.split(","))
        # A mount that another one hides shows no groups.
        if has_it and os.path.exists(os.path.join(mount.place, "cgroup.procs")):
            found[unified] = Hierarchy(controller, unified, mount.root, mount.place)
    return found.get(False) or found.get(True)


def read_cpu_limit(group: Optional[Group]) -> Record:
    """A `cgroup` record of this group, or of the nearest one around it that is limited.

    Raises:
        OSError, ValueError: the group cannot be seen, is gone, or does not answer as groups do.
    """
    if group is None:
        raise OSError("no control group with the cpu controller can be seen")
    unified = group.hierarchy.unified
    quotas = ((path, _read_quota(path, unified=unified)) for path in group.upwards())
    limited, quota_cores = next(((path, quota) for path, quota in quotas if quota is not None), (group.path, None))
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
