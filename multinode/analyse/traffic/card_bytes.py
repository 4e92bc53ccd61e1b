"""Card bytes: what each node's cards counted in a step of the training. Pure.

Counters are what nodes say of themselves: what shrinks or cannot be is left out, with the reason. What the cards
should have counted is `card_flows`'.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Iterable, Sequence

import msgspec

from multinode.analyse.run.observed import Observed, ObservedNode
from multinode.analyse.traffic.card_flows import Carried
from multinode.core.run.samples import CardBytes, NicSample, StepSample, WorkerSample

__all__ = ["NodeCards", "read_node_cards"]

# Ethernet, IPv4 and TCP with timestamps: 14 + 20 + 32.
_HEADER_BYTES = 66
_ABSURD_BYTES = 1 << 60
# A shorter time before the training begins says little about what passes the card without it.
_LEAST_IDLE_NS = 500_000_000
_LONGEST_NAME = 64
_LOOPBACK = "lo"


class NodeCards(msgspec.Struct, frozen=True, kw_only=True):
    """Payload that a node's cards carried in a step, in the mean.

    Attributes:
        ifname: its card of the data plane; None is unknown.
        carried: by that card, and by the RDMA ports where they carried more; None has a `reason`.
        rdma: the RDMA ports that are in it.
        others: by name, what its other cards carried; the loopback is none of them.
        typical: the median step's instead of the mean's; None where there are too few readings.
        idle: what the card carried in the time of a step before the training began; None is unknown.
        interpolated: whether the counters are the sampler's, which reads them beside the training.
        reason: why there is no figure.
    """

    node: str
    ifname: str | None
    carried: Carried | None = None
    rdma: tuple[str, ...] = ()
    others: dict[str, Carried] = {}
    typical: Carried | None = None
    idle: Carried | None = None
    interpolated: bool = False
    reason: str = ""


class _Reading(msgspec.Struct, frozen=True, kw_only=True):
    """The counters of a card at the end of a step."""

    step: int
    mono_ns: int
    card: CardBytes


_Readings = dict[str, list[_Reading]]


def read_node_cards(observed: Observed) -> tuple[NodeCards, ...]:
    """Each node's cards, from the last warm-up step's end to that of the last step that counts."""
    return tuple(_read_node(node, _window(observed)) for node in observed.nodes)


def _window(observed: Observed) -> list[dict[int, StepSample]]:
    """The steps that count, and before them the last one that does not: the window begins where it ends."""
    if not observed.counted:
        return []
    first, last = observed.counted[0], observed.counted[-1]
    start = max((number for number in observed.steps if number < first), default=first)
    return [workers for number, workers in observed.steps.items() if start <= number <= last]


def _read_node(node: ObservedNode, window: Sequence[dict[int, StepSample]]) -> NodeCards:
    readings = _steps_readings(node, window)
    interpolated = not readings
    readings = readings or _sampler_readings(node, window)
    rates = {name: rate for name, mine in readings.items() if (rate := _rate(mine)) is not None}
    if node.ifname is None:
        return NodeCards(node=node.name, ifname=None, others=_without(rates, ()), reason=_no_name(rates))
    rdma = tuple(name for name in rates if _is_rdma(name))
    if _sum(rates[name] for name in rdma) <= _sum([rates.get(node.ifname, Carried())]):
        rdma = ()
    mine = [name for name in (node.ifname, *rdma) if name in rates]
    return NodeCards(
        node=node.name,
        ifname=node.ifname,
        carried=_together(rates[name] for name in mine) if mine else None,
        rdma=rdma,
        others=_without(rates, (node.ifname, *rdma)),
        typical=None if interpolated or rdma else _typical(readings.get(node.ifname, [])),
        idle=_idle(node, readings.get(node.ifname, [])),
        interpolated=interpolated,
        reason="" if mine else _why_not(readings.get(node.ifname, []), node.ifname),
    )


def _steps_readings(node: ObservedNode, window: Sequence[dict[int, StepSample]]) -> _Readings:
    """What the node's first worker read at the ends of steps."""
    readings: _Readings = {}
    for rank in sorted(node.ranks):
        for sample in (workers[rank] for workers in window if rank in workers):
            for name, card in _named(sample.cards or {}):
                reading = _Reading(step=sample.step, mono_ns=sample.mono_ns, card=card)
                readings.setdefault(name, []).append(reading)
        if readings:
            break
    return readings


