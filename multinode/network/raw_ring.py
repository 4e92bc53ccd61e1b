"""Raw TCP and raw RDMA around the ring of nodes, interleaved with the collectives. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from multinode.records.plan import LaunchPlan, NodePlan
from multinode.records.samples import PingSample, Sample, StreamSample
from multinode.stats.estimate import spread_of
from multinode.traffic.pair_speeds import Pair, PairSpeed, RawTcp, RoundTrip, stream_speed


def read_ring(plan: LaunchPlan, samples: Mapping[int, Sequence[Sample]], index: int | None = None) -> RawTcp:
    """Medians over the rounds, for each node and the next.

    Args:
        plan: with the nodes in node-rank order.
        samples: by node rank.
        index: of the message whose rounds count; None uses all.
    """
    names = [node.node for node in plan.nodes]
    one, several, latency = list[PairSpeed](), list[PairSpeed](), list[RoundTrip]()
    connections = 0
    for node, peer in zip(plan.nodes, names[1:] + names[:1], strict=True):
        pair, mine = (node.node, peer), samples.get(node.node_rank, ())
        streams = _streams(node, mine, "tcp")
        if index is not None:
            streams = [sample for sample in streams if sample.index == index]
        connections = max([connections, *(len(sample.results) for sample in streams)])
        one += _speed(pair, (sample for sample in streams if len(sample.results) == 1))
        several += _speed(pair, (sample for sample in streams if len(sample.results) > 1))
        pings = [sample for sample in mine if isinstance(sample, PingSample) and sample.rank in node.ranks]
        latency += [_round_trip(pair, sample) for sample in pings[:1]]
    return RawTcp(one=tuple(one), several=tuple(several), connections=connections, latency=tuple(latency))


def read_rdma(plan: LaunchPlan, samples: Mapping[int, Sequence[Sample]]) -> tuple[PairSpeed, ...]:
    """Combined RDMA write rate of all used ports, for each node and the next; empty if not measured."""
    names = [node.node for node in plan.nodes]
    return tuple(
        speed
        for node, peer in zip(plan.nodes, names[1:] + names[:1], strict=True)
        for speed in _speed((node.node, peer), _streams(node, samples.get(node.node_rank, ()), "rdma"))
    )


def _streams(node: NodePlan, mine: Iterable[Sample], network: str) -> list[StreamSample]:
    return [
        sample
        for sample in mine
        if isinstance(sample, StreamSample) and sample.rank in node.ranks and sample.network == network
    ]


def _speed(pair: Pair, streams: Iterable[StreamSample]) -> list[PairSpeed]:
    speeds = [stream_speed(*pair, sample.results) for sample in streams]
    reached = [speed.gbit_per_s for speed in speeds if speed.gbit_per_s is not None]
    if not reached:
        return speeds[-1:]
    return [PairSpeed(source=pair[0], target=pair[1], gbit_per_s=statistics.median(reached))]


def _round_trip(pair: Pair, sample: PingSample) -> RoundTrip:
    if sample.error is not None or not sample.times_us:
        return RoundTrip(source=pair[0], target=pair[1], error=sample.error or "no round trip was measured")
    spread = spread_of(sample.times_us)
    return RoundTrip(source=pair[0], target=pair[1], median_us=spread.median, p95_us=spread.p95)
