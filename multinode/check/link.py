"""Links: the data plane's cards are as fast and healthy as they should be, and streams reach what they promise."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import NamedTuple

from multinode.check.inspection import Inspection
from multinode.check.rule import Case, Check, Rule, launch_check
from multinode.traffic.pair_speeds import Pair, blame_pairs, least_of_due
from multinode.units import format_rate, goodput_gb_per_s

LINK_DOWN = Rule(
    "link",
    "error",
    catches="the data-plane NIC has no link: cable out, switch port off, interface down",
    message="{ifname}, the interface of the training, is down: the other nodes cannot reach this one",
    hint="look at cable and switch port if it stays down; on {node}:\nsudo ip link set dev {ifname} up",
)
BELOW_CARD = Rule(
    "link",
    "warning",
    catches="a NIC that negotiated less than it supports: a bad cable, a slower switch port",
    message="{ifname} runs at {speed}, and the NIC supports {best}: a cable, a plug or the switch port limits it, and "
    "every collective runs at the speed of the slowest link",
    hint="try another cable and another switch port; see what both ends advertise, on {node}:\nsudo ethtool {ifname}",
)
BELOW_PEERS = Rule(
    "link",
    "warning",
    catches="a node with a slower link than the others",
    message="{ifname} runs at {speed}, and {peer}'s link at {best}: every collective runs at the speed of this one",
    hint="another cable, NIC or switch port for {node}; if it has a faster NIC, name it in the hostfile: ifname=",
)
HALF_DUPLEX = Rule(
    "link",
    "warning",
    catches="half duplex: one end of the cable does not negotiate",
    message="{ifname} runs at half duplex: it cannot send while it receives, as every ring does, and loses packets",
    hint="on the switch port as well as on {node}:\nsudo ethtool -s {ifname} autoneg on",
)
LINK_ERRORS = Rule(
    "link",
    "warning",
    catches="a NIC that counts errors: a bad cable or plug",
    message="{ifname} has counted {errors} errors in {packets} packets: TCP retransmits each, and the link is slower "
    "than its rate",
    hint="another cable or plug for {node}; whether the count still grows:\nip -s link show {ifname}",
)

SLOW_NODE = Rule(
    "link",
    "warning",
    catches="a node whose link carries much less than it negotiated, in both directions",
    message="{ifname} sends and receives no more than {best} of {ceiling}: every collective runs at the speed of this "
    "node",
    hint="cable, plug, switch port, or other traffic: look at it on {node}, and measure again on a quiet "
    "network:\n"
    "ip -s link show {ifname}\n"
    "sudo ethtool {ifname}\n"
    "multinode check --bandwidth",
)
SLOW_SENDER = Rule(
    "link",
    "warning",
    catches="a node that sends slowly and receives well",
    message="{ifname} sends no more than {best} of {ceiling}, and receives at full speed: every collective runs at the "
    "speed of this node",
    hint="a traffic shaper or other traffic on {node}:\ntc -s qdisc show dev {ifname}\nsudo ethtool -S {ifname}",
)
SLOW_RECEIVER = Rule(
    "link",
    "warning",
    catches="a node that receives slowly and sends well",
    message="{ifname} receives no more than {best} of {ceiling}, and sends at full speed: every collective runs at the "
    "speed of this node",
    hint="lost packets, a policer, or other traffic to {node}:\n"
    "tc -s qdisc show dev {ifname}\n"
    "sudo ethtool -S {ifname}",
)
SLOW_PAIR = Rule(
    "link",
    "warning",
    catches="two nodes between which the network is slow, while both are fast with others",
    message="from {source} to {target} a stream reaches {best} of {ceiling}: something between the two limits it",
    hint="are they on different switches, with a slower link between them? On {source}:\ntraceroute -n {addr}",
)
SLOW_BETWEEN = Rule(
    "link",
    "warning",
    catches="two nodes between which the network is slow both ways",
    message="between {source} and {target} a stream reaches at most {best} of {ceiling}, either way: "
    "the NIC, cable or switch port of one of the two, or what is between them",
    hint="replace the cables of the two and check again; on both:\nsudo ethtool {ifname}\nip -s link show {ifname}",
)
ALL_SLOW = Rule(
    "link",
    "note",
    catches="a network that carries less than its links, between all nodes",
    message="no stream between the nodes reaches more than {best} of {ceiling}: the switch, or CPUs that are too busy",
    hint="measure again on idle nodes, or with the job's own collectives:\nmultinode nccl-test",
)
ONE_CONNECTION = Rule(
    "link",
    "note",
    catches="a link of 10 Gbit/s or more that one TCP connection cannot fill",
    message="one TCP connection reaches {best} at most, the links carry {ceiling}: at such speeds one CPU core is the "
    "limit, and NCCL opens several",
    hint="what the collectives reach:\nmultinode nccl-test",
)

_MUCH_LESS = 0.95
_ERROR_RATE = 1e-6
_FEW_ERRORS = 100
_FILLED = 0.7
_CPU_BOUND_GBIT = 10.0
_BITS_PER_BYTE = 8
_ETHERNET_MTU = 1500
_RULES = {
    "node": SLOW_NODE,
    "sends": SLOW_SENDER,
    "receives": SLOW_RECEIVER,
    "one-way": SLOW_PAIR,
    "cable": SLOW_BETWEEN,
    "all": ALL_SLOW,
}


class _Due(NamedTuple):
    """What the slower of two links carries of payload, and its speed."""

    goodput_gbit_per_s: float
    link_gbit_per_s: float


class _Stream(NamedTuple):
    """A stream between two links whose speed is known."""

    pair: Pair
    gbit_per_s: float
    worse_gbit_per_s: float | None
    due: _Due


@launch_check
def check_link_up(inspection: Inspection) -> Iterator[Case]:
    """The card of the data plane has a link."""
    for name, link in inspection.cards.items():
        if not link.up or link.running is False:
            yield LINK_DOWN.found(name, ifname=link.name)


@Check
def check_link_speeds(inspection: Inspection) -> Iterator[Case]:
    """The card runs as fast as it can, and as those of the other nodes."""
    cards = inspection.cards
    speeds = {name: link.speed_gbit_per_s for name, link in cards.items() if link.speed_gbit_per_s}
    fastest = max(speeds, key=lambda name: speeds[name], default="")
    for name, speed in speeds.items():
        best, values = cards[name].card_gbit_per_s, {"ifname": cards[name].name, "speed": format_rate(speed)}
        if best is not None and speed < _MUCH_LESS * best:
            yield BELOW_CARD.found(name, best=format_rate(best), **values)
        if speed < _MUCH_LESS * speeds[fastest]:
            yield BELOW_PEERS.found(name, peer=fastest, best=format_rate(speeds[fastest]), **values)


@Check
def check_link_health(inspection: Inspection) -> Iterator[Case]:
    """The card loses no packets to errors, and sends while it receives."""
    for name, link in inspection.cards.items():
        if link.duplex == "half":
            yield HALF_DUPLEX.found(name, ifname=link.name)
        errors, packets = link.errors or 0, link.packets or 0
        if errors >= _FEW_ERRORS and errors > _ERROR_RATE * packets:
            yield LINK_ERRORS.found(name, ifname=link.name, errors=errors, packets=packets)


@Check
def check_streams(inspection: Inspection) -> Iterator[Case]:
    """Streams reach what the links promise; who is slow in all of its own is blamed for them."""
    links = {node.name: interface for node, interface in inspection.links}
    dues = _dues(inspection)
    streams = [
        _Stream((one.source, one.target), one.gbit_per_s, one.worse_gbit_per_s, due)
        for one in inspection.connectivity.streams
        if one.gbit_per_s is not None and (due := dues.get((one.source, one.target))) is not None
    ]
    slow = {one.pair: one.gbit_per_s < least_of_due(*one.due) for one in streams}
    fast = [one for one in streams if one.due.link_gbit_per_s >= _CPU_BOUND_GBIT]
    bound = all(one.gbit_per_s < _FILLED * one.due.goodput_gbit_per_s for one in fast)
    if fast and bound and not any(slow.values()):
        yield ONE_CONNECTION.found(None, **_figures(fast))
    for blame in blame_pairs(slow, tuple(links)):
        words: dict[str, object] = {**_figures([one for one in streams if one.pair in blame.pairs])}
        if blame.nodes:
            source, target = blame.nodes[0], blame.nodes[-1]
            addr = inspection.place(target).addr
            words |= {"source": source, "target": target, "ifname": links[source].name, "addr": addr}
        # Between two nodes either may be to blame, and all of them are none in particular.
        nobody = blame.kind in {"cable", "all"}
        yield _RULES[blame.kind].found(None if nobody else blame.nodes[0], **words)


def least_speeds(inspection: Inspection) -> dict[Pair, float]:
    """Gbit/s that a stream reaches at least unless something is wrong, by pair of nodes whose links are known."""
    return {pair: least_of_due(*due) for pair, due in _dues(inspection).items()}


def _dues(inspection: Inspection) -> dict[Pair, _Due]:
    known = {node.name: (card, card.speed_gbit_per_s) for node, card in inspection.links if card.speed_gbit_per_s}
    dues = {}
    for (name, (one, speed)), (peer, (other, its_speed)) in permutations(known.items(), 2):
        link = min(speed, its_speed)
        mtu = min(one.mtu or _ETHERNET_MTU, other.mtu or _ETHERNET_MTU)
        dues[name, peer] = _Due(goodput_gb_per_s(link, mtu) * _BITS_PER_BYTE, link)
    return dues


def _figures(streams: list[_Stream]) -> dict[str, str]:
    best = max(streams, key=lambda stream: stream.gbit_per_s)
    reached = format_rate(best.gbit_per_s)
    if best.worse_gbit_per_s is not None:
        reached += f" (the better of two tries; the other: {format_rate(best.worse_gbit_per_s)})"
    return {"best": reached, "ceiling": format_rate(best.due.goodput_gbit_per_s)}
