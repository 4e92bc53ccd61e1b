"""Speeds between pairs of nodes, and what explains the slow ones: a node, one of its directions, or a cable.

`blame_pairs` is told which pairs are slow; `find_odd` decides that too, against the other pairs and the links.
Measures nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from multinode.records.samples import StreamResult
from multinode.units import format_rate

Pair = tuple[str, str]

_ENOUGH = 0.7
_ENOUGH_AT_10G = 0.3
# Of two streams bound by processors one may well be half as fast as the other.
_ENOUGH_OF_FAST = 0.5
# No card below 10 Gbit/s carries more.
_FAST_GBIT = 5.0
_CPU_BOUND_GBIT = 10.0
# What a link of 10 Gbit/s carries of TCP, with frames of the usual size and any larger.
_CPU_BOUND_GOODPUT_GBIT = 9.4
_PAIR = 2
_BITS_PER_BYTE = 8
_GIGA = 1e9
# What arrived in less tells no rate.
_LEAST_STREAM_S = 1e-3
_LOST = "nstat -az TcpRetransSegs"


class PairSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """What a TCP stream from one node to another reached: over one connection or several, of two tries or one.

    Attributes:
        gbit_per_s: payload that arrived, of two tries the better one; None where the stream failed.
        worse_gbit_per_s: of two tries the other one; None where there was one.
    """

    source: str
    target: str
    gbit_per_s: float | None = None
    worse_gbit_per_s: float | None = None
    error: str | None = None


class RoundTrip(msgspec.Struct, frozen=True, kw_only=True):
    """Round trips of a small message on one TCP connection, seen from `source`; None where they failed.

    What both agents take is part of them.
    """

    source: str
    target: str
    median_us: float | None = None
    p95_us: float | None = None
    error: str | None = None


class RawTcp(msgspec.Struct, frozen=True, kw_only=True):
    """What TCP reached between the nodes' cards without any collective.

    Attributes:
        one: every node sends to the next while it receives from the one before, over one connection: the median of the
            turns that it took with collectives.
        several: likewise over several.
        connections: how many those are; 0 where nothing was measured.
        latency: round trips along the same ring.
        pairs: every pair, both ways, disjoint pairs at once; empty where that was not asked for.
    """

    one: tuple[PairSpeed, ...] = ()
    several: tuple[PairSpeed, ...] = ()
    connections: int = 0
    latency: tuple[RoundTrip, ...] = ()
    pairs: tuple[PairSpeed, ...] = ()

    @property
    def ring(self) -> tuple[PairSpeed, ...]:
        """Each pair of the ring over as many connections as were best."""
        return fastest_of(self.one, self.several)

    @property
    def round_trips_us(self) -> dict[Pair, float]:
        """Medians, by caller and peer."""
        return {(one.source, one.target): one.median_us for one in self.latency if one.median_us is not None}

    @property
    def round_trip_us(self) -> float | None:
        """The median of them; None where there are none."""
        return statistics.median(self.round_trips_us.values()) if self.round_trips_us else None


class Odd(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is not as it is between the others.

    Attributes:
        kind: `node` (slow both ways with every peer), `sends` or `receives` (a node, that way only), `cable` (two
            nodes, both ways), `one-way` (from the first node to the second), `failed` (streams that did not run), `all`
            (no pair gets what the links promise).
        nodes: whom it concerns: one node, or sender and receiver; none where it is all of them.
        best_gbit_per_s: the fastest of the streams concerned; None where none ran.
        usual_gbit_per_s: median of the streams that are well; where none is, what the links carry.
        due_gbit_per_s: what the links carry, where it falls short of that and not only of the others.
        error: of streams that did not run, why.
        text: it in words; likewise `hint`, what to look at.
    """

    kind: str
    nodes: tuple[str, ...]
    best_gbit_per_s: float | None = None
    usual_gbit_per_s: float | None = None
    due_gbit_per_s: float | None = None
    error: str | None = None
    text: str = ""
    hint: str = ""

    @property
    def figures(self) -> dict[str, float | str]:
        """What a sentence about it needs."""
        names = ("best_gbit_per_s", "usual_gbit_per_s", "due_gbit_per_s", "error")
        return {name: figure for name in names if (figure := getattr(self, name)) is not None}

    def covers(self, source: str, target: str) -> bool:
        """Whether the stream from `source` to `target` is one of those concerned."""
        return {
            "all": True,
            "sends": self.nodes[:1] == (source,),
            "receives": self.nodes[:1] == (target,),
            "one-way": self.nodes == (source, target),
            "cable": set(self.nodes) == {source, target},
            "node": source in self.nodes or target in self.nodes,
            "failed": not self.nodes
            or self.nodes == (source, target)
            or (len(self.nodes) == 1 and self.nodes[0] in (source, target)),
        }[self.kind]


