"""Control groups that hold a node's processes to a part of the processors; version 1 where it has `cpu`, else 2.

They lie at the top of what this machine has mounted, and their names say whose they are: a crash loses none of them.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import msgspec

from multinode.errors import MultinodeError
from multinode.lab.processes import poll

__all__ = [
    "Top",
    "find_groups",
    "find_top",
    "free_processes",
    "group_path",
    "join_command",
    "make_group",
    "members",
    "move_process",
    "remove_group",
]

# The kernel's own choice, and that of every container runtime.
_PERIOD_US = 100_000
_DEADLINE_S = 10.0


class Top(msgspec.Struct, frozen=True, kw_only=True):
    """The top of a tree of control groups.

    Attributes:
        unified: whether it is version 2.
        root: the group that is mounted.
        place: where it is mounted.
    """

    unified: bool
    root: str
    place: Path


def find_top() -> Top | None:
    """The tree that knows the processors; None where none is mounted, or only under another mount."""
    found: dict[bool, Top] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, device = line.partition(" - ")
        kind, _, options = device.split()[:3]
        if kind == "cgroup2" or (kind == "cgroup" and "cpu" in options.split(",")):
            root, place = mount.split()[3:5]
            if Path(place, "cgroup.procs").exists():
                found[kind == "cgroup2"] = Top(unified=kind == "cgroup2", root=root, place=Path(place))
    return found.get(False) or found.get(True)


def group_path(top: Top, node: str) -> Path:
    """The directory of a node's group, whether it is there or not."""
    return top.place / f"mn-{node}-{_our_mark()}"


def find_groups() -> list[Path]:
    """The groups of our lab's nodes that there are."""
    top = find_top()
    if top is None:
        return []
    name = re.compile(rf"mn-node\d+-{_our_mark()}")
    return sorted(path for path in top.place.iterdir() if name.fullmatch(path.name))


def make_group(top: Top, node: str, share: float) -> Path:
    """Make a node's group, or change it, so that its processes together get this much of a core.

    Raises:
        MultinodeError: the kernel refused.
    """
    group = group_path(top, node)
    quota_us = round(share * _PERIOD_US)
    try:
        if top.unified:
            _hand_down(top)
            group.mkdir(exist_ok=True)
            (group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
        else:
            group.mkdir(exist_ok=True)
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
    except OSError as error:
        raise _refusal(group, error) from error
    return group


def members(group: Path) -> list[int]:
    """The processes in a group; a group that is not there has none."""
    try:
        return [int(line) for line in (group / "cgroup.procs").read_text().split()]
    except FileNotFoundError:
        return []


def free_processes(top: Top, group: Path) -> None:
    """Move the processes of a group to our own, where they were before; a group that is gone has none.

    Raises:
        MultinodeError: the kernel refused, or new ones come all the time.
    """
    target = _own_group(top) / "cgroup.procs"
    for _ in poll(_DEADLINE_S):
        pids = members(group)
        if not pids:
            return
        for pid in pids:
            move_process(pid, target)
    raise MultinodeError(f"{group}: processes are left in it", hint="multinode lab down")


def move_process(pid: int, procs: Path) -> None:
    """Move a process into the group of this `cgroup.procs`; one that has gone meanwhile is passed over.

    Raises:
        MultinodeError: the kernel refused.
    """
    try:
        with contextlib.suppress(ProcessLookupError):
            procs.write_text(str(pid))
    except OSError as error:
        raise _refusal(procs.parent, error) from error


def remove_group(group: Path) -> None:
    """Remove a group whose processes are gone or going; one that is not there is fine.

    Raises:
        MultinodeError: it does not get empty.
    """
    error: OSError | None = None
    for _ in poll(_DEADLINE_S):
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError as busy:
            error = busy
        else:
            return
    if error is not None:
        raise _refusal(group, error) from error


def join_command(node: str) -> tuple[str, ...]:
    """What goes before a command to run it in a node's group; nothing where it has none."""
    top = find_top()
    if top is None or not group_path(top, node).is_dir():
        return ()
    procs = group_path(top, node) / "cgroup.procs"
    return ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(procs))


def _hand_down(top: Top) -> None:
    """Version 2: groups have the controller where the one around hands it down. It stays so: others may use it."""
    control = top.place / "cgroup.subtree_control"
    if "cpu" not in control.read_text().split():
        control.write_text("+cpu")


def _own_group(top: Top) -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if (not controllers) if top.unified else ("cpu" in controllers.split(",")):
            own = top.place / os.path.relpath(path, top.root)
            return own if own.is_dir() else top.place
    return top.place


def _our_mark() -> int:
    """Names our network namespace, as a lab does: one inside a container is none of the machine's around it."""
    return Path("/proc/self/ns/net").stat().st_ino


def _refusal(group: Path, error: OSError) -> MultinodeError:
    return MultinodeError(
        f"the control group {group} cannot be changed: {error.strerror}",
        hint="in a container this takes --privileged, and version 2 a group around it that holds no processes",
    )
