"""What `lab status` tells: each node of the lab and whether it lives. Reads /proc, changes nothing."""

from __future__ import annotations

import msgspec

from multinode.lab.processes import is_alive
from multinode.lab.shaping import rate_text
from multinode.lab.spec import Lab, LabNode
from multinode.lab.speed import LinkSpeed

__all__ = ["LabStatus", "LabUp", "NodeStatus", "describe_lab"]


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One node as it is now.

    Attributes:
        state: `up`; `down` when its first process or its sshd is gone.
        addr: on the training network.
        management_addr: where SSH reaches it.
        ifname: its training interface.
        rate: line rate of that interface, as `lab rate` takes it; `none` is unshaped.
        rate_gbit_per_s: the same as a number; None is unshaped.
        cores: the cores it is pinned to; None is all of them.
        init_pid: process 1 of the node, as the controller numbers it; None is gone.
        sshd_pid: its sshd, likewise.
    """

    name: str
    state: str
    addr: str
    management_addr: str
    ifname: str
    rate: str
    rate_gbit_per_s: float | None
    cores: tuple[int, ...] | None
    init_pid: int | None
    sshd_pid: int | None


class LabStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The lab as it is now.

    Attributes:
        hostfile: its path; None where no lab stands.
        nodes: in node-rank order.
    """

    schema: str = "multinode.lab/1"
    hostfile: str | None
    nodes: tuple[NodeStatus, ...]


class LabUp(LabStatus, frozen=True, kw_only=True):
    """A lab that was just made.

    Attributes:
        links: what each link carries, node 0 to the others and back.
    """

    links: tuple[LinkSpeed, ...]


def describe_lab(lab: Lab | None) -> LabStatus:
    """Look at every node of the lab."""
    if lab is None:
        return LabStatus(hostfile=None, nodes=())
    return LabStatus(hostfile=lab.hostfile, nodes=tuple(_describe_node(node) for node in lab.nodes))


def _describe_node(node: LabNode) -> NodeStatus:
    init_alive, sshd_alive = is_alive(node.init), is_alive(node.sshd)
    return NodeStatus(
        name=node.name,
        state="up" if init_alive and sshd_alive else "down",
        addr=node.addr,
        management_addr=node.management_addr,
        ifname=node.ifname,
        rate=rate_text(node.rate_gbit_per_s),
        rate_gbit_per_s=node.rate_gbit_per_s,
        cores=node.cores,
        init_pid=node.init.pid if init_alive else None,
        sshd_pid=node.sshd.pid if sshd_alive else None,
    )