class Blame(msgspec.Struct, frozen=True, kw_only=True):
    """Slow pairs that have one explanation.

    Attributes:
        kind: as in `Odd`, without `failed`.
        nodes: likewise.
        pairs: the slow streams that it explains.
    """

    kind: str
    nodes: tuple[str, ...]
    pairs: tuple[Pair, ...]


def stream_speed(source: str, target: str, results: Sequence[StreamResult]) -> PairSpeed:
    """All connections of a stream together; it is as good as the worst of them."""
    total = 0.0
    for one in results:
        if one.error is not None or not one.size_bytes or (one.time_s or 0.0) < _LEAST_STREAM_S:
            return PairSpeed(source=source, target=target, error=one.error or "too little arrived")
        total += one.size_bytes * _BITS_PER_BYTE / (one.time_s or 0.0) / _GIGA
    return PairSpeed(source=source, target=target, gbit_per_s=total)


def least_of_due(due_gbit_per_s: float, link_gbit_per_s: float) -> float:
    """Gbit/s that a stream reaches at least, whichever processor runs it."""
    return due_gbit_per_s * (_ENOUGH_AT_10G if link_gbit_per_s >= _CPU_BOUND_GBIT else _ENOUGH)


def blame_pairs(slow: Mapping[Pair, bool], nodes: Sequence[str]) -> tuple[Blame, ...]:
    """Explain the slow pairs: by a node whose streams, two at least, are all slow in a role; else pair by pair.

    Args:
        slow: whether it is slow, by sender and receiver, of every pair that was measured.
        nodes: in the order in which they are to be told.
    """
    met = {name for pair in slow for name in pair}
    if len(met) > _PAIR and slow and all(slow.values()):
        return (Blame(kind="all", nodes=(), pairs=tuple(slow)),)
    told: set[Pair] = set()
    blames = []
    for name in nodes if len(met) > _PAIR else ():
        blame = _blame_node(name, slow)
        if blame is not None and not told.issuperset(blame.pairs):
            told.update(blame.pairs)
            blames.append(blame)
    left = [pair for pair, is_slow in slow.items() if is_slow and pair not in told]
    return (*blames, *_blame_each(left))


def find_odd(pairs: Iterable[PairSpeed], ceilings: Mapping[str, float] | None = None) -> tuple[Odd, ...]:
    """What is odd, judged against the other pairs and, where every link is known, against the links.

    What is usual is found in spite of the odd ones as long as at most half of the nodes have any.

    Args:
        pairs: every pair that was tried, in any order.
        ceilings: payload in Gbit/s that the link of each node carries, by node.
    """
    return _find_odd(tuple(pairs), ceilings, lambda blames: blames)


def find_odd_in_ring(pairs: Iterable[PairSpeed], ceilings: Mapping[str, float] | None = None) -> tuple[Odd, ...]:
    """Likewise of streams around a ring: a node has one peer each way there, and is blamed if both are slow."""
    return _find_odd(tuple(pairs), ceilings, _join_in_ring)


