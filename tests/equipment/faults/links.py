"""Faults of the network: links, frame size, firewall, interfaces, routes. All of it outlives the node's processes."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from multinode.decoding import decode_json
from multinode.lab.network import DATA_BRIDGE, SWITCH_NAMESPACE, rate_text, shape_end
from multinode.lab.state import DATA_IFNAME, MANAGEMENT_IFNAME, Lab, LabNode, run_batch, run_program
from tests.equipment.faults.fault import AnyFault, Scene, require

# What every port of the switch passes.
_PORT_MTU = 1500
# The second port of the NIC whose first is the training interface.
_SECOND_IFNAME = "ens1f1"
# What the kernel gives a virtual link.
_GSO_SEGMENTS = 65535

_NICS = (DATA_IFNAME, MANAGEMENT_IFNAME)
_WAY_WORDS = {"both": "carries", "send": "sends", "receive": "receives"}
_FIREWALL_WORDS = {"drop": "dropped", "reject": "rejected"}
_FIREWALL_VERDICTS = {"drop": "drop", "reject": "reject with tcp reset"}


class LinkDown(AnyFault, frozen=True, kw_only=True, tag="link-down"):
    """The cable of a NIC is pulled, at the switch's end, so that the node's own settings stand: no carrier."""

    ifname: str = DATA_IFNAME

    def __post_init__(self) -> None:
        _check_nic(self.ifname)

    def describe(self) -> str:
        return f"{self.ifname} has no carrier"

    def make(self, scene: Scene) -> None:
        set_port(scene.node, self.ifname, up=False)

    def undo(self, scene: Scene) -> None:
        set_port(scene.node, self.ifname, up=True)


class LinkSlow(AnyFault, frozen=True, kw_only=True, tag="link-slow"):
    """A NIC carries less than it says, both ways or one: `send` is what the node sends, the other way is as it was."""

    ifname: str = DATA_IFNAME
    rate_gbit_per_s: float
    way: Literal["send", "receive", "both"] = "both"

    def __post_init__(self) -> None:
        _check_nic(self.ifname)

    def describe(self) -> str:
        return f"{self.ifname} {_WAY_WORDS[self.way]} {rate_text(self.rate_gbit_per_s)}"

    def make(self, scene: Scene) -> None:
        self._shape(scene.node, self.rate_gbit_per_s)

    def undo(self, scene: Scene) -> None:
        """As the lab has it."""
        rate = scene.node.rate_gbit_per_s if self.ifname == DATA_IFNAME else None
        self._shape(scene.node, rate)

    def _shape(self, node: LabNode, rate_gbit_per_s: float | None) -> None:
        # What the node sends passes its own end first; what it receives, the switch's.
        if self.way != "receive":
            shape_end(node.namespace, self.ifname, rate_gbit_per_s)
        if self.way != "send":
            shape_end(SWITCH_NAMESPACE, _port_of(node, self.ifname), rate_gbit_per_s)


class Mtu(AnyFault, frozen=True, kw_only=True, tag="mtu"):
    """The training NIC sends larger frames than its switch port passes: they vanish, small ones arrive.

    Two nodes agree on the smaller of their TCP segments, so a stream suffers only where both ends have the fault.
    Virtual links pass a batch of segments whatever the MTU says, for a NIC would have cut it; the node is told to send
    one segment at a time, or some would get through.
    """

    mtu: int

    def describe(self) -> str:
        return f"{DATA_IFNAME} has an MTU of {self.mtu}, but its switch port passes only {_PORT_MTU}"

    def make(self, scene: Scene) -> None:
        _ip(scene.node, f"link set dev {DATA_IFNAME} mtu {self.mtu} gso_max_segs 1")

    def undo(self, scene: Scene) -> None:
        _ip(scene.node, f"link set dev {DATA_IFNAME} mtu {_PORT_MTU} gso_max_segs {_GSO_SEGMENTS}")


class Ports(AnyFault, frozen=True, kw_only=True, tag="ports"):
    """A firewall turns away TCP connections to these ports that come in on the training NIC.

    As behind most firewalls, connections that stand are let be.
    """

    first: int
    last: int
    action: Literal["drop", "reject"]

    def describe(self) -> str:
        ports = f"{self.first}-{self.last} on {DATA_IFNAME}"
        return f"connections to ports {ports} are {_FIREWALL_WORDS[self.action]}"

    def make(self, scene: Scene) -> None:
        hook = "type filter hook input priority 0; policy accept"
        opens = f'iifname "{DATA_IFNAME}" tcp dport {self.first}-{self.last} tcp flags & (syn | ack) == syn'
        rule = f"{opens} {_FIREWALL_VERDICTS[self.action]}"
        _nft(scene, f"table {_table(scene)} {{\nchain input {{\n{hook}\n{rule}\n}}\n}}\n")

    def undo(self, scene: Scene) -> None:
        # Deleting fails where there is nothing to delete: make it first.
        _nft(scene, f"add table {_table(scene)}\ndelete table {_table(scene)}\n")


class Address(AnyFault, frozen=True, kw_only=True, tag="address"):
    """There is a second NIC, with this address: two NICs in one subnet when it is of the training network."""

    address: str
    # What the other end of its link is set to.
    port_words: ClassVar[tuple[str, ...]] = ("master", DATA_BRIDGE, "up")

    @property
    def ifname(self) -> str:
        """The new interface."""
        return _SECOND_IFNAME

    def describe(self) -> str:
        return f"a second interface {self.ifname} with {self.address}"

    def make(self, scene: Scene) -> None:
        port = f"fault{scene.number}"
        _ip(scene.node, f"link add {self.ifname} type veth peer name {port} netns {SWITCH_NAMESPACE}")
        run_program(["ip", "-netns", SWITCH_NAMESPACE, "link", "set", port, *self.port_words])
        _ip(scene.node, f"addr add {self.address} brd + dev {self.ifname}", f"link set {self.ifname} up")

    def undo(self, scene: Scene) -> None:
        """Have everybody ask again who has which address, too: a second NIC may have answered."""
        if self.ifname in _interfaces(scene.node):
            _ip(scene.node, f"link del {self.ifname}")
        for node in scene.lab.nodes:
            _ip(node, f"neigh flush dev {DATA_IFNAME}")


class Interface(Address, frozen=True, kw_only=True, tag="interface"):
    """There is one more interface, up, with a carrier and an address, and nobody behind it."""

    name: str
    address: str = "172.18.0.1/16"
    port_words: ClassVar[tuple[str, ...]] = ("up",)

    @property
    def ifname(self) -> str:
        """The new interface."""
        return self.name

    def describe(self) -> str:
        return f"an interface {self.name} with {self.address}"


class Route(AnyFault, frozen=True, kw_only=True, tag="route"):
    """What the node sends to a peer's training address leaves through the management NIC; answers come as before."""

    peer: str

    def describe(self) -> str:
        return f"sends to {self.peer} through {MANAGEMENT_IFNAME}"

    def check(self, lab: Lab) -> None:
        reached = ":" not in lab.node(self.peer).addr
        require(reached, f"no management NIC leads to the IPv6 address of {self.peer}", "a lab without --ipv6 has one")

    def make(self, scene: Scene) -> None:
        """Still from the node's own training address."""
        peer, node = scene.lab.node(self.peer), scene.node
        _ip(
            node,
            f"route replace {peer.addr}/32 via {peer.management_addr} dev {MANAGEMENT_IFNAME} src {node.addr}",
        )

    def undo(self, scene: Scene) -> None:
        # Unlike `del`, `flush` is content when nothing is there.
        _ip(scene.node, f"route flush {scene.lab.node(self.peer).addr}/32")


