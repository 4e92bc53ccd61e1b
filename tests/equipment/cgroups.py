"""Control groups that hold a node's processes to a part of the processors or of the memory, of version 1 or 2.

They lie at the top of what this machine has mounted, and their names say whose they are: a crash loses none of them.
Version 1 has a tree for each controller; version 2 has one, in which both limits of a node are in the same group.
"""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path
from typing import Literal

from multinode.errors import MultinodeError
from multinode.lab.cluster import our_mark
from multinode.lab.state import poll
from multinode.node.facts.cgroups import Hierarchy, find_hierarchy
from multinode.node.files import read_text, try_read

Controller = Literal["cpu", "memory"]
# Slurm keeps the processes of a step together by the freezer.
Tree = Literal["cpu", "memory", "freezer"]

# A kernel that does not account for swap has neither.
_SWAP_FILES = {"memory.swap.max", "memory.memsw.limit_in_bytes"}
# The kernel's own choice, and that of every container runtime.
_PERIOD_US = 100_000
_DEADLINE_S = 10.0


def find_top(controller: Tree, mountinfo: str = "/proc/self/mountinfo") -> Hierarchy | None:
    """The tree with this controller, of version 1 before 2; None where none is mounted, or only under another mount."""
    top = find_hierarchy(controller, mountinfo)
    # Version 2: those that version 1 has are not among them.
    has_it = top is None or not top.unified or controller in (try_read(f"{top.place}/cgroup.controllers") or "").split()
    return top if has_it else None


def group_path(top: Hierarchy, node: str) -> Path:
    """The directory of a node's group, whether it is there or not."""
    return Path(top.place, f"mn-{node}-{our_mark()}")


def set_limit(top: Hierarchy, node: str, limit: float | None) -> Path:
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


def free_processes(top: Hierarchy, group: Path) -> None:
    """Move the processes of a group to our own, where they were before; a group that is gone has none.

    Raises:
        MultinodeError: the kernel refused, or new ones come all the time.
    """
    own = top.group_of(read_text("/proc/self/cgroup"))
    target = Path(top.place if own is None else own.path, "cgroup.procs")
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


def _limit_files(top: Hierarchy, group: Path, limit: float | None) -> dict[str, str]:
    """What is written to which files, in this order."""
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


def _hand_down(top: Hierarchy) -> None:
    """Version 2: groups have the controller where the one around hands it down. It stays so: others may use it."""
    control = Path(top.place, "cgroup.subtree_control")
    if top.controller not in control.read_text().split():
        control.write_text(f"+{top.controller}")


def _number(file: Path) -> float:
    try:
        return int(file.read_text())
    except FileNotFoundError:
        return float("inf")


def _refusal(group: Path, error: OSError) -> MultinodeError:
    hints = {errno.EBUSY: "its processes use more than that: end them first, or use a higher limit"}
    container = "in a container this needs --privileged, and with version 2 a parent group without processes"
    return MultinodeError(
        f"the control group {group} cannot be changed: {error.strerror}", hint=hints.get(error.errno or 0, container)
    )
