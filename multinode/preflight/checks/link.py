"""Links: the cards of the data plane have the speed, the packet size and the health that they should have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from multinode.core.check.finding import Finding, Rule
from multinode.core.cluster.cluster import Node
from multinode.core.cluster.facts import Interface
from multinode.preflight.inspection import Inspection
from multinode.units import format_rate

__all__ = ["check_link_health", "check_link_speeds", "check_link_up", "check_mtus"]

LINK_DOWN = Rule(
    check="link",
    severity="error",
    catches="the data-plane card has no link: cable out, switch port off, interface down",
    message="{ifname}, the interface of the training, is down: no worker can reach this node",
    hint="on {node}: sudo ip link set dev {ifname} up; if it stays down, look at cable and switch port",
)
BELOW_CARD = Rule(
    check="link",
    severity="warning",
    catches="a card that negotiated less than it can: a bad cable, a slower switch port",
    message="{ifname} runs at {speed}, and the card can do {best}: a cable, a plug or the switch port holds it back, "
    "and every collective goes at the pace of the slowest link",
    hint="see what both ends offer, on {node}: sudo ethtool {ifname}; try another cable and another switch port",
)
BELOW_PEERS = Rule(
    check="link",
    severity="warning",
    catches="a node with a slower link than the others",
    message="{ifname} runs at {speed}, and {peer}'s link at {best}: every collective goes at the pace of this one",
    hint="another cable, card or switch port for {node}; if it has a faster card, name it in the hostfile: ifname=",
)
HALF_DUPLEX = Rule(
    check="link",
    severity="warning",
    catches="half duplex: one end of the cable does not negotiate",
    message="{ifname} runs at half duplex: it cannot send while it receives, as every ring does, and loses packets",
    hint="on {node}: sudo ethtool -s {ifname} autoneg on; and the same on the switch port",
)
MTU_DIFFERS = Rule(
    check="link",
    severity="warning",
    catches="different MTUs on the data plane: large packets get lost, or every node is slower than it could be",
    message="{ifname} has an MTU of {mtu}, that of {peer} {expected}: small packets pass, and large ones may vanish "
    "without a message",
    hint="on {node}: sudo ip link set dev {ifname} mtu {expected}; switches on the way must pass it too",
)
LINK_ERRORS = Rule(
    check="link",
    severity="warning",
    catches="a card that counts errors: a bad cable or plug",
    message="{ifname} has counted {errors} errors in {packets} packets: TCP sends each again, and the link is slower "
    "than it says",
    hint="another cable or plug for {node}; whether the count still grows: ip -s link show {ifname}",
)

_MUCH_LESS = 0.95
_ERROR_RATE = 1e-6
_FEW_ERRORS = 100


def check_link_up(inspection: Inspection) -> Iterator[Finding]:
    """The card of the data plane has a link."""
    for node, interface in _cards(inspection):
        if not interface.up or interface.running is False:
            yield LINK_DOWN.found(node.name, ifname=interface.name)


def check_link_speeds(inspection: Inspection) -> Iterator[Finding]:
    """The card runs as fast as it can, and as those of the other nodes."""
    speeds = [(node, link, link.speed_gbit_per_s) for node, link in _cards(inspection) if link.speed_gbit_per_s]
    for node, link, speed in speeds:
        if link.card_gbit_per_s is not None and speed < _MUCH_LESS * link.card_gbit_per_s:
            best = format_rate(link.card_gbit_per_s)
            yield BELOW_CARD.found(node.name, ifname=link.name, speed=format_rate(speed), best=best)
        fastest, _, best_speed = max(speeds, key=lambda each: each[2])
        if speed < _MUCH_LESS * best_speed:
            values = {"speed": format_rate(speed), "best": format_rate(best_speed)}
            yield BELOW_PEERS.found(node.name, ifname=link.name, peer=fastest.name, **values)


def check_mtus(inspection: Inspection) -> Iterator[Finding]:
    """All cards of the data plane have one MTU."""
    links = [(node, link) for node, link in _cards(inspection) if link.mtu is not None]
    # The first node's counts where two are equally common.
    common = Counter(link.mtu for _, link in links).most_common(1)
    for node, link in links:
        if link.mtu != common[0][0]:
            peer = next(other.name for other, its in links if its.mtu == common[0][0])
            yield MTU_DIFFERS.found(node.name, ifname=link.name, mtu=link.mtu, peer=peer, expected=common[0][0])


def check_link_health(inspection: Inspection) -> Iterator[Finding]:
    """The card loses no packets to errors, and sends while it receives."""
    for node, link in _cards(inspection):
        if link.duplex == "half":
            yield HALF_DUPLEX.found(node.name, ifname=link.name)
        errors, packets = link.errors or 0, link.packets or 0
        if errors >= _FEW_ERRORS and errors > _ERROR_RATE * packets:
            yield LINK_ERRORS.found(node.name, ifname=link.name, errors=errors, packets=packets)


def _cards(inspection: Inspection) -> Iterator[tuple[Node, Interface]]:
    return ((node, link) for node, link in inspection.links if link.kind != "loopback")