def least_of_pairs(pairs: Iterable[PairSpeed], ceilings: Mapping[str, float] | None = None) -> dict[Pair, float]:
    """Gbit/s below which `find_odd`, told the same, calls a stream slow: of every pair that ran."""
    return _Field(tuple(pairs), ceilings).least()


def slowest_gb_per_s(pairs: Iterable[PairSpeed]) -> float | None:
    """What the slowest of the streams that ran reached: a ring is as fast as that."""
    speeds = [one.gbit_per_s for one in pairs if one.gbit_per_s is not None]
    return min(speeds) / _BITS_PER_BYTE if speeds else None


def fastest_of(*tries: Iterable[PairSpeed]) -> tuple[PairSpeed, ...]:
    """Of each pair the try that reached most; one that failed counts where no other ran."""
    best: dict[Pair, PairSpeed] = {}
    for one in (one for each in tries for one in each):
        known = best.get((one.source, one.target))
        if known is None or (one.gbit_per_s or 0.0) > (known.gbit_per_s or 0.0):
            best[one.source, one.target] = one
    return tuple(best.values())


class _Field:
    """The streams that ran, each with its due where the links are known, and what is usual among them."""

    def __init__(self, tried: Sequence[PairSpeed], ceilings: Mapping[str, float] | None) -> None:
        self.nodes = tuple(dict.fromkeys(name for one in tried for name in (one.source, one.target)))
        self._speeds = {(one.source, one.target): one.gbit_per_s for one in tried if one.gbit_per_s is not None}
        known = ceilings is not None and all(ceilings.get(name) for name in self.nodes)
        self._dues = {(a, b): min(ceilings[a], ceilings[b]) for a, b in self._speeds} if ceilings and known else {}
        # Where links differ, how full each is can be compared, and not how fast.
        self._levels = {pair: speed / self._dues.get(pair, 1.0) for pair, speed in self._speeds.items()}
        self._usual = _usual_level(self._levels)

    def least(self) -> dict[Pair, float]:
        """Gbit/s that each pair has to reach."""
        return {pair: max(self._least_of_usual(pair), self._least_of_due(pair)) for pair in self._speeds}

    def slow(self) -> dict[Pair, bool]:
        return {pair: self._speeds[pair] < least for pair, least in self.least().items()}

    def unlike_others(self) -> dict[Pair, bool]:
        """Whether a pair is slower than is usual among the others."""
        return {pair: speed < self._least_of_usual(pair) for pair, speed in self._speeds.items()}

    def tell(self, blame: Blame) -> Odd:
        best = max(blame.pairs, key=self._speeds.__getitem__)
        slow = self.slow()
        well = [speed for pair, speed in self._speeds.items() if not slow[pair]]
        usual = statistics.median(well) if well else self._dues.get(best, self._usual)
        due = self._dues[best] if self._speeds[best] < self._least_of_due(best) else None
        measure = f"{format_rate(due)} expected of the link" if due is not None else f"{format_rate(usual)} is usual"
        text, hint = _told(blame, format_rate(self._speeds[best]), measure)
        return Odd(
            kind=blame.kind,
            nodes=blame.nodes,
            best_gbit_per_s=self._speeds[best],
            usual_gbit_per_s=usual,
            due_gbit_per_s=due,
            text=text,
            hint=hint,
        )

    def _least_of_usual(self, pair: Pair) -> float:
        usual_gbit_per_s = self._usual * self._dues.get(pair, 1.0)
        return usual_gbit_per_s * (_ENOUGH if usual_gbit_per_s <= _FAST_GBIT else _ENOUGH_OF_FAST)

    def _least_of_due(self, pair: Pair) -> float:
        due = self._dues.get(pair)
        if due is None:
            return 0.0
        return least_of_due(due, _CPU_BOUND_GBIT if due >= _CPU_BOUND_GOODPUT_GBIT else due)


