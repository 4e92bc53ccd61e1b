"""Faults of a node's processors and memory: a control group for all its processes, those that it starts later too."""

from __future__ import annotations

import os
from pathlib import Path

from multinode.errors import NodeFailed, UsageError
from multinode.lab import cgroups
from multinode.lab.cgroups import Controller, Top
from multinode.lab.faults.kinds import Cpu, Memory
from multinode.lab.faults.scene import Scene
from multinode.lab.processes import namespace_id, poll, processes_in
from multinode.lab.spec import Lab, LabNode
from multinode.units import format_size

__all__ = ["check", "limit", "unlimit"]

_DEADLINE_S = 10.0


def check(lab: Lab, fault: Cpu | Memory) -> None:
    """See that this holds the node back, and that the kernel can."""
    if isinstance(fault, Cpu):
        _check_share(lab, fault)
    else:
        _check_limit(fault)
    _check_controller(_controller(fault))


def limit(scene: Scene, fault: Cpu | Memory) -> None:
    """Make the group, and move every process of the node into it until none is outside that could start another one."""
    top = cgroups.find_top(_controller(fault))
    if top is None:
        return
    procs = _set_limit(top, fault) / "cgroup.procs"
    for _ in poll(_DEADLINE_S):
        outside = set(_processes(scene.node)) - set(cgroups.members(procs.parent))
        if not outside:
            return
        for pid in outside:
            cgroups.move_process(pid, procs)
    raise NodeFailed("its processes cannot be held: new ones come all the time", node=scene.node.name)


def unlimit(scene: Scene, fault: Cpu | Memory) -> None:
    """Let its processes have what they had: all, or what another fault of this kind leaves them."""
    top = cgroups.find_top(_controller(fault))
    if top is None:
        return
    others = [one for one in scene.others if isinstance(one, Cpu | Memory)] if scene.is_same_boot else []
    same = [one for one in others if type(one) is type(fault)]
    if same:
        _set_limit(top, same[-1])
        return
    group = cgroups.group_path(top, scene.node.name)
    if any(_shares(top, one) for one in others):
        cgroups.lift_limit(top, scene.node.name)
        return
    cgroups.free_processes(top, group)
    cgroups.remove_group(group)


def _controller(fault: Cpu | Memory) -> Controller:
    return "cpu" if isinstance(fault, Cpu) else "memory"


def _shares(top: Top, fault: Cpu | Memory) -> bool:
    """Whether what is in force by this fault is in the same tree."""
    other = cgroups.find_top(_controller(fault))
    return other is not None and other.place == top.place


def _set_limit(top: Top, fault: Cpu | Memory) -> Path:
    if isinstance(fault, Cpu):
        return cgroups.limit_cpu(top, fault.node, fault.share)
    return cgroups.limit_memory(top, fault.node, fault.limit_bytes)


def _check_controller(controller: Controller) -> None:
    if cgroups.is_disabled(controller):
        raise UsageError(
            f"this kernel was started without the {controller} controller of control groups",
            hint=f"start it with cgroup_enable={controller} on its command line",
        )
    if cgroups.find_top(controller) is None:
        raise UsageError(
            f"no control groups with the {controller} controller are mounted here",
            hint="mount -t cgroup2 none /sys/fs/cgroup, or for version 1: "
            f"mount -t cgroup -o {controller} none DIRECTORY",
        )


def _check_share(lab: Lab, fault: Cpu) -> None:
    cores = len(lab.node(fault.node).cores or os.sched_getaffinity(0))
    if fault.share >= cores:
        raise UsageError(
            f"{fault.node} has {cores} cores, so {fault.share:g} of them is no limit", hint="for example --share 0.3"
        )


def _check_limit(fault: Memory) -> None:
    there_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if fault.limit_bytes >= there_bytes:
        raise UsageError(
            f"{fault.node} has {format_size(there_bytes)} of memory, so {format_size(fault.limit_bytes)} is no limit",
            hint="for example --limit 700MiB",
        )


def _processes(node: LabNode) -> list[int]:
    namespace = namespace_id(Path(f"/proc/{node.init.pid}/ns/pid"))
    return [] if namespace is None else processes_in("pid", namespace)
