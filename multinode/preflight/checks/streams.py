"""Streams: what short TCP streams between the nodes reached, against what their links should carry."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import msgspec

from multinode.analyse.nccl_test.pair_speeds import Blame, blame_pairs, is_below_due, least_of_due
from multinode.core.check.finding import Finding, Rule
from multinode.core.cluster.facts import Interface
from multinode.preflight.inspection import Inspection
from multinode.preflight.network.pairs import Pair
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


class Stream(msgspec.Struct, frozen=True):
    """One stream that was measured between two links whose speed is known.

    Attributes:
        gbit_per_s: payload that arrived.
        ceiling_gbit_per_s: payload that the slower of the two links carries.
        link_gbit_per_s: speed of that link.
        worse_gbit_per_s: of two tries the other one; None where there was one.
    """

    source: str
    target: str
    gbit_per_s: float
    ceiling_gbit_per_s: float
    link_gbit_per_s: float
    worse_gbit_per_s: float | None = None

    @property
    def is_slow(self) -> bool:
        """Whether it is too slow to be explained by the processor that ran it."""
        return is_below_due(self.gbit_per_s, self.ceiling_gbit_per_s, self.link_gbit_per_s)


def check_streams(inspection: Inspection) -> Iterator[Finding]:
    """Streams reach what the links promise; who is slow in all of its own is blamed for them."""
    links = {node.name: interface for node, interface in inspection.links}
    streams = {(stream.source, stream.target): stream for stream in _measured(inspection, links)}
    slow = {pair: stream.is_slow for pair, stream in streams.items()}
    if not any(slow.values()):
        yield from _one_connection(list(streams.values()))
    for blame in blame_pairs(slow, tuple(links)):
        yield _finding(blame, [streams[pair] for pair in blame.pairs], inspection, links)


def least_speeds(inspection: Inspection) -> dict[Pair, float]:
    """Gbit/s that a stream reaches at least unless something is wrong, by pair of nodes whose links are known."""
    links = {node.name: interface for node, interface in inspection.links}
    dues = {(one, other): _due(links[one], links[other]) for one, other in permutations(links, 2)}
    return {pair: least_of_due(*due) for pair, due in dues.items() if due is not None}


def _finding(blame: Blame, slow: list[Stream], inspection: Inspection, links: dict[str, Interface]) -> Finding:
    words: dict[str, object] = {**_figures(slow)}
    if blame.nodes:
        source, target = blame.nodes[0], blame.nodes[-1]
        addr = inspection.endpoints[target].addr
        words |= {"source": source, "target": target, "ifname": links[source].name, "addr": addr}
    # Between two nodes either may be to blame, and all of them are none in particular.
    nobody = blame.kind in {"cable", "all"}
    return _RULES[blame.kind].found(None if nobody else blame.nodes[0], **words)


def _measured(inspection: Inspection, links: dict[str, Interface]) -> Iterator[Stream]:
    for one in inspection.meeting.streams if inspection.meeting else ():
        due = _due(links[one.node], links[one.peer]) if {one.node, one.peer} <= links.keys() else None
        if one.gbit_per_s is not None and due is not None:
            yield Stream(one.node, one.peer, one.gbit_per_s, *due, one.worse_gbit_per_s)


def _due(one: Interface, other: Interface) -> tuple[float, float] | None:
    """Gbit/s of payload that the slower of two links carries, and its speed; None where one is not known."""
    if not one.speed_gbit_per_s or not other.speed_gbit_per_s:
        return None
    link = min(one.speed_gbit_per_s, other.speed_gbit_per_s)
    mtu = min(one.mtu or _ETHERNET_MTU, other.mtu or _ETHERNET_MTU)
    return goodput_gb_per_s(link, mtu) * _BITS_PER_BYTE, link


def _one_connection(streams: list[Stream]) -> Iterator[Finding]:
    fast = [stream for stream in streams if stream.link_gbit_per_s >= _CPU_BOUND_GBIT]
    if fast and all(stream.gbit_per_s < _FILLED * stream.ceiling_gbit_per_s for stream in fast):
        yield ONE_CONNECTION.found(None, **_figures(fast))


def _figures(streams: list[Stream]) -> dict[str, str]:
    best = max(streams, key=lambda stream: stream.gbit_per_s)
    reached = format_rate(best.gbit_per_s)
    if best.worse_gbit_per_s is not None:
        reached += f" (the better of two tries; the other: {format_rate(best.worse_gbit_per_s)})"
    return {"best": reached, "ceiling": format_rate(best.ceiling_gbit_per_s)}
