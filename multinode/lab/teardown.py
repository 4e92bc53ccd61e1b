"""Take everything of a lab away, found by names and namespaces: neither a crash nor a lost record is in the way."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec

from multinode.errors import MultinodeError
from multinode.lab.network import CONTROLLER_IFNAME, SWITCH_NAMESPACE
from multinode.lab.processes import NamespaceId, namespace_id, poll, processes_of_lab, run_program, signal_all
from multinode.lab.state import STATE_DIR
from multinode.node.kernel_files import list_names, read_mounts

_NETNS_DIR = Path("/run/netns")
_OUR_NAMESPACE = re.compile(rf"{SWITCH_NAMESPACE}|mn-node\d+")
_DEADLINE_S = 20.0
_GROUP_DEADLINE_S = 10.0


class Remains(msgspec.Struct, frozen=True, kw_only=True):
    """What there is of a lab on this machine."""

    namespaces: tuple[str, ...] = ()  # names of network namespaces
    processes: tuple[int, ...] = ()
    interfaces: tuple[str, ...] = ()  # the controller's interfaces
    # directories of control groups that hold nodes to a part of the processors or of the memory
    cgroups: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()  # mount points below the state directory
    directories: tuple[str, ...] = ()  # the state directory

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


def find_groups(node: str | None = None) -> list[Path]:
    """The control groups of our lab's nodes, or of this one, in all trees; their names say whose they are."""
    name = re.compile(rf"mn-{node or 'node[0-9]+'}-{our_mark()}")
    places = {mount.place for mount in read_mounts() if mount.filesystem in {"cgroup", "cgroup2"}}
    found = (Path(place, entry) for place in sorted(places) for entry in list_names(place) if name.fullmatch(entry))
    return [path for path in found if (path / "cgroup.procs").exists()]


def our_mark() -> int:
    """Names our network namespace, as a lab does: one inside a container is none of the machine's around it."""
    return Path("/proc/self/ns/net").stat().st_ino


def remove_group(group: Path) -> None:
    """Remove a control group whose processes are gone or going; one that is not there is fine.

    Raises:
        MultinodeError: it does not get empty.
    """
    error: OSError | None = None
    for _ in poll(_GROUP_DEADLINE_S):
        try:
            for folder, _, _ in os.walk(group, topdown=False):
                Path(folder).rmdir()
        except FileNotFoundError:
            return
        except OSError as busy:
            error = busy
        else:
            return
    raise MultinodeError(f"the control group {group} cannot be removed: {error}")


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
    return [mount.place for mount in read_mounts() if mount.place.startswith(f"{STATE_DIR}/")]


def _forget_netns_dir() -> None:
    """Undo what the first `ip netns add` on a machine does to this directory, once it is empty again."""
    if _NETNS_DIR.is_dir() and not any(_NETNS_DIR.iterdir()):
        with contextlib.suppress(MultinodeError):
            while True:
                run_program(["umount", str(_NETNS_DIR)])
        _NETNS_DIR.rmdir()
