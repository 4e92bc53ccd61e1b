"""Speeds between pairs of nodes, and what explains slow ones: a node, one of its directions, or a cable.

`blame_pairs` takes the slow pairs as given; `find_odd` also decides which are slow, by comparison with the other pairs
and the links. Measures nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from multinode.figures.figure import Figure
from multinode.findings.finding import Finding
from multinode.findings.rule import Rule, RuleGroup
from multinode.records.samples import StreamResult
from multinode.units import BITS_PER_BYTE, format_rate

Pair = tuple[str, str]

_ENOUGH = 0.7
_ENOUGH_AT_10G = 0.3
# Two CPU-bound streams may differ by a factor of two.
_ENOUGH_OF_FAST = 0.5
# No NIC below 10 Gbit/s carries more.
_FAST_GBIT = 5.0
_CPU_BOUND_GBIT = 10.0
# TCP payload of a 10 Gbit/s link, with frames of the usual size and larger.
_CPU_BOUND_GOODPUT_GBIT = 9.4
_PAIR = 2
_GIGA = 1e9
# Shorter transfers give no rate.
_LEAST_STREAM_S = 1e-3
_LOST = "nstat -az TcpRetransSegs"


class PairSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of a TCP stream from one node to another, over one or several connections, of one or two tries."""

    source: str
    target: str
    gbit_per_s: float | None = None  # received payload, of the better try; None if the stream failed
    worse_gbit_per_s: float | None = None  # of the other try; None if there was one
    error: str | None = None


SENDER = Figure[str]("source", "from \\ to", about="node that sends; each column is a node that receives")
PAIR_RATE = Figure[PairSpeed]("gbit_per_s", "to", "Gbit/s", form="figure", about="payload rate of raw TCP to a node")


class RoundTrip(msgspec.Struct, frozen=True, kw_only=True):
    """Round trips of a small message on a TCP connection from `source`; None if they failed.

    Includes the time of both agents.
    """

    source: str
    target: str
    median_us: float | None = None
    p95_us: float | None = None
    error: str | None = None


class RawTcp(msgspec.Struct, frozen=True, kw_only=True):
    """Raw TCP between the nodes' NICs, without collectives."""

    # every node sends to the next while it receives from the previous, over one connection: the median of the turns
    # with collectives
    one: tuple[PairSpeed, ...] = ()
    several: tuple[PairSpeed, ...] = ()  # over several connections
    connections: int = 0  # their number; 0 if nothing was measured
    latency: tuple[RoundTrip, ...] = ()  # round trips along the same ring
    pairs: tuple[PairSpeed, ...] = ()  # every pair, both ways, disjoint pairs at once; empty if not asked for

    @property
    def ring(self) -> tuple[PairSpeed, ...]:
        """Each pair of the ring, over the better number of connections."""
        return fastest_of(self.one, self.several)

    @property
    def round_trips_us(self) -> dict[Pair, float]:
        """Medians, by caller and peer."""
        return {(trip.source, trip.target): trip.median_us for trip in self.latency if trip.median_us is not None}

    @property
    def round_trip_us(self) -> float | None:
        """Their median; None without any."""
        return statistics.median(self.round_trips_us.values()) if self.round_trips_us else None


class NetworkFinding(Finding, frozen=True, kw_only=True):
    """Something that is slower than the rest, or slows it."""

    nodes: tuple[str, ...] = ()  # one node, or sender and receiver; empty if all are concerned, or it is unknown

    def covers(self, source: str, target: str) -> bool:
        """Whether the stream from `source` to `target` is concerned."""
        return {
            "odd_all": True,
            "odd_sends": self.nodes[:1] == (source,),
            "odd_receives": self.nodes[:1] == (target,),
            "odd_one_way": self.nodes == (source, target),
            "odd_cable": set(self.nodes) == {source, target},
            "odd_node": source in self.nodes or target in self.nodes,
            "odd_failed": not self.nodes
            or self.nodes == (source, target)
            or (len(self.nodes) == 1 and self.nodes[0] in (source, target)),
        }[self.code]


class NetworkRule(Rule, frozen=True, kw_only=True):
    """One kind of `NetworkFinding`. The values `at` (its nodes) and `by_node` (a figure of each) are of all."""

    def found(self, on: str | None, /, **values: object) -> NetworkFinding:
        """As of any rule, with its nodes."""
        nodes: Any = values.get("at", ())
        by_node: Any = values.get("by_node", {})
        fields = self.fields(on, values)
        return NetworkFinding(**fields | {"figures": fields["figures"] | by_node}, nodes=nodes)


