"""Machines: each node is one of its own, and its clock is right. What a machine has to offer belongs to `resources`."""

from __future__ import annotations

import ipaddress
import statistics
from collections.abc import Iterator

from multinode.core.check.finding import Finding, Rule
from multinode.core.cluster.cluster import Node
from multinode.core.cluster.facts import Interface, NodeFacts
from multinode.preflight.inspection import Inspection
from multinode.units import format_duration

__all__ = ["check_clocks", "check_container_network", "check_same_machine"]

SAME_MACHINE = Rule(
    check="machine",
    severity="error",
    catches="one machine listed twice in the hostfile, under two names or addresses",
    message="it is the same machine as {peer} (both are {hostname}): its workers would share cores and cards with "
    "those of {peer}, NCCL refuses two workers on one GPU, and nothing between them is a network",
    hint="take one of the two lines out of the hostfile, and give the other as many slots= as the machine has GPUs",
)
SHARED_MACHINE = Rule(
    check="machine",
    severity="warning",
    catches="two containers of one machine as two nodes",
    message="it runs on the same machine as {peer}, as another container ({hostname} and {other}): they share its "
    "cores, memory and network card, and NCCL stops where both see the same GPU",
    hint="give each container cards of its own (docker: --gpus device=0), or make one node of the machine",
)
BRIDGED_CONTAINER = Rule(
    check="machine",
    severity="warning",
    catches="a docker container without host networking, whose address other machines cannot reach",
    message="it is a container on docker's bridge: its address {addr} is known on its own machine alone, and workers "
    "on other machines cannot connect to it",
    hint="start the container with --network=host, and log in through the sshd of the container on a port of its own: "
    "port= in the hostfile",
)
CLOCK_OFF = Rule(
    check="clock",
    severity="warning",
    catches="a node whose clock differs from the others by more than two seconds",
    message="its clock is {skew} {way} {peer}: times in logs do not compare, the first failure may be blamed on the "
    "wrong node, and certificates may look expired",
    hint="on {node}: sudo timedatectl set-ntp true",
)
CONTROLLER_CLOCK_OFF = Rule(
    check="clock",
    severity="warning",
    catches="a controller whose clock differs from those of all nodes",
    message="the clock of this machine, the controller, is {skew} {way} those of the nodes: times in logs do not "
    "compare",
    hint="on this machine: sudo timedatectl set-ntp true",
)

_SKEW_S = 2.0
# Docker hands these out for its bridges.
_BRIDGES = ipaddress.ip_network("172.16.0.0/12")


def check_same_machine(inspection: Inspection) -> Iterator[Finding]:
    """No two nodes are one machine."""
    nodes = list(inspection.known)
    for index, (node, found) in enumerate(nodes):
        peer = next(((one, facts) for one, facts in nodes[:index] if _is_same(found, facts)), None)
        if peer is not None and not _share_nothing(node, peer[0]):
            other = peer[1].hostname
            twice = found.hostname == other or (found.machine_id is not None and found.machine_id == peer[1].machine_id)
            rule = SAME_MACHINE if twice else SHARED_MACHINE
            yield rule.found(node.name, peer=peer[0].name, hostname=found.hostname, other=other)


def check_container_network(inspection: Inspection) -> Iterator[Finding]:
    """The data plane of a container is one that other machines reach."""
    links = list(inspection.links)
    for node, interface in links if len(links) > 1 else ():
        found = inspection.facts[node.name]
        addr = inspection.endpoints[node.name].addr
        if found.container in {"docker", "containerd"} and addr is not None and _is_bridged(interface, addr):
            reached = any(
                attempt.peer == node.name and attempt.error is None
                for attempt in (inspection.meeting.attempts if inspection.meeting else ())
            )
            if not reached:
                yield BRIDGED_CONTAINER.found(node.name, addr=addr)


def check_clocks(inspection: Inspection) -> Iterator[Finding]:
    """The clocks of nodes and controller agree, to what a probe can tell."""
    offsets = {node.name: found.clock_offset_s for node, found in inspection.known if found.clock_offset_s is not None}
    if not offsets:
        return
    # Whoever is alone is wrong: the controller, if none of the nodes agrees with it.
    alone = all(abs(offset) > _SKEW_S for offset in offsets.values())
    right = statistics.median_low(offsets.values()) if alone else 0.0
    if alone:
        yield CONTROLLER_CLOCK_OFF.found(None, **_skew(-right))
    wrong = {name: offset - right for name, offset in offsets.items() if abs(offset - right) > _SKEW_S}
    for name, skew in wrong.items():
        yield CLOCK_OFF.found(name, peer="those of the other nodes" if alone else "this machine's", **_skew(skew))
    slow, fast = (pick(offsets, key=lambda name: offsets[name]) for pick in (min, max))
    if not wrong and offsets[fast] - offsets[slow] > _SKEW_S:
        yield CLOCK_OFF.found(fast, peer=f"that of {slow}", **_skew(offsets[fast] - offsets[slow]))


def _is_same(one: NodeFacts, other: NodeFacts) -> bool:
    return one.boot_id is not None and one.boot_id == other.boot_id


def _share_nothing(one: Node, other: Node) -> bool:
    """Whether the hostfile gives each GPUs of its own, on purpose."""
    return one.gpus is not None and other.gpus is not None and not set(one.gpus) & set(other.gpus)


def _is_bridged(interface: Interface, addr: str) -> bool:
    on_bridge = interface.name == "eth0" and interface.driver in {None, "veth"}
    return on_bridge and ipaddress.ip_address(addr) in _BRIDGES


def _skew(skew_s: float) -> dict[str, str]:
    return {"skew": format_duration(abs(skew_s)), "way": "ahead of" if skew_s > 0 else "behind"}
