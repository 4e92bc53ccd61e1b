"""NIC bytes: the payload per step according to each node's counters. Pure.

A counter that shrinks is excluded, with the reason. `card_flows` gives the expected values.
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
"""Gloo adds up to 300 bytes (measured) to each of up to two collective steps per worker. Below this many bytes per
worker

these may be 1% of the traffic of a NIC; ARP, SSH and samplers use it too.
"""
# Minimum share of a deficit that the traffic of another NIC must explain.
_ACCOUNTS = 0.5

# Minimum time before the training for measuring idle traffic.
_LEAST_IDLE_NS = 500_000_000


class NodeCards(msgspec.Struct, frozen=True, kw_only=True):
    """Mean payload per step on a node's NICs."""

    node: str
    ifname: str | None  # data-plane NIC; None if unknown
    carried: Carried | None = None  # by it, and by the RDMA ports if they carried more; if None, see `reason`
    rdma: tuple[str, ...] = ()  # the included RDMA ports
    others: dict[str, Carried] = {}  # traffic of the other NICs by name, without loopback
    typical: Carried | None = None  # of the median step; None with too few readings
    idle: Carried | None = None  # traffic in the time of a step before the training; None if unknown
    interpolated: bool = False  # whether the counters are the sampler's, read during the training
    reason: str = ""  # why there is no figure


class _Series(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a NIC over steps, with the end of the first and last step: number and time."""

    counters: list[tuple[int, CardBytes]]
    ends: list[tuple[int, int]]

    @property
    def steps(self) -> int:
        return self.ends[-1][0] - self.ends[0][0]

    @property
    def span(self) -> Span:
        return Span(start_ns=self.ends[0][1], end_ns=self.ends[-1][1])


def read_node_cards(observed: Observed) -> tuple[NodeCards, ...]:
    """Traffic of each node's NICs from the end of the warm-up to the end of the last measured step."""
    window = _window(observed)
    if observed.syncs:
        # A partial round has too much or too little traffic.
        ends = {next(iter(window[0].values())).step, *observed.syncs}
        window = [workers for workers in window if any(one.step in ends for one in workers.values())]
    return tuple(_read_node(node, window) for node in observed.nodes)


def find_carrier(others: Mapping[str, Carried], lack: float, *, sends: bool, least: float = 0.0) -> str | None:
    """The other NIC with most traffic in one direction; None if others do not explain a deficit.

    Args:
        others: their traffic, by name.
        lack: missing bytes.
        sends: the direction.
        least: threshold of negligible traffic.
    """
    carried = {name: size for name, one in others.items() if (size := one.one_way(sends=sends)) > least}
    if sum(carried.values()) < _ACCOUNTS * lack:
        return None
    return max(carried, key=lambda name: carried[name], default=None)


def _window(observed: Observed) -> list[dict[int, StepSample]]:
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
            reasons[name] = f"{name} was re-created during the training, and its counters restarted at zero"
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
    ends = [(one.step, one.mono_ns) for workers in window for rank, one in workers.items() if rank == min(node.ranks)]
    found = {}
    for name, samples in sampled_cards(node).items():
        seen = [end for end in ends if samples[0].mono_ns <= end[1] <= samples[-1].mono_ns]
        if len(seen) > 1:
            found[name] = _Series(counters=[(one.mono_ns, one) for one in samples], ends=[seen[0], seen[-1]])
    return found


def _typical(series: _Series) -> Carried | None:
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
    return "its data-plane NIC is unknown" + (f"; {most[0]} carried most" if most else "")