class NetworkRules(RuleGroup):
    """Rules of what slows a network."""

    def cause(self, code: str, **words: Any) -> NetworkRule:
        """Declare one with the words of a rule."""
        return self.add(NetworkRule(code=code, **words))


class Blame(msgspec.Struct, frozen=True, kw_only=True):
    """Slow pairs with one explanation."""

    # `node` (slow both ways with every peer), `sends` or `receives` (a node, that way only), `cable` (two nodes, both
    # ways), `one_way` (from the first node to the second), `all` (no pair reaches the link speed)
    kind: str
    nodes: tuple[str, ...]  # one node, or sender and receiver; empty if all are concerned
    pairs: tuple[Pair, ...]  # the slow streams that it explains


def stream_speed(source: str, target: str, results: Sequence[StreamResult]) -> PairSpeed:
    """All connections of a stream together; its status is that of the worst."""
    total = 0.0
    for result in results:
        if result.error is not None or not result.size_bytes or (result.time_s or 0.0) < _LEAST_STREAM_S:
            return PairSpeed(source=source, target=target, error=result.error or "too little data arrived")
        total += result.size_bytes * BITS_PER_BYTE / (result.time_s or 0.0) / _GIGA
    return PairSpeed(source=source, target=target, gbit_per_s=total)


def least_of_due(due_gbit_per_s: float, link_gbit_per_s: float) -> float:
    """Gbit/s that a stream reaches at least, on any CPU."""
    return due_gbit_per_s * (_ENOUGH_AT_10G if link_gbit_per_s >= _CPU_BOUND_GBIT else _ENOUGH)


def blame_pairs(slow: Mapping[Pair, bool], nodes: Sequence[str]) -> tuple[Blame, ...]:
    """Explain the slow pairs: by a node if all its streams in a role, at least two, are slow; otherwise pair by pair.

    Args:
        slow: whether it is slow, by sender and receiver, for every measured pair.
        nodes: in the order of the report.
    """
    met = {name for pair in slow for name in pair}
    if len(met) > _PAIR and slow and all(slow.values()):
        return (Blame(kind="all", nodes=(), pairs=tuple(slow)),)
    named: set[Pair] = set()
    blames = []
    for name in nodes if len(met) > _PAIR else ():
        blame = _blame_node(name, slow)
        if blame is not None and not named.issuperset(blame.pairs):
            named.update(blame.pairs)
            blames.append(blame)
    left = [pair for pair, is_slow in slow.items() if is_slow and pair not in named]
    return (*blames, *_blame_each(left))


def find_odd(pairs: Iterable[PairSpeed], ceilings: Mapping[str, float] | None = None) -> tuple[NetworkFinding, ...]:
    """What is odd, compared with the other pairs and, if every link is known, with the links.

    Finds the usual speed if at most half of the nodes are affected.

    Args:
        pairs: every pair tried, in any order.
        ceilings: payload in Gbit/s that the link of each node carries, by node.
    """
    return _find_odd(tuple(pairs), ceilings, lambda blames: blames)


def find_odd_in_ring(
    pairs: Iterable[PairSpeed], ceilings: Mapping[str, float] | None = None
) -> tuple[NetworkFinding, ...]:
    """Find slow streams around a ring: a node has one peer each way, and is blamed if both are slow."""
    return _find_odd(tuple(pairs), ceilings, _join_in_ring)


def least_of_pairs(pairs: Iterable[PairSpeed], ceilings: Mapping[str, float] | None = None) -> dict[Pair, float]:
    """Gbit/s below which `find_odd` calls a stream slow, for every pair that ran."""
    return _Field(tuple(pairs), ceilings).least()


def slowest_gb_per_s(pairs: Iterable[PairSpeed]) -> float | None:
    """Speed of the slowest stream that ran: it limits a ring."""
    speeds = [pair.gbit_per_s for pair in pairs if pair.gbit_per_s is not None]
    return min(speeds) / BITS_PER_BYTE if speeds else None


def fastest_of(*tries: Iterable[PairSpeed]) -> tuple[PairSpeed, ...]:
    """The fastest try of each pair; a failed one counts if no other ran."""
    best: dict[Pair, PairSpeed] = {}
    for pair in (pair for each in tries for pair in each):
        fastest = best.get((pair.source, pair.target))
        if fastest is None or (pair.gbit_per_s or 0.0) > (fastest.gbit_per_s or 0.0):
            best[pair.source, pair.target] = pair
    return tuple(best.values())


ODD = NetworkRules("Slow or failed streams between nodes")