def _named(cards: dict[str, CardBytes]) -> Iterable[tuple[str, CardBytes]]:
    return ((name, card) for name, card in cards.items() if _is_name(name))


def _is_name(name: str) -> bool:
    """Whether it can be a card's: it will be printed."""
    return name.isprintable() and len(name) <= _LONGEST_NAME


def _sampler_readings(node: ObservedNode, window: Sequence[dict[int, StepSample]]) -> _Readings:
    """What the node's sampler read, interpolated for the ends of the first and the last step that it has seen."""
    ends = [(one.step, one.mono_ns) for workers in window for rank, one in workers.items() if rank == min(node.ranks)]
    readings: _Readings = {}
    for name, samples in _by_card(node).items():
        times = [one.mono_ns for one in samples]
        seen = [(step, end_ns) for step, end_ns in ends if times[0] <= end_ns <= times[-1]]
        if len(seen) > 1:
            (first, begun_ns), (last, ended_ns) = seen[0], seen[-1]
            between = [_Reading(step=first, mono_ns=one.mono_ns, card=_card(one)) for one in samples]
            readings[name] = [
                _Reading(step=first, mono_ns=begun_ns, card=_at(between, times, begun_ns)),
                *(one for one in between if begun_ns < one.mono_ns < ended_ns),
                _Reading(step=last, mono_ns=ended_ns, card=_at(between, times, ended_ns)),
            ]
    return readings


def _by_card(node: ObservedNode) -> dict[str, list[NicSample]]:
    cards: dict[str, list[NicSample]] = {}
    for sample in sorted(node.of(NicSample), key=lambda one: one.mono_ns):
        if _is_name(sample.ifname):
            cards.setdefault(sample.ifname, []).append(sample)
    return cards


def _card(sample: NicSample) -> CardBytes:
    return CardBytes(
        tx_bytes=sample.tx_bytes,
        rx_bytes=sample.rx_bytes,
        tx_packets=sample.tx_packets,
        rx_packets=sample.rx_packets,
    )


def _at(readings: Sequence[_Reading], times_ns: Sequence[int], moment_ns: int) -> CardBytes:
    """The counters at a moment between two readings, on a straight line between them."""
    index = min(max(bisect.bisect_right(times_ns, moment_ns), 1), len(readings) - 1)
    before, after = readings[index - 1], readings[index]
    span_ns = after.mono_ns - before.mono_ns
    part = (moment_ns - before.mono_ns) / span_ns if span_ns > 0 else 0.0
    return CardBytes(
        tx_bytes=_between(before.card.tx_bytes, after.card.tx_bytes, part),
        rx_bytes=_between(before.card.rx_bytes, after.card.rx_bytes, part),
        tx_packets=_between(before.card.tx_packets or 0, after.card.tx_packets or 0, part),
        rx_packets=_between(before.card.rx_packets or 0, after.card.rx_packets or 0, part),
    )


def _between(before: int, after: int, part: float) -> int:
    return before + round((after - before) * part)


def _rate(readings: Sequence[_Reading]) -> Carried | None:
    """Payload a step over the whole window; None where that cannot be said."""
    if len(readings) < 2 or any(not _is_possible(one.card) for one in readings):  # noqa: PLR2004 - a start and an end
        return None
    if any(_shrinks(one.card, other.card) for one, other in itertools.pairwise(readings)):
        return None
    return _payload(readings[0], readings[-1])


