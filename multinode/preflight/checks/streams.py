"""Streams: what short TCP streams between the nodes reached, against what their links should carry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

import msgspec

from multinode.analyse.nccl_test.pair_speeds import Blame, Pair, PairSpeed, blame_pairs, least_of_due
from multinode.core.check.finding import Finding, Rule
from multinode.core.cluster.facts import Interface
from multinode.preflight.inspection import Inspection
from multinode.units import format_rate, goodput_gb_per_s

__all__ = ["check_streams", "least_speeds"]

SLOW_NODE = Rule(
    check="link",
    severity="warning",
    catches="a node whose link carries much less than it negotiated, in both directions",
    message="{ifname} sends and receives no more than {best}, where {ceiling} would be its due: every collective goes "
    "at the pace of this node",
    hint="cable, plug, switch port, or other traffic on {node}: ip -s link show {ifname}; sudo ethtool {ifname}; "
    "measure on a quiet network once more: multinode check --bandwidth",
)
SLOW_SENDER = Rule(
    check="link",
    severity="warning",
    catches="a node that sends slowly and receives well",
    message="{ifname} sends no more than {best}, where {ceiling} would be its due, and receives well: every collective "
    "goes at the pace of this node",
    hint="a traffic shaper or other traffic on {node}: tc -s qdisc show dev {ifname}; sudo ethtool -S {ifname}",
)
SLOW_RECEIVER = Rule(
    check="link",
    severity="warning",
    catches="a node that receives slowly and sends well",
    message="{ifname} receives no more than {best}, where {ceiling} would be its due, and sends well: every collective "
    "goes at the pace of this node",
    hint="lost packets, a policer, or other traffic to {node}: tc -s qdisc show dev {ifname}; sudo ethtool -S {ifname}",
)
SLOW_PAIR = Rule(
    check="link",
    severity="warning",
    catches="two nodes between which the network is slow, while both are fast with others",
    message="from {source} to {target} a stream reaches {best}, where {ceiling} would be its due: something between "
    "the two holds it back",
    hint="do they hang on different switches, with a slower link between them? On {source}: traceroute -n {addr}",
)
SLOW_BETWEEN = Rule(
    check="link",
    severity="warning",
    catches="two nodes between which the network is slow both ways",
    message="between {source} and {target} a stream reaches {best} at most, either way, where {ceiling} would be its "
    "due: the card, cable or switch port of one of the two, or what lies between them",
    hint="on both: sudo ethtool {ifname}; ip -s link show {ifname}; change the cables of the two, one after the other, "
    "and check again",
)
ALL_SLOW = Rule(
    check="link",
    severity="note",
    catches="a network that carries less than its links promise, between all nodes",
    message="no stream between the nodes reaches more than {best}, where {ceiling} would be its due: the switch, or "
    "processors too busy to keep up",
    hint="measure once more on quiet nodes, or with the job's own collectives: multinode nccl-test",
)
ONE_CONNECTION = Rule(
    check="link",
    severity="note",
    catches="a link of 10 Gbit/s or more that one TCP connection cannot fill",
    message="one TCP connection reaches {best} at most, where the links carry {ceiling}: at such speeds it is bound by "
    "a processor, and NCCL opens several",
    hint="what the collectives reach: multinode nccl-test",
)

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


_Streams = Sequence[tuple[PairSpeed, "_Due"]]


class _Due(msgspec.Struct, frozen=True):
    """What the slower of two links carries of payload, and its speed."""

    goodput_gbit_per_s: float
    link_gbit_per_s: float

    @property
    def least_gbit_per_s(self) -> float:
        """What a stream reaches at least, whichever processor runs it."""
        return least_of_due(self.goodput_gbit_per_s, self.link_gbit_per_s)


def check_streams(inspection: Inspection) -> Iterator[Finding]:
    """Streams reach what the links promise; who is slow in all of its own is blamed for them."""
    links = {node.name: interface for node, interface in inspection.links}
    streams = list(_measured(inspection))
    slow = {(one.source, one.target): (one.gbit_per_s or 0.0) < due.least_gbit_per_s for one, due in streams}
    if not any(slow.values()):
        yield from _one_connection(streams)
    for blame in blame_pairs(slow, tuple(links)):
        blamed = [(one, due) for one, due in streams if (one.source, one.target) in blame.pairs]
        yield _finding(blame, blamed, inspection, links)


def least_speeds(inspection: Inspection) -> dict[Pair, float]:
    """Gbit/s that a stream reaches at least unless something is wrong, by pair of nodes whose links are known."""
    return {pair: due.least_gbit_per_s for pair, due in _dues(inspection).items()}


def _finding(blame: Blame, slow: _Streams, inspection: Inspection, links: dict[str, Interface]) -> Finding:
    words: dict[str, object] = {**_figures(slow)}
    if blame.nodes:
        source, target = blame.nodes[0], blame.nodes[-1]
        addr = inspection.endpoints[target].addr
        words |= {"source": source, "target": target, "ifname": links[source].name, "addr": addr}
    # Between two nodes either may be to blame, and all of them are none in particular.
    nobody = blame.kind in {"cable", "all"}
    return _RULES[blame.kind].found(None if nobody else blame.nodes[0], **words)


def _measured(inspection: Inspection) -> Iterator[tuple[PairSpeed, _Due]]:
    """The streams that ran between two links whose speed is known."""
    dues = _dues(inspection)
    for one in inspection.meeting.streams if inspection.meeting else ():
        due = dues.get((one.source, one.target))
        if one.gbit_per_s is not None and due is not None:
            yield one, due


def _dues(inspection: Inspection) -> dict[Pair, _Due]:
    known = {node.name: (card, card.speed_gbit_per_s) for node, card in inspection.links if card.speed_gbit_per_s}
    dues = {}
    for (name, (one, speed)), (peer, (other, its_speed)) in permutations(known.items(), 2):
        link = min(speed, its_speed)
        mtu = min(one.mtu or _ETHERNET_MTU, other.mtu or _ETHERNET_MTU)
        dues[name, peer] = _Due(goodput_gb_per_s(link, mtu) * _BITS_PER_BYTE, link)
    return dues


def _one_connection(streams: _Streams) -> Iterator[Finding]:
    fast = [(one, due) for one, due in streams if due.link_gbit_per_s >= _CPU_BOUND_GBIT]
    if fast and all((one.gbit_per_s or 0.0) < _FILLED * due.goodput_gbit_per_s for one, due in fast):
        yield ONE_CONNECTION.found(None, **_figures(fast))


def _figures(streams: _Streams) -> dict[str, str]:
    best, due = max(streams, key=lambda each: each[0].gbit_per_s or 0.0)
    reached = format_rate(best.gbit_per_s or 0.0)
    if best.worse_gbit_per_s is not None:
        reached += f" (the better of two tries; the other: {format_rate(best.worse_gbit_per_s)})"
    return {"best": reached, "ceiling": format_rate(due.goodput_gbit_per_s)}