def _odd(kind: str, *, about: str, message: str, hint: str) -> NetworkRule:
    figures = ("best_gbit_per_s", "usual_gbit_per_s", "due_gbit_per_s")
    return ODD.cause(f"odd_{kind}", about=about, message=message, hint=hint, figures=figures)


_ODD = {
    "node": _odd(
        "node",
        about="a node that sends slowly to every peer and receives slowly from every peer",
        message="a stream between {node} and any peer reaches at most {best} in either direction, {measure}",
        hint="check the cable and the switch port of {node!s}, and look for other traffic; run there: ip -s link; tc "
        "-s qdisc",
    ),
    "sends": _odd(
        "sends",
        about="a node that sends slowly to every peer",
        message="{node} sends at most {best} to any peer, {measure}, but receives at full speed",
        hint="look for a traffic shaper or other traffic on {node!s}; run there: tc -s qdisc; ip -s link",
    ),
    "receives": _odd(
        "receives",
        about="a node that receives slowly from every peer",
        message="{node} receives at most {best} from any peer, {measure}, but sends at full speed",
        hint="look for lost packets, a policer, or other traffic to {node!s}: run ip -s link there, and "
        f"{_LOST} on its peers",
    ),
    "cable": _odd(
        "cable",
        about="two nodes that are slow in both directions",
        message="a stream between {node} and {peer} reaches at most {best} in either direction, {measure}",
        hint="check the cable, NIC and switch port of {node!s} and {peer!s}, and the path between them: run ip -s "
        "link on both, then replace one cable",
    ),
    "one_way": _odd(
        "one_way",
        about="two nodes that are slow in one direction",
        message="a stream from {node} to {peer} reaches {best}, {measure}",
        hint="traffic from {node!s} may be shaped, or lost on the path to {peer!s}: run tc -s qdisc on {node!s}, and "
        "ip -s link on {peer!s}",
    ),
    "all": _odd(
        "all",
        about="all streams between the nodes are slow",
        message="no stream between the nodes exceeds {best}, {measure}",
        hint="check the shared switch, other traffic and busy CPUs, and measure again on an idle network",
    ),
}
_FAILED = ODD.cause(
    "odd_failed",
    about="streams that failed",
    message="{streams}: {reason}",
    hint="look for a firewall or a node that is down: multinode check",
)


class _Field:
    """The streams that ran, with what their links carry, if known, and the usual speed."""

    def __init__(self, tried: Sequence[PairSpeed], ceilings: Mapping[str, float] | None) -> None:
        self.nodes = tuple(dict.fromkeys(name for pair in tried for name in (pair.source, pair.target)))
        self._speeds = {(pair.source, pair.target): pair.gbit_per_s for pair in tried if pair.gbit_per_s is not None}
        has_ceilings = ceilings is not None and all(ceilings.get(name) for name in self.nodes)
        self._dues = (
            {(a, b): min(ceilings[a], ceilings[b]) for a, b in self._speeds} if ceilings and has_ceilings else {}
        )
        # If links differ, their utilization can be compared, not their speed.
        self._levels = {pair: speed / self._dues.get(pair, 1.0) for pair, speed in self._speeds.items()}
        self._usual = _usual_level(self._levels)

    def least(self) -> dict[Pair, float]:
        """Gbit/s that each pair has to reach."""
        return {pair: max(self._least_of_usual(pair), self._least_of_due(pair)) for pair in self._speeds}

    def slow(self) -> dict[Pair, bool]:
        return {pair: self._speeds[pair] < least for pair, least in self.least().items()}

    def unlike_others(self) -> dict[Pair, bool]:
        """Whether a pair is slower than usual."""
        return {pair: speed < self._least_of_usual(pair) for pair, speed in self._speeds.items()}

    def tell(self, blame: Blame) -> NetworkFinding:
        best = max(blame.pairs, key=self._speeds.__getitem__)
        slow = self.slow()
        well = [speed for pair, speed in self._speeds.items() if not slow[pair]]
        usual = statistics.median(well) if well else self._dues.get(best, self._usual)
        due = self._dues[best] if self._speeds[best] < self._least_of_due(best) else None
        measure = (
            f"compared with the expected {format_rate(due)}"
            if due is not None
            else f"compared with the usual {format_rate(usual)}"
        )
        node, peer = (blame.nodes[0], blame.nodes[-1]) if blame.nodes else (None, "")
        return _ODD[blame.kind].found(
            node if len(blame.nodes) == 1 else None,
            at=blame.nodes,
            node=node,
            peer=peer,
            best=format_rate(self._speeds[best]),
            measure=measure,
            best_gbit_per_s=self._speeds[best],
            usual_gbit_per_s=usual,
            due_gbit_per_s=due,
        )

    def _least_of_usual(self, pair: Pair) -> float:
        usual_gbit_per_s = self._usual * self._dues.get(pair, 1.0)
        return usual_gbit_per_s * (_ENOUGH if usual_gbit_per_s <= _FAST_GBIT else _ENOUGH_OF_FAST)

    def _least_of_due(self, pair: Pair) -> float:
        due = self._dues.get(pair)
        if due is None:
            return 0.0
        return least_of_due(due, _CPU_BOUND_GBIT if due >= _CPU_BOUND_GOODPUT_GBIT else due)