def set_port(node: LabNode, ifname: str, *, up: bool) -> None:
    """Set the switch's end of one of a node's links up or down; down takes the carrier from the node's end."""
    port = _port_of(node, ifname)
    run_program(["ip", "-netns", SWITCH_NAMESPACE, "link", "set", port, "up" if up else "down"])


def _port_of(node: LabNode, ifname: str) -> str:
    return f"{'data' if ifname == node.ifname else 'mgmt'}{node.node_rank}"


def _check_nic(ifname: str) -> None:
    require(ifname in _NICS, f"a node has no interface {ifname!r}", f"its interfaces are {' and '.join(_NICS)}")


class _Named(msgspec.Struct):
    """An entry of `ip -json link`; the rest of it does not matter here."""

    ifname: str


def _interfaces(node: LabNode) -> set[str]:
    told = run_program(["ip", "-netns", node.namespace, "-json", "link", "show"])
    return {one.ifname for one in decode_json(told, list[_Named])}


def _ip(node: LabNode, *lines: str) -> None:
    run_batch(["ip", "-netns", node.namespace], lines)


def _table(scene: Scene) -> str:
    return f"inet mn-fault-{scene.number}"


def _nft(scene: Scene, text: str) -> None:
    run_program(["ip", "netns", "exec", scene.node.namespace, "nft", "-f", "-"], stdin=text)
