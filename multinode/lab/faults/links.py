"""Faults of the network: links, frame size, firewall, interfaces, routes. All of it outlives the node's processes."""

from __future__ import annotations

import ipaddress
import re
from typing import ClassVar, Literal

import msgspec

from multinode.decoding import decode_json
from multinode.errors import UsageError
from multinode.lab.faults.fault import AnyFault, Scene, require
from multinode.lab.network import DATA_BRIDGE, SWITCH_NAMESPACE, rate_text, set_port, shape_link
from multinode.lab.processes import run_batch, run_program
from multinode.lab.state import DATA_IFNAME, MANAGEMENT_IFNAME, Lab, LabNode

# What every port of the switch passes.
_PORT_MTU = 1500
# The second port of the card whose first is the training interface.
_SECOND_IFNAME = "ens1f1"
# What the kernel gives a virtual link.
_GSO_SEGMENTS = 65535

_MAX_MTU = 65535
_MAX_PORT = 65535
_MAX_IFNAME = 15
_CARDS = (DATA_IFNAME, MANAGEMENT_IFNAME)
_WAY_WORDS = {"both": "carries", "send": "sends", "receive": "receives"}
_FIREWALL_WORDS = {"drop": "dropped", "reject": "rejected"}
_FIREWALL_VERDICTS = {"drop": "drop", "reject": "reject with tcp reset"}


class LinkDown(AnyFault, frozen=True, kw_only=True, tag="link-down"):
    """The cable of a card is pulled, at the switch's end, so that the node's own settings stand: no carrier."""

    ifname: str = DATA_IFNAME

    def __post_init__(self) -> None:
        _check_card(self.ifname)

    def describe(self) -> str:
        return f"{self.ifname} has no carrier"

    def make(self, scene: Scene) -> None:
        set_port(scene.node, self.ifname, up=False)

    def undo(self, scene: Scene) -> None:
        set_port(scene.node, self.ifname, up=True)


class LinkSlow(AnyFault, frozen=True, kw_only=True, tag="link-slow"):
    """A card carries less than it says, both ways or one: `send` is what the node sends, the other way is as it was."""

    ifname: str = DATA_IFNAME
    rate_gbit_per_s: float
    way: Literal["send", "receive", "both"] = "both"

    def __post_init__(self) -> None:
        _check_card(self.ifname)
        require(self.rate_gbit_per_s > 0, "a rate of zero means that the link is down", "use --down")

    def describe(self) -> str:
        return f"{self.ifname} {_WAY_WORDS[self.way]} {rate_text(self.rate_gbit_per_s)}"

    def make(self, scene: Scene) -> None:
        shape_link(scene.node, self.ifname, self.rate_gbit_per_s, self.way)

    def undo(self, scene: Scene) -> None:
        """As the lab has it."""
        rate = scene.node.rate_gbit_per_s if self.ifname == DATA_IFNAME else None
        shape_link(scene.node, self.ifname, rate, self.way)


class Mtu(AnyFault, frozen=True, kw_only=True, tag="mtu"):
    """The training card sends larger frames than its switch port passes: they vanish, small ones arrive.

    Two nodes agree on the smaller of their TCP segments, so a stream suffers only where both ends have the fault.
    Virtual links pass a batch of segments whatever the MTU says, for a card would have cut it; the node is told to send
    one segment at a time, or some would get through.
    """

    mtu: int

    def __post_init__(self) -> None:
        good = _PORT_MTU < self.mtu <= _MAX_MTU
        require(good, f"an MTU of {self.mtu} is not a fault here", f"{_PORT_MTU + 1} to {_MAX_MTU}, for example 9000")

    def describe(self) -> str:
        return f"{DATA_IFNAME} has an MTU of {self.mtu}, but its switch port passes only {_PORT_MTU}"

    def make(self, scene: Scene) -> None:
        _ip(scene.node, f"link set dev {DATA_IFNAME} mtu {self.mtu} gso_max_segs 1")

    def undo(self, scene: Scene) -> None:
        _ip(scene.node, f"link set dev {DATA_IFNAME} mtu {_PORT_MTU} gso_max_segs {_GSO_SEGMENTS}")


class Ports(AnyFault, frozen=True, kw_only=True, tag="ports"):
    """A firewall turns away TCP connections to these ports that come in on the training card.

    As behind most firewalls, connections that stand are let be.
    """

    first: int
    last: int
    action: Literal["drop", "reject"]

    def __post_init__(self) -> None:
        good = 1 <= self.first <= self.last <= _MAX_PORT
        require(good, f"{self.first}-{self.last} is not a range of ports", "for example 29500 or 30000-60999")

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
    """There is a second card, with this address: two cards in one subnet when it is of the training network."""

    address: str
    # What the other end of its link is set to.
    port_words: ClassVar[tuple[str, ...]] = ("master", DATA_BRIDGE, "up")

    @property
    def ifname(self) -> str:
        """The new interface."""
        return _SECOND_IFNAME

    def __post_init__(self) -> None:
        try:
            ipaddress.IPv4Interface(self.address)
        except ValueError as error:
            raise UsageError(
                f"{self.address!r} is not an address with its network: {error}", hint="write it as 172.18.0.1/16"
            ) from error
        require("/" in self.address, f"{self.address!r} has no network prefix", "write it as 172.18.0.1/16")

    def describe(self) -> str:
        return f"a second interface {self.ifname} with {self.address}"

    def check(self, lab: Lab) -> None:
        """See that neither the interface nor the address exists."""
        taken = self.ifname in _interfaces(lab.node(self.node))
        require(
            not taken, f"{self.node} already has an interface {self.ifname}", "choose another one, or clear its fault"
        )
        address = self.address.partition("/")[0]
        for other in lab.nodes:
            used = address in {other.addr, other.management_addr}
            require(not used, f"{address} is an address of {other.name}", "use one that no node has")

    def make(self, scene: Scene) -> None:
        port = f"fault{scene.number}"
        _ip(scene.node, f"link add {self.ifname} type veth peer name {port} netns {SWITCH_NAMESPACE}")
        run_program(["ip", "-netns", SWITCH_NAMESPACE, "link", "set", port, *self.port_words])
        _ip(scene.node, f"addr add {self.address} brd + dev {self.ifname}", f"link set {self.ifname} up")

    def undo(self, scene: Scene) -> None:
        """Have everybody ask again who has which address, too: a second card may have answered."""
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

    def __post_init__(self) -> None:
        good = 0 < len(self.name) <= _MAX_IFNAME and not re.search(r"[\s/:%]", self.name)
        require(good, f"{self.name!r} is not the name of an interface", "up to 15 characters, for example br-1234")
        super().__post_init__()

    def describe(self) -> str:
        return f"an interface {self.name} with {self.address}"


class Route(AnyFault, frozen=True, kw_only=True, tag="route"):
    """What the node sends to a peer's training address leaves through the management card; answers come as before."""

    peer: str

    def __post_init__(self) -> None:
        require(self.peer != self.node, f"{self.node} has no route to itself", "choose another node as the peer")

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


def _check_card(ifname: str) -> None:
    require(ifname in _CARDS, f"a node has no interface {ifname!r}", f"its interfaces are {' and '.join(_CARDS)}")


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