def _find_odd(
    tried: Sequence[PairSpeed],
    ceilings: Mapping[str, float] | None,
    join: Callable[[tuple[Blame, ...]], tuple[Blame, ...]],
) -> tuple[NetworkFinding, ...]:
    field = _Field(tried, ceilings)
    blames = join(blame_pairs(field.slow(), field.nodes))
    if any(blame.kind == "all" for blame in blames):
        blames += join(blame_pairs(field.unlike_others(), field.nodes))
    return (*_failed(tried), *map(field.tell, blames))


def _join_in_ring(blames: tuple[Blame, ...]) -> tuple[Blame, ...]:
    left = list(blames)
    for after in (blame for blame in blames if blame.kind == "one_way"):
        before = next((blame for blame in left if blame.kind == "one_way" and blame.nodes[1] == after.nodes[0]), None)
        if before is not None and after in left:
            node = Blame(kind="node", nodes=after.nodes[:1], pairs=before.pairs + after.pairs)
            left[left.index(before)] = node
            left.remove(after)
    return tuple(left)


def _usual_level(levels: Mapping[Pair, float]) -> float:
    """The median of the good streams.

    Good is what half of the nodes reach with half of the nodes: two that are faster between themselves set no standard,
    and half of the nodes can be slow without setting one.
    """
    if not levels:
        return 0.0
    met: dict[str, dict[str, float]] = {}
    for (source, target), level in levels.items():
        for name, peer in ((source, target), (target, source)):
            best = met.setdefault(name, {})
            best[peer] = max(level, best.get(peer, 0.0))
    half = math.ceil(len(met) / 2)
    with_half = [sorted(best.values(), reverse=True)[min(max(half - 1, 1), len(best)) - 1] for best in met.values()]
    standard = sorted(with_half, reverse=True)[half - 1]
    return statistics.median(level for level in levels.values() if level >= _ENOUGH * standard)


def _blame_node(name: str, slow: Mapping[Pair, bool]) -> Blame | None:
    sent = tuple(pair for pair in slow if pair[0] == name)
    received = tuple(pair for pair in slow if pair[1] == name)
    sends, receives = (len(each) > 1 and all(slow[pair] for pair in each) for each in (sent, received))
    if sends and receives:
        return Blame(kind="node", nodes=(name,), pairs=sent + received)
    if sends:
        return Blame(kind="sends", nodes=(name,), pairs=sent)
    return Blame(kind="receives", nodes=(name,), pairs=received) if receives else None


def _blame_each(slow: Sequence[Pair]) -> Iterator[Blame]:
    for place, (source, target) in enumerate(slow):
        back = (target, source)
        if back not in slow:
            yield Blame(kind="one_way", nodes=(source, target), pairs=((source, target),))
        elif place < slow.index(back):
            yield Blame(kind="cable", nodes=(source, target), pairs=((source, target), back))


def _failed(tried: Sequence[PairSpeed]) -> Iterator[NetworkFinding]:
    left = [pair for pair in tried if pair.gbit_per_s is None]
    if len(tried) > 1 and len(left) == len(tried):
        yield _not_run("no stream between the nodes ran", (), left[0].error)
        return
    for name in dict.fromkeys(name for pair in left for name in (pair.source, pair.target)):
        mine = [pair for pair in tried if name in (pair.source, pair.target)]
        if len(mine) > _PAIR and all(pair in left for pair in mine):
            left = [pair for pair in left if pair not in mine]
            yield _not_run(f"no stream to or from {name} ran", (name,), mine[0].error)
    for pair in left:
        text = f"the stream from {pair.source} to {pair.target} did not run"
        yield _not_run(text, (pair.source, pair.target), pair.error)


def _not_run(text: str, nodes: tuple[str, ...], error: str | None) -> NetworkFinding:
    return _FAILED.found(None, at=nodes, streams=text, reason=error or "the reason is unknown")
