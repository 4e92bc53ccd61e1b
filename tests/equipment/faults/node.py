"""Faults of a whole node: killed, frozen, short of processors or of memory.

A killed node is started anew to undo it, with a fresh disk and boot id. Processors and memory are held by a control
group for all its processes, those that it starts later too.
"""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from multinode.errors import NodeFailed, UsageError
from multinode.lab.cluster import remove_group
from multinode.lab.nodes import start_nodes, write_speed
from multinode.lab.state import (
    DATA_IFNAME,
    MANAGEMENT_IFNAME,
    Lab,
    LabNode,
    is_alive,
    namespace_id,
    node_processes,
    poll,
    processes_in,
    signal_all,
)
from multinode.node.facts.cgroups import Hierarchy
from multinode.units import format_size
from tests.equipment import cgroups
from tests.equipment.cgroups import Controller
from tests.equipment.faults.fault import AnyFault, Scene, is_stopped, require
from tests.equipment.faults.links import set_port

_NODE_WORDS = {"kill": "killed, links and all", "freeze": "all its processes are frozen"}
_NICS = (DATA_IFNAME, MANAGEMENT_IFNAME)
_DEADLINE_S = 20.0
_GROUP_DEADLINE_S = 10.0
# sshd must still answer within the time that clients give it.
_LEAST_SHARE = 0.05
# sshd, a session and an interpreter want about half of it.
_LEAST_BYTES = 64 << 20


class NodeState(AnyFault, frozen=True, kw_only=True, tag="node"):
    """The node lost its power, or none of its processes runs any more."""

    how: Literal["kill", "freeze"]

    def describe(self) -> str:
        return _NODE_WORDS[self.how]

    def make(self, scene: Scene) -> None:
        if self.how == "freeze":
            _freeze(scene.node)
            return
        # A machine without power says no farewell: no segment that ends a connection gets out.
        for ifname in _NICS:
            set_port(scene.node, ifname, up=False)
        _kill(scene.node)

    def undo(self, scene: Scene) -> LabNode | None:
        if self.how == "freeze":
            if scene.is_same_boot:
                signal_all(node_processes(scene.node), signal.SIGCONT)
            return None
        for ifname in _NICS:
            set_port(scene.node, ifname, up=True)
        if is_alive(scene.node.init):
            return None
        # What a start left that was begun and not finished.
        _kill(scene.node)
        rate = scene.node.rate_gbit_per_s
        (started,) = start_nodes(scene.lab.spec, [scene.node.node_rank])
        write_speed(started, rate)
        return msgspec.structs.replace(started, rate_gbit_per_s=rate)


class Cpu(AnyFault, frozen=True, kw_only=True, tag="cpu"):
    """All processes of the node together get this much of a core, 0.3 of one: a quota, as containers have it."""

    share: float

    def __post_init__(self) -> None:
        good = _LEAST_SHARE <= self.share < math.inf
        require(
            good, f"a node cannot run with {self.share:g} of a core", (f"use {_LEAST_SHARE} or more, for example 0.3")
        )

    def describe(self) -> str:
        return f"its processes share {self.share:g} of a core"

    def check(self, lab: Lab) -> None:
        cores = len(lab.node(self.node).cores or os.sched_getaffinity(0))
        message = f"{self.node} has {cores} cores, so {self.share:g} of them is no limit"
        require(self.share < cores, message, "for example share=0.3")
        _check_controller("cpu")

    def make(self, scene: Scene) -> None:
        _limit(scene, "cpu", self.share)

    def undo(self, scene: Scene) -> None:
        _unlimit(scene, "cpu")


class Memory(AnyFault, frozen=True, kw_only=True, tag="memory"):
    """All processes of the node together have this much memory and no swap: the kernel kills one that wants more."""

    limit_bytes: int

    def __post_init__(self) -> None:
        hint = f"use {format_size(_LEAST_BYTES)} or more, for example 700MiB"
        require(self.limit_bytes >= _LEAST_BYTES, f"a node cannot run with {format_size(self.limit_bytes)}", hint)

    def describe(self) -> str:
        return f"its processes share {format_size(self.limit_bytes)} of memory"

    def check(self, lab: Lab) -> None:
        del lab
        there_bytes = psutil.virtual_memory().total
        has = f"{self.node} has {format_size(there_bytes)} of memory"
        message = f"{has}, so {format_size(self.limit_bytes)} is no limit"
        require(self.limit_bytes < there_bytes, message, "for example limit_bytes=734003200")
        _check_controller("memory")

    def make(self, scene: Scene) -> None:
        _limit(scene, "memory", self.limit_bytes)

    def undo(self, scene: Scene) -> None:
        _unlimit(scene, "memory")


def _kill(node: LabNode) -> None:
    namespace = namespace_id(Path("/run/netns") / node.namespace)
    for _ in poll(_DEADLINE_S):
        pids = processes_in("net", namespace)
        # A process that is about to exit is in no namespace any more.
        if not pids and not is_alive(node.init):
            return
        signal_all(pids, signal.SIGKILL)
    raise NodeFailed("its processes do not exit", node=node.name, hint="multinode lab down")


def _freeze(node: LabNode) -> None:
    """Repeat until no process is left that could have started another one."""
    for _ in poll(_DEADLINE_S):
        running = [pid for pid in node_processes(node) if not is_stopped(pid)]
        if not running:
            return
        signal_all(running, signal.SIGSTOP)
    raise NodeFailed("its processes do not stop", node=node.name, hint="scripts/lab-fault clear")


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


def _limit(scene: Scene, controller: Controller, limit: float) -> None:
    """Repeat until no process outside the group is left that could start another one."""
    top = cgroups.find_top(controller)
    if top is None:
        return
    group = cgroups.set_limit(top, scene.node.name, limit)
    for _ in poll(_GROUP_DEADLINE_S):
        outside = set(node_processes(scene.node)) - set(cgroups.members(group))
        if not outside:
            return
        for pid in outside:
            cgroups.move_process(pid, group / "cgroup.procs")
    raise NodeFailed("its processes cannot be stopped: new ones keep starting", node=scene.node.name)


def _unlimit(scene: Scene, controller: Controller) -> None:
    top = cgroups.find_top(controller)
    if top is None:
        return
    in_force: dict[Controller, float] = {}
    for other in scene.others if scene.is_same_boot else ():
        if isinstance(other, Cpu):
            in_force["cpu"] = other.share
        elif isinstance(other, Memory):
            in_force["memory"] = other.limit_bytes
    # In version 2 the other limit of the node is in the same group.
    if controller in in_force or any(_shares(top, one) for one in in_force):
        cgroups.set_limit(top, scene.node.name, in_force.get(controller))
        return
    group = cgroups.group_path(top, scene.node.name)
    cgroups.free_processes(top, group)
    remove_group(group)


def _shares(top: Hierarchy, controller: Controller) -> bool:
    """Whether what is in force by this controller is in the same tree."""
    other = cgroups.find_top(controller)
    return other is not None and other.place == top.place
