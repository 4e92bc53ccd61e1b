"""Control groups that hold a node's processes to a part of the processors or of the memory, of version 1 or 2.

They lie at the top of what this machine has mounted, and their names say whose they are: a crash loses none of them.
Version 1 has a tree for each controller; version 2 has one, in which both limits of a node are in the same group.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from pathlib import Path
from typing import Literal, get_args

import msgspec

from multinode.errors import MultinodeError
from multinode.lab.processes import poll

Controller = Literal["cpu", "memory"]
# Slurm keeps the processes of a step together by the freezer.
Tree = Literal["cpu", "memory", "freezer"]

# A kernel that does not account for swap has neither.
_SWAP_FILES = {"memory.swap.max", "memory.memsw.limit_in_bytes"}
# The kernel's own choice, and that of every container runtime.
_PERIOD_US = 100_000
_DEADLINE_S = 10.0


class Top(msgspec.Struct, frozen=True, kw_only=True):
    """The top of a tree of control groups.

    Attributes:
        controller: what its groups are wanted for.
        unified: whether it is version 2.
        root: the group that is mounted.
        place: where it is mounted.
    """

    controller: Tree
    unified: bool
    root: str
    place: Path


def find_top(controller: Tree, mountinfo: Path = Path("/proc/self/mountinfo")) -> Top | None:
    """The tree with this controller, of version 1 before 2; None where none is mounted, or only under another mount."""
    found: dict[bool, Top] = {}
    for line in mountinfo.read_text().splitlines():
        mount, _, device = line.partition(" - ")
        kind, _, options = device.split()[:3]
        root, place = mount.split()[3:5]
        unified = kind == "cgroup2"
        controllers = _offered(Path(place)) if unified else options.split(",") if kind == "cgroup" else []
        if controller in controllers and Path(place, "cgroup.procs").exists():
            found[unified] = Top(controller=controller, unified=unified, root=root, place=Path(place))
    return found.get(False) or found.get(True)


def group_path(top: Top, node: str) -> Path:
    """The directory of a node's group, whether it is there or not."""
    return top.place / f"mn-{node}-{_our_mark()}"


def find_groups() -> list[Path]:
    """The groups of our lab's nodes that there are, in all trees."""
    name = re.compile(rf"mn-node\d+-{_our_mark()}")
    places = {top.place for top in _tops()}
    return sorted(path for place in places for path in place.iterdir() if name.fullmatch(path.name))


def set_limit(top: Top, node: str, limit: float | None) -> Path:
    """Make a node's group, or change it, so that its processes together have so many cores, or bytes and no swap.

    None lets them have all, in a group that stays where there is one.

    Raises:
        MultinodeError: the kernel refused, or they hold more memory already and can give none back.
    """
    group = group_path(top, node)
    if limit is None and not group.is_dir():
        return group
    try:
        if top.unified:
            _hand_down(top)
        group.mkdir(exist_ok=True)
        for name, text in _limit_files(top, group, limit).items():
            if name not in _SWAP_FILES or (group / name).exists():
                (group / name).write_text(text)
    except OSError as error:
        raise _refusal(group, error) from error
    return group


def is_disabled(controller: Controller, table: Path = Path("/proc/cgroups")) -> bool:
    """Whether the kernel was started without this controller; one that says nothing of it may have it."""
    lines = [line.split() for line in table.read_text().splitlines()] if table.exists() else []
    return any(fields[0] == controller and fields[-1] == "0" for fields in lines)


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
    raise MultinodeError(f"{group} still has processes", hint="multinode lab down")


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
            for folder, _, _ in os.walk(group, topdown=False):
                Path(folder).rmdir()
        except FileNotFoundError:
            return
        except OSError as busy:
            error = busy
        else:
            return
    if error is not None:
        raise _refusal(group, error) from error


def join_command(node: str) -> tuple[str, ...]:
    """What goes before a command to run it in a node's groups; nothing where it has none."""
    groups = sorted({group_path(top, node) for top in _tops()})
    procs = [str(group / "cgroup.procs") for group in groups if group.is_dir()]
    if not procs:
        return ()
    join = 'while [ "$1" != -- ]; do echo $$ > "$1" || exit; shift; done; shift; exec "$@"'
    return ("sh", "-c", join, "sh", *procs, "--")


def _tops() -> list[Top]:
    return [top for controller in get_args(Tree) if (top := find_top(controller)) is not None]


def _offered(place: Path) -> list[str]:
    """Version 2: the controllers that groups there may be given; those that version 1 has are not among them."""
    try:
        return (place / "cgroup.controllers").read_text().split()
    except OSError:
        return []


def _limit_files(top: Top, group: Path, limit: float | None) -> dict[str, str]:
    if top.controller == "cpu":
        quota_us = None if limit is None else round(limit * _PERIOD_US)
        if top.unified:
            return {"cpu.max": "max" if quota_us is None else f"{quota_us} {_PERIOD_US}"}
        return {"cpu.cfs_period_us": str(_PERIOD_US), "cpu.cfs_quota_us": str(-1 if quota_us is None else quota_us)}
    if top.unified:
        return (
            {"memory.max": "max", "memory.swap.max": "max"}
            if limit is None
            else {"memory.max": str(limit), "memory.swap.max": "0"}
        )
    names = ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]
    # The sum of memory and swap may never be the lower one: it is raised first and lowered last.
    if limit is None or limit > _number(group / names[0]):
        names.reverse()
    return dict.fromkeys(names, str(-1 if limit is None else limit))


def _hand_down(top: Top) -> None:
    """Version 2: groups have the controller where the one around hands it down. It stays so: others may use it."""
    control = top.place / "cgroup.subtree_control"
    if top.controller not in control.read_text().split():
        control.write_text(f"+{top.controller}")


def _number(file: Path) -> float:
    try:
        return int(file.read_text())
    except FileNotFoundError:
        return float("inf")


def _own_group(top: Top) -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if (not controllers) if top.unified else (top.controller in controllers.split(",")):
            own = top.place / os.path.relpath(path, top.root)
            return own if own.is_dir() else top.place
    return top.place


def _our_mark() -> int:
    return Path("/proc/self/ns/net").stat().st_ino


def _refusal(group: Path, error: OSError) -> MultinodeError:
    hints = {errno.EBUSY: "its processes use more than that: end them first, or use a higher limit"}
    container = "in a container this needs --privileged, and with version 2 a parent group without processes"
    return MultinodeError(
        f"the control group {group} cannot be changed: {error.strerror}", hint=hints.get(error.errno or 0, container)
    )
