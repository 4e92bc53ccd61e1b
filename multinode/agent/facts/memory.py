"""The memory that a process can have: the machine's, or less where its control groups allow less, of version 1 or 2.

Limits of groups around a container, which are not mounted in it, cannot be seen from here. GPUs have memory of their
own, which is not spoken of.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple, Optional

from .cgroups import Hierarchy, find_hierarchy, group_of, read_membership

__all__ = ["GroupMemory", "Memory", "MemoryReader", "limited_groups", "read_meminfo", "usable_memory"]

_BYTES_PER_KIB = 1 << 10
_MEMINFO = "/proc/meminfo"


class Memory(NamedTuple):
    """In bytes.

    Attributes:
        total: all that there is.
        available: of it, what could still be had without swapping.
    """

    total: int
    available: int


class GroupMemory(NamedTuple):
    """Of a control group with a limit, in bytes.

    Attributes:
        limit: what its processes may hold together.
        held: what they do, less what the kernel would take back for them; None where it does not tell.
    """

    limit: int
    held: Optional[int]


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
    """Reads it for a process that may be moved to another group at any time; the tree of groups is looked for once.

    Args:
        mountinfo: where the mounts are listed.
    """

    def __init__(self, mountinfo: str = "/proc/self/mountinfo") -> None:
        self._mountinfo = mountinfo
        self._hierarchy: Optional[Hierarchy] = None
        self._has_looked = False

    def read(self, pid: Optional[int] = None) -> Memory:
        """What this process can have; we ourselves where there is none, or no more.

        Raises:
            OSError, ValueError, LookupError: the kernel does not tell the machine's memory.
        """
        return usable_memory(read_meminfo(), self._groups(pid))

    def limit(self) -> Optional[int]:
        """The lowest limit, in bytes, of the control groups that we are in; None where none has less than the machine.

        Raises:
            OSError, ValueError, LookupError: the kernel does not tell the machine's memory.
        """
        lowest = min((group.limit for group in self._groups(None)), default=None)
        return lowest if lowest is not None and lowest < read_meminfo().total else None

    def _groups(self, pid: Optional[int]) -> list[GroupMemory]:
        """Those that limit it; what cannot be seen limits nothing."""
        with contextlib.suppress(OSError, ValueError):
            if not self._has_looked:
                self._has_looked, self._hierarchy = True, find_hierarchy("memory", self._mountinfo)
            group = None if self._hierarchy is None else group_of(self._hierarchy, read_membership(pid))
            if self._hierarchy is not None and group is not None:
                return list(limited_groups(self._hierarchy, group))
        return []


def read_meminfo(path: str = _MEMINFO) -> Memory:
    """The machine's.

    Raises:
        OSError, ValueError, LookupError: the kernel does not tell it.
    """
    with open(path, encoding="ascii") as file:
        lines = dict(line.split(":", 1) for line in file)
    total, available = (int(lines[name].split()[0]) * _BYTES_PER_KIB for name in ("MemTotal", "MemAvailable"))
    return Memory(total, available)


def usable_memory(machine: Memory, groups: list[GroupMemory]) -> Memory:
    """The least of what the machine and each of the groups has.

    Args:
        machine: its memory.
        groups: that limit a process, each of which can stop it.
    """
    lefts = [group.limit - group.held for group in groups if group.held is not None]
    total = min([machine.total, *(group.limit for group in groups)])
    return Memory(total, max(0, min([total, machine.available, *lefts])))


def limited_groups(hierarchy: Hierarchy, group: str) -> Iterator[GroupMemory]:
    """This group and those around it, as far as they are mounted and have a limit (cgroups(7)).

    Unlike processors, of which the kernel gives each group its share anew, memory is counted in every group around: the
    lowest limit is the one that counts, however far up it is.
    """
    files = _VERSION_2 if hierarchy.unified else _VERSION_1
    while True:
        # Version 2 writes `max` for none; version 1 a number beyond any machine's memory. The root of version 2, and a
        # group to which the controller was not handed down, have no such file.
        limit = _read_number(os.path.join(group, files.limit))
        if limit is not None:
            yield GroupMemory(limit, _held(group, files))
        if group == hierarchy.place:
            return
        group = os.path.dirname(group)


def _held(group: str, files: _Files) -> Optional[int]:
    used = _read_number(os.path.join(group, files.used))
    if used is None:
        return None
    given_back = 0
    with contextlib.suppress(OSError, ValueError), open(os.path.join(group, "memory.stat"), encoding="ascii") as file:
        given_back = sum(int(size) for name, size in map(str.split, file) if name in files.given_back)
    return max(0, used - given_back)


def _read_number(path: str) -> Optional[int]:
    with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
        return int(file.read())
    return None