def _told(blame: Blame, best: str, measure: str) -> tuple[str, str]:
    """What is slow, and what to look at."""
    node, peer = (blame.nodes[0], blame.nodes[-1]) if blame.nodes else ("", "")
    return {
        "node": (
            f"{node} sends and receives no more than {best} with any peer, {measure}",
            f"cable, switch port, or other traffic of {node}; on {node}: ip -s link; tc -s qdisc",
        ),
        "sends": (
            f"{node} sends no more than {best} to any peer, {measure}, and receives at full speed",
            f"a traffic shaper or other traffic on {node}; there: tc -s qdisc; ip -s link",
        ),
        "receives": (
            f"{node} receives no more than {best} from any peer, {measure}, and sends at full speed",
            f"lost packets, a policer, or other traffic to {node}; there: ip -s link; {_LOST} on its peers",
        ),
        "cable": (
            f"between {node} and {peer} a stream reaches {best} at most, either way, {measure}",
            f"cable, NIC or switch port of {node} or {peer}, or what is between; on both: ip -s link; change one cable",
        ),
        "one-way": (
            f"from {node} to {peer} a stream reaches {best}, {measure}",
            f"what {node} sends is shaped, or lost on the way to {peer}; on {node}: tc -s qdisc; on {peer}: ip -s link",
        ),
        "all": (
            f"no stream between the nodes reaches more than {best}, {measure}",
            "the switch they share, other traffic on it, or CPUs too busy to keep up: measure on a quiet network",
        ),
    }[blame.kind]


def _find_odd(
    tried: Sequence[PairSpeed],
    ceilings: Mapping[str, float] | None,
    join: Callable[[tuple[Blame, ...]], tuple[Blame, ...]],
) -> tuple[Odd, ...]:
    field = _Field(tried, ceilings)
    blames = join(blame_pairs(field.slow(), field.nodes))
    if any(blame.kind == "all" for blame in blames):
        blames += join(blame_pairs(field.unlike_others(), field.nodes))
    return (*_failed(tried), *map(field.tell, blames))


def _join_in_ring(blames: tuple[Blame, ...]) -> tuple[Blame, ...]:
    left = list(blames)
    for after in (one for one in blames if one.kind == "one-way"):
        before = next((one for one in left if one.kind == "one-way" and one.nodes[1] == after.nodes[0]), None)
        if before is not None and after in left:
            node = Blame(kind="node", nodes=after.nodes[:1], pairs=before.pairs + after.pairs)
            left[left.index(before)] = node
            left.remove(after)
    return tuple(left)


def _usual_level(levels: Mapping[Pair, float]) -> float:
    """The median of those that are well.

    Well is what half of the nodes reach with half of the nodes: two that are faster between themselves set no standard,
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
            yield Blame(kind="one-way", nodes=(source, target), pairs=((source, target),))
        elif place < slow.index(back):
            yield Blame(kind="cable", nodes=(source, target), pairs=((source, target), back))


def _failed(tried: Sequence[PairSpeed]) -> Iterator[Odd]:
    """Streams that did not run: told once for a node whose streams all failed, else one by one."""
    left = [one for one in tried if one.gbit_per_s is None]
    if len(tried) > 1 and len(left) == len(tried):
        yield _not_run("no stream between the nodes ran", (), left[0].error)
        return
    for name in dict.fromkeys(name for one in left for name in (one.source, one.target)):
        mine = [one for one in tried if name in (one.source, one.target)]
        if len(mine) > _PAIR and all(one in left for one in mine):
            left = [one for one in left if one not in mine]
            yield _not_run(f"no stream to or from {name} ran", (name,), mine[0].error)
    for one in left:
        text = f"the stream from {one.source} to {one.target} did not run"
        yield _not_run(text, (one.source, one.target), one.error)


def _not_run(text: str, nodes: tuple[str, ...], error: str | None) -> Odd:
    why = "no reason is known" if error is None else error
    hint = "a firewall, or a node that went away: multinode check"
    return Odd(kind="failed", nodes=nodes, error=error, text=f"{text}: {why}", hint=hint)
