"""Take everything of a lab away, found by names and namespaces: neither a crash nor a lost record is in the way."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec

from multinode.errors import MultinodeError
from multinode.lab.cgroups import find_groups, remove_group
from multinode.lab.network import CONTROLLER_IFNAME, SWITCH_NAMESPACE
from multinode.lab.processes import NamespaceId, namespace_id, poll, processes_of_lab, run_program, signal_all
from multinode.lab.state import STATE_DIR

_NETNS_DIR = Path("/run/netns")
_OUR_NAMESPACE = re.compile(rf"{SWITCH_NAMESPACE}|mn-node\d+")
_DEADLINE_S = 20.0


class Remains(msgspec.Struct, frozen=True, kw_only=True):
    """What there is of a lab on this machine.

    Attributes:
        namespaces: names of network namespaces.
        interfaces: the controller's interfaces.
        cgroups: directories of control groups that hold nodes to a part of the processors or of the memory.
        mounts: mount points below the state directory.
        directories: the state directory.
    """

    namespaces: tuple[str, ...] = ()
    processes: tuple[int, ...] = ()
    interfaces: tuple[str, ...] = ()
    cgroups: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    directories: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is anything."""
        return self != Remains()

    def describe(self) -> str:
        """Everything there is, one by one: `namespaces mn-node0, mn-switch; processes 4711`."""
        return "; ".join(f"{kind} {', '.join(map(str, found))}" for kind, found in self._kinds() if found)

    def count(self) -> str:
        """How much there is: `namespaces: 3, processes: 4`."""
        return ", ".join(f"{kind}: {len(found)}" for kind, found in self._kinds() if found)

    def _kinds(self) -> Iterator[tuple[str, tuple[object, ...]]]:
        for kind in self.__struct_fields__:
            yield kind, getattr(self, kind)


def find_remains(former: frozenset[NamespaceId] = frozenset()) -> Remains:
    """Look for a lab, whole or in parts; `former` are namespaces whose names are gone already."""
    names = _namespaces()
    ids = {found for name in names if (found := namespace_id(_NETNS_DIR / name)) is not None}
    return Remains(
        namespaces=tuple(names),
        processes=tuple(processes_of_lab(ids | former)),
        interfaces=tuple(name for _, name in socket.if_nameindex() if name == CONTROLLER_IFNAME),
        cgroups=tuple(map(str, find_groups())),
        mounts=tuple(_mounts()),
        directories=(str(STATE_DIR),) if STATE_DIR.exists() else (),
    )


def sweep() -> Remains:
    """Take away whatever there is of a lab, and see that it is gone; returns what there was.

    Raises:
        MultinodeError: something is left.
    """
    found = find_remains()
    former = frozenset(one for name in found.namespaces if (one := namespace_id(_NETNS_DIR / name)) is not None)
    _kill(former)
    for group in found.cgroups:
        remove_group(Path(group))
    if found.interfaces:
        run_program(["ip", "link", "del", CONTROLLER_IFNAME])
    for name in found.namespaces:
        run_program(["ip", "netns", "del", name])
    _forget_netns_dir()
    for place in reversed(found.mounts):
        run_program(["umount", "--lazy", place])
    if STATE_DIR.exists():
        shutil.rmtree(STATE_DIR)
    if STATE_DIR.parent.is_dir() and not any(STATE_DIR.parent.iterdir()):
        STATE_DIR.parent.rmdir()
    left = find_remains(former)
    if left:
        raise MultinodeError(
            (f"the lab was not removed completely: {left.describe()}"), hint="run again: multinode lab down"
        )
    return found


def _kill(namespaces: frozenset[NamespaceId]) -> None:
    """The end of a node's first process ends all its processes."""
    for _ in poll(_DEADLINE_S):
        pids = processes_of_lab(set(namespaces))
        if not pids:
            return
        signal_all(pids, signal.SIGKILL)
    raise MultinodeError(
        f"processes of the lab do not exit: {', '.join(map(str, pids))}",
        hint="one of them may be waiting for a disk: see their state in `ps`, then run again: multinode lab down",
    )


def _namespaces() -> list[str]:
    if not _NETNS_DIR.is_dir():
        return []
    return sorted(path.name for path in _NETNS_DIR.iterdir() if _OUR_NAMESPACE.fullmatch(path.name))


def _mounts() -> list[str]:
    places = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [place for place in places if place.startswith(f"{STATE_DIR}/")]


def _forget_netns_dir() -> None:
    """Undo what the first `ip netns add` on a machine does to this directory, once it is empty again."""
    if _NETNS_DIR.is_dir() and not any(_NETNS_DIR.iterdir()):
        while _is_mount_point(_NETNS_DIR):
            run_program(["umount", str(_NETNS_DIR)])
        _NETNS_DIR.rmdir()


def _is_mount_point(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    finally:
        os.close(fd)
    number = next(line.split()[1] for line in lines if line.startswith("mnt_id:"))
    mounts = (line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return any(mount[0] == number and mount[4] == str(path) for mount in mounts)
