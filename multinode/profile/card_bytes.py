"""Card bytes: what each node's cards counted in a step of the training. Pure.

What shrinks is left out, with the reason. What the cards should have counted is `card_flows`'.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from multinode.profile.cards import (
    LOOPBACK,
    Carried,
    carried_in,
    idle_samples,
    is_card,
    is_rdma,
    payload,
    sampled_cards,
)
from multinode.profile.observed import Observed, ObservedNode
from multinode.records.samples import CardBytes, StepSample
from multinode.stats.counter_rates import Span
from multinode.stats.estimate import UnknownError

LEAST_BYTES_A_WORKER = 64 << 10
"""Gloo heads each step of a collective with up to 300 bytes (measured), and there are up to two steps a worker: below
this, for each worker, they may be 1 % of what a card carries; and ARP, SSH and samplers pass it as well."""
# What others carried accounts for what a card lacks, from this part of it on; less is traffic of somebody else.
_ACCOUNTS = 0.5

# A shorter time before the training begins says little about what passes the card without it.
_LEAST_IDLE_NS = 500_000_000


class NodeCards(msgspec.Struct, frozen=True, kw_only=True):
    """Payload that a node's cards carried in a step, on average.

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


class _Series(msgspec.Struct, frozen=True, kw_only=True):
    """A card's counters over steps, and at which moments these ended: first to last, number and moment."""

    counters: list[tuple[int, CardBytes]]
    ends: list[tuple[int, int]]

    @property
    def steps(self) -> int:
        return self.ends[-1][0] - self.ends[0][0]

    @property
    def span(self) -> Span:
        return Span(start_ns=self.ends[0][1], end_ns=self.ends[-1][1])


def read_node_cards(observed: Observed) -> tuple[NodeCards, ...]:
    """Each node's cards, from the last warm-up step's end to that of the last measured step."""
    window = _window(observed)
    if observed.syncs:
        # Between two averages: a part of a round has too much or too little of what it sends.
        ends = {next(iter(window[0].values())).step, *observed.syncs}
        window = [workers for workers in window if any(one.step in ends for one in workers.values())]
    return tuple(_read_node(node, window) for node in observed.nodes)


def find_carrier(others: Mapping[str, Carried], lack: float, *, sends: bool, least: float = 0.0) -> str | None:
    """The other card that carried most one way; None where others do not account for what a card lacks.

    Args:
        others: what they carried, by name.
        lack: bytes that the card should have carried and did not.
        sends: which way.
        least: what is no more than that is a trifle.
    """
    carried = {name: size for name, one in others.items() if (size := one.one_way(sends=sends)) > least}
    if sum(carried.values()) < _ACCOUNTS * lack:
        return None
    return max(carried, key=lambda name: carried[name], default=None)


def _window(observed: Observed) -> list[dict[int, StepSample]]:
    """The measured steps, and before them the last one that does not: the window begins where it ends."""
    if not observed.counted:
        return []
    first, last = observed.counted[0], observed.counted[-1]
    start = max((number for number in observed.steps if number < first), default=first)
    return [workers for number, workers in observed.steps.items() if start <= number <= last]


def _read_node(node: ObservedNode, window: Sequence[dict[int, StepSample]]) -> NodeCards:
    by_steps = _read_by_steps(node, window)
    series = by_steps or _read_by_sampler(node, window)
    rates: dict[str, Carried] = {}
    reasons: dict[str, str] = {}
    for name, one in series.items():
        if not one.steps:
            reasons[name] = f"the counters of {name} were recorded at the end of one step only"
            continue
        try:
            rates[name] = carried_in(one.counters, one.span).times(1 / one.steps)
        except UnknownError:
            reasons[name] = f"{name} came anew while the training ran, and its counters began at zero again"
    if node.ifname is None:
        return NodeCards(node=node.name, ifname=None, others=_without(rates, ()), reason=_no_name(rates))
    rdma = tuple(name for name in rates if is_rdma(name))
    if sum(rates[name].both for name in rdma) <= rates.get(node.ifname, Carried()).both:
        rdma = ()
    ifnames = tuple(dict.fromkeys((node.ifname, *node.ifnames)))
    mine = [rates[name] for name in (*ifnames, *rdma) if name in rates]
    card = series.get(node.ifname)
    no_counters = f"no counters of {node.ifname} were recorded in the measured steps"
    return NodeCards(
        node=node.name,
        ifname=node.ifname,
        carried=sum(mine, Carried()) if mine else None,
        rdma=rdma,
        others=_without(rates, (*ifnames, *rdma)),
        typical=_typical(card) if by_steps and not rdma and len(ifnames) == 1 and card is not None else None,
        idle=_idle(node, card) if card is not None and card.steps else None,
        interpolated=not by_steps,
        reason="" if mine else reasons.get(node.ifname, no_counters),
    )


def _read_by_steps(node: ObservedNode, window: Sequence[dict[int, StepSample]]) -> dict[str, _Series]:
    """What the node's first worker read at the ends of steps."""
    found: dict[str, _Series] = {}
    for rank in sorted(node.ranks):
        for sample in (workers[rank] for workers in window if rank in workers):
            for name, card in (sample.cards or {}).items():
                if is_card(name):
                    series = found.setdefault(name, _Series(counters=[], ends=[]))
                    series.counters.append((sample.mono_ns, card))
                    series.ends.append((sample.step, sample.mono_ns))
        if found:
            break
    return found


def _read_by_sampler(node: ObservedNode, window: Sequence[dict[int, StepSample]]) -> dict[str, _Series]:
    """What the node's sampler read, between the ends of the first and the last step that it has seen."""
    ends = [(one.step, one.mono_ns) for workers in window for rank, one in workers.items() if rank == min(node.ranks)]
    found = {}
    for name, samples in sampled_cards(node).items():
        seen = [end for end in ends if samples[0].mono_ns <= end[1] <= samples[-1].mono_ns]
        if len(seen) > 1:
            found[name] = _Series(counters=[(one.mono_ns, one) for one in samples], ends=[seen[0], seen[-1]])
    return found


def _typical(series: _Series) -> Carried | None:
    """The median step's, of each two readings that follow one another."""
    each = [
        payload(after, before).times(1 / (last - first))
        for ((_, before), (_, after)), ((first, _), (last, _)) in zip(
            itertools.pairwise(series.counters), itertools.pairwise(series.ends), strict=True
        )
    ]
    if not each:
        return None
    return Carried(
        sent=statistics.median(one.sent for one in each), received=statistics.median(one.received for one in each)
    )


def _idle(node: ObservedNode, series: _Series) -> Carried | None:
    """What the card carried in the time of a step before any worker of the node had begun."""
    before = idle_samples(node, sampled_cards(node).get(node.ifname or "", []))
    idle_ns = before[-1].mono_ns - before[0].mono_ns if before else 0
    if idle_ns < _LEAST_IDLE_NS or not series.span.seconds:
        return None
    try:
        span = Span(start_ns=before[0].mono_ns, end_ns=before[-1].mono_ns)
        carried = carried_in([(one.mono_ns, one) for one in before], span)
    except UnknownError:
        return None
    return carried.times(series.span.seconds / series.steps / span.seconds)


def _without(rates: dict[str, Carried], names: Iterable[str]) -> dict[str, Carried]:
    return {name: carried for name, carried in rates.items() if name not in {*names, LOOPBACK}}


def _no_name(rates: dict[str, Carried]) -> str:
    most = max(_without(rates, ()).items(), key=lambda item: item[1].both, default=None)
    return "its NIC of the data plane is unknown" + (f"; {most[0]} carried most" if most else "")
