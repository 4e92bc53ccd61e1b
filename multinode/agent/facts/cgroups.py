"""A process's control groups, of version 1 or 2, and what limits its processor time: the nearest one with a quota.

Limits of groups around a container, which are not mounted in it, cannot be seen from here.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import NamedTuple, Optional

from ..channel import Record

__all__ = ["CpuLimit", "Hierarchy", "find_hierarchy", "group_of", "read_cpu_limit", "read_membership"]

_US_PER_NS = 1e-3
_ESCAPED = re.compile(r"\\([0-7]{3})")


class Hierarchy(NamedTuple):
    """A mounted tree of control groups.

    Attributes:
        controller: what its groups are wanted for, `cpu` or `memory`.
        unified: whether it is version 2, which has one tree for all controllers.
        root: the group that is mounted.
        place: where it is mounted.
    """

    controller: str
    unified: bool
    root: str
    place: str


class CpuLimit:
    """What limits a process that may be moved to another group at any time; the tree of groups is looked for once."""

    def __init__(self) -> None:
        self._hierarchy: Optional[Hierarchy] = None
        self._has_looked = False

    def read(self, pid: Optional[int]) -> Record:
        """A `cgroup` record of this process; of ourselves where there is none, or no more.

        Raises:
            OSError, ValueError: nothing can be seen of its groups.
        """
        if not self._has_looked:
            self._has_looked, self._hierarchy = True, find_hierarchy("cpu")
        group = None if self._hierarchy is None else group_of(self._hierarchy, read_membership(pid))
        if self._hierarchy is None or group is None:
            raise OSError("no control group with the cpu controller can be seen")
        return read_cpu_limit(self._hierarchy, group)


def find_hierarchy(controller: str, mountinfo: str = "/proc/self/mountinfo") -> Optional[Hierarchy]:
    """The tree with this controller: version 1 where that is mounted with it, else version 2; None is neither.

    Raises:
        OSError: the mounts cannot be read.
    """
    found: dict[bool, Hierarchy] = {}
    with open(mountinfo, encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            mount, _, device = line.partition(" - ")
            kind, _, options = device.split()[:3]
            if kind == "cgroup2" or (kind == "cgroup" and controller in options.split(",")):
                unified = kind == "cgroup2"
                root, place = map(_unescape, mount.split()[3:5])
                # A mount that another one hides shows no groups.
                if os.path.exists(os.path.join(place, "cgroup.procs")):
                    found[unified] = Hierarchy(controller, unified, root, place)
    return found.get(False) or found.get(True)


def group_of(hierarchy: Hierarchy, membership: str) -> Optional[str]:
    """The directory of a process's group; None where what is mounted does not hold it.

    Args:
        hierarchy: where to look.
        membership: the text of its /proc/PID/cgroup.
    """
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if (not controllers) if hierarchy.unified else (hierarchy.controller in controllers.split(",")):
            below = os.path.relpath(path, hierarchy.root)
            # A group above the root of our namespace is written as /.. (cgroup_namespaces(7)).
            outside = path.startswith("/..") or below.startswith("..")
            return None if outside else os.path.normpath(os.path.join(hierarchy.place, below))
    return None


def read_membership(pid: Optional[int]) -> str:
    """The groups of this process as the kernel lists them; our own where there is none, or no more.

    Raises:
        OSError: not even those can be read.
    """
    if pid is not None:
        with contextlib.suppress(OSError):
            return _read(f"/proc/{pid}/cgroup")
    return _read("/proc/self/cgroup")


def read_cpu_limit(hierarchy: Hierarchy, group: str) -> Record:
    """A `cgroup` record of this group, or of the nearest one around it that is limited.

    Raises:
        OSError, ValueError: the group is gone, or does not answer as groups do.
    """
    limited, quota_cores = group, _read_quota(group, unified=hierarchy.unified)
    while quota_cores is None and limited != hierarchy.place:
        limited = os.path.dirname(limited)
        quota_cores = _read_quota(limited, unified=hierarchy.unified)
    stat = _read_stat(group if quota_cores is None else limited)
    throttled_us = stat.get("throttled_usec", stat.get("throttled_time", 0) * _US_PER_NS)
    return {
        "kind": "cgroup",
        "quota_cores": quota_cores,
        "throttled_us": throttled_us,
        "periods": stat.get("nr_periods", 0),
        "throttled_periods": stat.get("nr_throttled", 0),
    }


def _read_quota(group: str, *, unified: bool) -> Optional[float]:
    """Processors that a group may use; None is without a limit of its own."""
    try:
        if unified:
            quota, period = _read(f"{group}/cpu.max").split()
        else:
            quota, period = _read(f"{group}/cpu.cfs_quota_us"), _read(f"{group}/cpu.cfs_period_us")
    except FileNotFoundError:
        # The root has none, nor has a group to which the controller was not handed down.
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)


def _read_stat(group: str) -> dict[str, int]:
    try:
        lines = _read(f"{group}/cpu.stat").splitlines()
    except FileNotFoundError:
        return {}
    return {name: int(value) for name, value in (line.split() for line in lines)}


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read().strip()


def _unescape(text: str) -> str:
    """A path as it is; the kernel writes blanks in it as octal numbers."""
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), text)
