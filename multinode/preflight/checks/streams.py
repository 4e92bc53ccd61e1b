"""Streams: what short TCP streams between the nodes reached, against what their links should carry."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from multinode.core.facts import Interface
from multinode.core.finding import Finding, Rule
from multinode.preflight.inspection import Inspection
from multinode.units import format_rate, goodput_gb_per_s

__all__ = ["check_streams"]

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

_ENOUGH = 0.7
_ENOUGH_AT_10G = 0.3
_CPU_BOUND_GBIT = 10.0
_BITS_PER_BYTE = 8
_ETHERNET_MTU = 1500


class Stream(msgspec.Struct, frozen=True):
    """One stream that was measured between two links whose speed is known.

    Attributes:
        source: the sender.
        target: the receiver.
        gbit_per_s: payload that arrived.
        ceiling_gbit_per_s: payload that the slower of the two links carries.
        link_gbit_per_s: its speed.
    """

    source: str
    target: str
    gbit_per_s: float
    ceiling_gbit_per_s: float
    link_gbit_per_s: float

    @property
    def is_slow(self) -> bool:
        """Whether it is too slow to be explained by the processor that ran it."""
        enough = _ENOUGH_AT_10G if self.link_gbit_per_s >= _CPU_BOUND_GBIT else _ENOUGH
        return self.gbit_per_s < enough * self.ceiling_gbit_per_s


def check_streams(inspection: Inspection) -> Iterator[Finding]:
    """Streams reach what the links promise; who is slow in all of its own is blamed for them."""
    links = {node.name: interface for node, interface in inspection.links}
    streams = list(_measured(inspection, links))
    slow = [stream for stream in streams if stream.is_slow]
    if not slow:
        yield from _one_connection(streams)
        return
    nodes = {name for stream in streams for name in (stream.source, stream.target)}
    if len(slow) == len(streams) and len(nodes) > 2:  # noqa: PLR2004 - two nodes are a pair, and told as one
        yield ALL_SLOW.found(None, **_figures(slow))
        return
    told: set[Stream] = set()
    for name in (node.name for node, _ in inspection.links if len(nodes) > 2):  # noqa: PLR2004
        rule, blamed = _blame(name, streams)
        if rule is not None and not told.issuperset(blamed):
            told.update(blamed)
            yield rule.found(name, ifname=links[name].name, **_figures(blamed))
    yield from _slow_pairs([stream for stream in slow if stream not in told], inspection, links)


def _slow_pairs(slow: list[Stream], inspection: Inspection, links: dict[str, Interface]) -> Iterator[Finding]:
    ways = {(stream.source, stream.target): stream for stream in slow}
    for stream in slow:
        source, target = stream.source, stream.target
        back = ways.get((target, source))
        if back is None:
            addr = inspection.endpoints[target].addr
            yield SLOW_PAIR.found(source, source=source, target=target, addr=addr, **_figures([stream]))
        elif slow.index(stream) < slow.index(back):
            figures = _figures([stream, back])
            yield SLOW_BETWEEN.found(None, source=source, target=target, ifname=links[source].name, **figures)


def _measured(inspection: Inspection, links: dict[str, Interface]) -> Iterator[Stream]:
    for one in inspection.meeting.streams if inspection.meeting else ():
        ends = [links[name] for name in (one.node, one.peer) if name in links]
        speeds = [link.speed_gbit_per_s for link in ends if link.speed_gbit_per_s]
        if one.gbit_per_s is None or len(speeds) != 2:  # noqa: PLR2004 - both ends
            continue
        mtu = min(link.mtu or _ETHERNET_MTU for link in ends)
        ceiling = goodput_gb_per_s(min(speeds), mtu) * _BITS_PER_BYTE
        yield Stream(one.node, one.peer, one.gbit_per_s, ceiling, min(speeds))


def _blame(name: str, streams: list[Stream]) -> tuple[Rule | None, list[Stream]]:
    """What a node is to blame for: a role in which all of its streams, two at least, are slow."""
    sent = [stream for stream in streams if stream.source == name]
    received = [stream for stream in streams if stream.target == name]
    sends, receives = (len(each) > 1 and all(stream.is_slow for stream in each) for each in (sent, received))
    if sends and receives:
        return SLOW_NODE, sent + received
    if sends:
        return SLOW_SENDER, sent
    return (SLOW_RECEIVER, received) if receives else (None, [])


def _one_connection(streams: list[Stream]) -> Iterator[Finding]:
    fast = [stream for stream in streams if stream.link_gbit_per_s >= _CPU_BOUND_GBIT]
    if fast and all(stream.gbit_per_s < _ENOUGH * stream.ceiling_gbit_per_s for stream in fast):
        yield ONE_CONNECTION.found(None, **_figures(fast))


def _figures(streams: list[Stream]) -> dict[str, str]:
    best = max(streams, key=lambda stream: stream.gbit_per_s)
    return {"best": format_rate(best.gbit_per_s), "ceiling": format_rate(best.ceiling_gbit_per_s)}
