"""Faults of a whole node: killed, frozen. A killed node is started anew to undo it, with a fresh disk and boot id."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import msgspec

from multinode.errors import NodeFailed
from multinode.lab.faults.kinds import NodeState
from multinode.lab.faults.scene import Scene
from multinode.lab.network import set_port
from multinode.lab.nodes import start_nodes, write_speed
from multinode.lab.processes import (
    is_alive,
    is_stopped,
    kill_all,
    namespace_id,
    poll,
    processes_in,
    signal_all,
)
from multinode.lab.spec import DATA_IFNAME, MANAGEMENT_IFNAME, LabNode

__all__ = ["give", "take"]

_DEADLINE_S = 20.0
_CARDS = (DATA_IFNAME, MANAGEMENT_IFNAME)


def take(scene: Scene, fault: NodeState) -> None:
    """Kill the node, or stop every process of it."""
    if fault.how == "freeze":
        _freeze(scene.node)
        return
    # A machine without power says no farewell: no segment that ends a connection gets out.
    for ifname in _CARDS:
        set_port(scene.node, ifname, up=False)
    _kill(scene.node)


def give(scene: Scene, fault: NodeState) -> LabNode | None:
    """Start the node anew, or let its processes go on."""
    if fault.how == "freeze":
        if scene.is_same_boot:
            signal_all(_processes(scene.node), signal.SIGCONT)
        return None
    for ifname in _CARDS:
        set_port(scene.node, ifname, up=True)
    if is_alive(scene.node.init):
        return None
    # What a start left that was begun and not finished.
    _kill(scene.node)
    return _start(scene)


def _start(scene: Scene) -> LabNode:
    rate = scene.node.rate_gbit_per_s
    (started,) = start_nodes(scene.lab.spec, sys.executable, [scene.node.node_rank])
    renewed = msgspec.structs.replace(started, rate_gbit_per_s=rate)
    write_speed(renewed, rate)
    return renewed


def _kill(node: LabNode) -> None:
    namespace = namespace_id(Path("/run/netns") / node.namespace)
    for _ in poll(_DEADLINE_S):
        pids = [] if namespace is None else processes_in("net", namespace)
        if not pids:
            return
        kill_all(pids)
    raise NodeFailed("its processes do not die", node=node.name, hint="multinode lab down")


def _freeze(node: LabNode) -> None:
    """Stop all, again and again, until no process is left that could have started another one meanwhile."""
    for _ in poll(_DEADLINE_S):
        running = [pid for pid in _processes(node) if not is_stopped(pid)]
        if not running:
            return
        signal_all(running, signal.SIGSTOP)
    raise NodeFailed("its processes do not stop", node=node.name, hint="multinode lab fault clear")


def _processes(node: LabNode) -> list[int]:
    namespace = namespace_id(Path(f"/proc/{node.init.pid}/ns/pid"))
    return [] if namespace is None else processes_in("pid", namespace)
