"""Fault of a node's processors: a control group with a quota for all its processes, those that it starts later too."""

from __future__ import annotations

import os
from pathlib import Path

from multinode.errors import NodeFailed, UsageError
from multinode.lab import cgroups
from multinode.lab.faults.kinds import Cpu
from multinode.lab.faults.scene import Scene
from multinode.lab.processes import namespace_id, poll, processes_in
from multinode.lab.spec import Lab, LabNode

__all__ = ["check_share", "limit", "unlimit"]

_DEADLINE_S = 10.0


def check_share(lab: Lab, fault: Cpu) -> None:
    """See that this holds the node back, and that the kernel can."""
    cores = len(lab.node(fault.node).cores or os.sched_getaffinity(0))
    if fault.share >= cores:
        raise UsageError(
            f"{fault.node} has {cores} cores, so {fault.share:g} of them is no limit", hint="for example --share 0.3"
        )
    if cgroups.find_top() is None:
        raise UsageError(
            "no control groups with the cpu controller are mounted here",
            hint="mount -t cgroup2 none /sys/fs/cgroup, or for version 1: mount -t cgroup -o cpu none DIRECTORY",
        )


def limit(scene: Scene, fault: Cpu) -> None:
    """Make the group, and move every process of the node into it until none is outside that could start another one."""
    top = cgroups.find_top()
    if top is None:
        return
    procs = cgroups.make_group(top, scene.node.name, fault.share) / "cgroup.procs"
    for _ in poll(_DEADLINE_S):
        outside = set(_processes(scene.node)) - set(cgroups.members(procs.parent))
        if not outside:
            return
        for pid in outside:
            cgroups.move_process(pid, procs)
    raise NodeFailed("its processes cannot be held: new ones come all the time", node=scene.node.name)


def unlimit(scene: Scene, fault: Cpu) -> None:
    """Let its processes have what they had: all, or what another fault of this kind leaves them."""
    del fault
    top = cgroups.find_top()
    if top is None:
        return
    others = [one for one in scene.others if isinstance(one, Cpu)]
    if others and scene.is_same_boot:
        cgroups.make_group(top, scene.node.name, others[-1].share)
        return
    group = cgroups.group_path(top, scene.node.name)
    cgroups.free_processes(top, group)
    cgroups.remove_group(group)


def _processes(node: LabNode) -> list[int]:
    namespace = namespace_id(Path(f"/proc/{node.init.pid}/ns/pid"))
    return [] if namespace is None else processes_in("pid", namespace)
