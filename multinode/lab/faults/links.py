"""Faults of the network: links, frame size, firewall, interfaces, routes. All of it outlives the node's processes."""

from __future__ import annotations

import msgspec

from multinode.decoding import decode_json
from multinode.errors import UsageError
from multinode.lab.faults.kinds import (
    PORT_MTU,
    SECOND_IFNAME,
    Address,
    Interface,
    LinkDown,
    LinkSlow,
    Mtu,
    Ports,
    Route,
)
from multinode.lab.faults.scene import Scene
from multinode.lab.network import DATA_BRIDGE, SWITCH_NAMESPACE, set_port, shape_link
from multinode.lab.programs import run_batch, run_program
from multinode.lab.spec import DATA_IFNAME, MANAGEMENT_IFNAME, Lab, LabNode

__all__ = [
    "add_card",
    "add_interface",
    "check_interface",
    "check_route",
    "close_ports",
    "divert",
    "enlarge",
    "open_ports",
    "plug",
    "pull",
    "remove_interface",
    "slow",
    "undivert",
    "unenlarge",
    "unslow",
]

# What the kernel gives a virtual link.
_GSO_SEGMENTS = 65535


class _Named(msgspec.Struct):
    """An entry of `ip -json link`; the rest of it does not matter here."""

    ifname: str


def pull(scene: Scene, fault: LinkDown) -> None:
    """Take the carrier away, as a pulled cable does: at the switch's end, so that the node's own settings stand."""
    set_port(scene.node, fault.ifname, up=False)


def plug(scene: Scene, fault: LinkDown) -> None:
    """Put the cable back."""
    set_port(scene.node, fault.ifname, up=True)


def slow(scene: Scene, fault: LinkSlow) -> None:
    """Shape the end that sends what is to be slow; what the card says of its speed stays as it was."""
    shape_link(scene.node, fault.ifname, fault.rate_gbit_per_s, sends=fault.sends, receives=fault.receives)


def unslow(scene: Scene, fault: LinkSlow) -> None:
    """Shape what was slow as the lab has it."""
    rate = scene.node.rate_gbit_per_s if fault.ifname == DATA_IFNAME else None
    shape_link(scene.node, fault.ifname, rate, sends=fault.sends, receives=fault.receives)


def enlarge(scene: Scene, fault: Mtu) -> None:
    """Let the card send frames that its switch port drops.

    Virtual links pass a batch of segments whatever the MTU says, for a card would have cut it; the node is told to send
    one segment at a time, or some would get through.
    """
    _ip(scene.node, f"link set dev {DATA_IFNAME} mtu {fault.mtu} gso_max_segs 1")


def unenlarge(scene: Scene, fault: Mtu) -> None:
    """Let the card be as it was made."""
    del fault
    _ip(scene.node, f"link set dev {DATA_IFNAME} mtu {PORT_MTU} gso_max_segs {_GSO_SEGMENTS}")


def close_ports(scene: Scene, fault: Ports) -> None:
    """Turn away what opens a connection; as behind most firewalls, connections that stand are let be."""
    table = _table(scene)
    verdict = {"drop": "drop", "reject": "reject with tcp reset"}[fault.action]
    rule = f'iifname "{DATA_IFNAME}" tcp dport {fault.first}-{fault.last} tcp flags & (syn | ack) == syn {verdict}'
    hook = "type filter hook input priority 0; policy accept"
    _nft(scene.node, f"table {table} {{\nchain input {{\n{hook}\n{rule}\n}}\n}}\n")


def open_ports(scene: Scene, fault: Ports) -> None:
    """Take the firewall away."""
    del fault
    # Deleting fails where there is nothing to delete: make it first.
    _nft(scene.node, f"add table {_table(scene)}\ndelete table {_table(scene)}\n")


def check_interface(lab: Lab, fault: Interface | Address) -> None:
    """See that neither the interface nor the address is there already."""
    name, node = _name(fault), lab.node(fault.node)
    if name in _interfaces(node):
        raise UsageError(f"{node.name} has an interface {name} already", hint="name another one, or clear its fault")
    address = fault.address.partition("/")[0]
    for other in lab.nodes:
        if address in {other.addr, other.management_addr}:
            raise UsageError(f"{address} is an address of {other.name}", hint="give one that no node has")


def add_interface(scene: Scene, fault: Interface) -> None:
    """Add a virtual interface that is up, has a carrier and leads nowhere: its other end is in no bridge."""
    _add_link(scene, fault, ["up"])


def add_card(scene: Scene, fault: Address) -> None:
    """Add a card that is joined to the training network."""
    _add_link(scene, fault, ["master", DATA_BRIDGE, "up"])


def remove_interface(scene: Scene, fault: Interface | Address) -> None:
    """Take the interface away, and have everybody ask again who has which address: a second card may have answered."""
    if _name(fault) in _interfaces(scene.node):
        _ip(scene.node, f"link del {_name(fault)}")
    for node in scene.lab.nodes:
        _ip(node, f"neigh flush dev {DATA_IFNAME}")


def check_route(lab: Lab, fault: Route) -> None:
    """See that there is such a peer."""
    lab.node(fault.peer)


def divert(scene: Scene, fault: Route) -> None:
    """Send to the peer's training address through the management network, still from our own training address."""
    peer, node = scene.lab.node(fault.peer), scene.node
    _ip(
        node,
        f"route replace {peer.addr}/32 via {peer.management_addr} dev {MANAGEMENT_IFNAME} src {node.addr}",
    )


def undivert(scene: Scene, fault: Route) -> None:
    """Send to the peer over the training network again."""
    # Unlike `del`, `flush` is content when nothing is there.
    _ip(scene.node, f"route flush {scene.lab.node(fault.peer).addr}/32")


def _name(fault: Interface | Address) -> str:
    return fault.name if isinstance(fault, Interface) else SECOND_IFNAME


def _add_link(scene: Scene, fault: Interface | Address, port_words: list[str]) -> None:
    name, port = _name(fault), f"fault{scene.record.number}"
    _ip(scene.node, f"link add {name} type veth peer name {port} netns {SWITCH_NAMESPACE}")
    run_program(["ip", "-netns", SWITCH_NAMESPACE, "link", "set", port, *port_words])
    _ip(scene.node, f"addr add {fault.address} brd + dev {name}", f"link set {name} up")


def _interfaces(node: LabNode) -> set[str]:
    told = run_program(["ip", "-netns", node.namespace, "-json", "link", "show"])
    return {one.ifname for one in decode_json(told, list[_Named])}


def _ip(node: LabNode, *lines: str) -> None:
    run_batch(["ip", "-netns", node.namespace], lines)


def _table(scene: Scene) -> str:
    return f"inet mn-fault-{scene.record.number}"


def _nft(node: LabNode, text: str) -> None:
    run_program(["ip", "netns", "exec", node.namespace, "nft", "-f", "-"], stdin=text)