def _payload(first: _Reading, last: _Reading) -> Carried | None:
    """Between two readings, of a step."""
    steps = last.step - first.step
    if steps < 1:
        return None
    return Carried(
        sent=_less_headers(last.card.tx_bytes - first.card.tx_bytes, first.card.tx_packets, last.card.tx_packets)
        / steps,
        received=_less_headers(last.card.rx_bytes - first.card.rx_bytes, first.card.rx_packets, last.card.rx_packets)
        / steps,
    )


def _less_headers(grown_bytes: int, packets_before: int | None, packets_after: int | None) -> int:
    return max(0, grown_bytes - _HEADER_BYTES * ((packets_after or 0) - (packets_before or 0)))


def _is_possible(card: CardBytes) -> bool:
    return all(0 <= one < _ABSURD_BYTES for one in _counters(card))


def _shrinks(before: CardBytes, after: CardBytes) -> bool:
    """Whether a counter is less than before: the card came anew, and has counted from zero again."""
    return any(late < early for early, late in zip(_counters(before), _counters(after), strict=True))


def _counters(card: CardBytes) -> tuple[int, int, int, int]:
    return card.tx_bytes, card.rx_bytes, card.tx_packets or 0, card.rx_packets or 0


def _typical(readings: Sequence[_Reading]) -> Carried | None:
    """The median step's, of each two readings that follow one another."""
    each = [one for first, last in itertools.pairwise(readings) if (one := _payload(first, last)) is not None]
    if not each:
        return None
    return Carried(
        sent=statistics.median(one.sent for one in each), received=statistics.median(one.received for one in each)
    )


def _idle(node: ObservedNode, readings: Sequence[_Reading]) -> Carried | None:
    """What the card carried in the time of a step before any worker of the node had begun."""
    begun = [one.begun_mono_ns for one in node.of(WorkerSample) if one.begun_mono_ns is not None]
    before = [one for one in _by_card(node).get(node.ifname or "", []) if begun and one.mono_ns < min(begun)]
    if len(before) < 2 or len(readings) < 2:  # noqa: PLR2004 - a start and an end
        return None
    # As if each sample ended a step.
    rate = _rate([_Reading(step=index, mono_ns=one.mono_ns, card=_card(one)) for index, one in enumerate(before)])
    idle_ns = before[-1].mono_ns - before[0].mono_ns
    steps, window_ns = readings[-1].step - readings[0].step, readings[-1].mono_ns - readings[0].mono_ns
    if rate is None or idle_ns < _LEAST_IDLE_NS or steps < 1 or window_ns < 1:
        return None
    part = (len(before) - 1) * (window_ns / steps) / idle_ns
    return Carried(sent=rate.sent * part, received=rate.received * part)


def _together(carried: Iterable[Carried]) -> Carried:
    every = list(carried)
    return Carried(sent=sum(one.sent for one in every), received=sum(one.received for one in every))


def _sum(carried: Iterable[Carried]) -> float:
    return sum(one.sent + one.received for one in carried)


def _without(rates: dict[str, Carried], names: Iterable[str]) -> dict[str, Carried]:
    kept = {*rates} - {*names, _LOOPBACK}
    return {name: rates[name] for name in rates if name in kept}


def _is_rdma(name: str) -> bool:
    """Whether it is a port of an RDMA card, `device/port`: no interface has a stroke in its name."""
    return "/" in name


def _no_name(rates: dict[str, Carried]) -> str:
    most = max(_without(rates, ()), key=lambda name: _sum([rates[name]]), default=None)
    return "its card of the data plane is not known" + (f"; {most} carried most" if most else "")


def _why_not(readings: Sequence[_Reading], ifname: str) -> str:
    if not readings:
        return f"no counters of {ifname} were recorded in the steps that count"
    if any(not _is_possible(one.card) for one in readings):
        return f"the counters of {ifname} cannot be true"
    if any(_shrinks(one.card, other.card) for one, other in itertools.pairwise(readings)):
        return f"{ifname} came anew while the training ran, and its counters began at zero again"
    return f"the counters of {ifname} were recorded at the end of one step only"
