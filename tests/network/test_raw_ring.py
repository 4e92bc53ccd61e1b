from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from multinode.network.size_scan import read_rdma, read_ring
from multinode.records.samples import PingSample, Sample, StreamResult, StreamSample
from multinode.traffic.pair_speeds import PairSpeed, RawTcp, RoundTrip

from .test_size_scan import measured, plan, report

GBIT_BYTES = 10**9 // 8


def stream(gbit_per_s: float, *, connections: int = 1, rank: int = 0, index: int = 2, **failed: Any) -> StreamSample:
    """A second long, over so many connections together."""
    result = StreamResult(size_bytes=round(gbit_per_s * GBIT_BYTES / connections), time_s=1.0, **failed)
    return StreamSample(rank=rank, index=index, results=(result,) * connections)


def ring(*of_nodes: Sequence[Sample], index: int | None = None) -> RawTcp:
    return read_ring(plan(), dict(enumerate(of_nodes)), index)


def speeds(pairs: Sequence[PairSpeed]) -> list[tuple[str, str, float | None, str | None]]:
    return [(one.source, one.target, one.gbit_per_s and round(one.gbit_per_s, 3), one.error) for one in pairs]


def test_each_node_and_the_next_have_the_median_of_their_turns() -> None:
    one = [stream(rate) for rate in (0.9, 0.2, 0.94)]
    four = [stream(rate, connections=4) for rate in (0.8, 0.7, 0.6)]
    found = ring([*one, *four], [stream(0.5, rank=1)])
    assert speeds(found.one) == [("a", "b", 0.9, None), ("b", "a", 0.5, None)]
    assert speeds(found.several) == [("a", "b", 0.7, None)]
    assert found.connections == 4


def test_a_turn_that_failed_does_not_count_and_where_all_did_it_is_said_why() -> None:
    failed = stream(0.9, error="refused")
    found = ring([stream(0.9), failed, stream(0.7)], [StreamSample(rank=1, index=2, results=(StreamResult(),)), failed])
    assert speeds(found.one) == [("a", "b", 0.8, None), ("b", "a", None, "too little data arrived")]


def test_the_turns_of_one_message_are_told_from_those_of_others() -> None:
    both = [stream(0.9, index=1), stream(0.3, index=2)]
    assert speeds(ring(both, [], index=2).one) == [("a", "b", 0.3, None)]
    assert ring(both, [], index=0) == RawTcp()


def test_raw_rdma_is_the_sum_of_a_nodes_ports_and_no_raw_tcp() -> None:
    def written(rank: int, *gbit_per_s: float) -> StreamSample:
        results = tuple(
            StreamResult(rdma_port="mlx5_0:1", size_bytes=round(one * GBIT_BYTES), time_s=1) for one in gbit_per_s
        )
        return StreamSample(rank=rank, index=2, network="rdma", results=results)

    failed = StreamSample(
        rank=1, index=2, network="rdma", results=(StreamResult(rdma_port="mlx5_0:1", error="no device"),)
    )
    samples = {0: [written(0, 92.57, 97.28), stream(0.9)], 1: [failed]}
    assert speeds(read_rdma(plan(), samples)) == [("a", "b", 189.85, None), ("b", "a", None, "no device")]
    found = read_ring(plan(), samples)
    assert (speeds(found.one), found.several) == ([("a", "b", 0.9, None)], ())


@pytest.mark.parametrize(
    ("sample", "found"),
    [
        (PingSample(rank=0, times_us=(40.0, 20.0, 30.0, 900.0)), {"median_us": 35.0, "p95_us": 900.0}),
        (PingSample(rank=0, times_us=(25.0,), error="stopped answering"), {"error": "stopped answering"}),
        (PingSample(rank=0), {"error": "no round trip was measured"}),
    ],
)
def test_round_trips_are_summed_up_for_each_pair(sample: PingSample, found: dict[str, Any]) -> None:
    assert ring([sample], []).latency == (RoundTrip(source="a", target="b", **found),)


def test_a_node_speaks_for_its_own_workers_alone() -> None:
    assert ring([stream(9.0, rank=1), PingSample(rank=1, times_us=(1.0,))], []) == RawTcp()


def test_a_message_is_held_against_the_raw_tcp_of_its_own_turns() -> None:
    """Something else used half of the link while the largest size was measured in turns with raw streams."""
    samples = measured(plan(), slow=2.0)
    for rank in range(2):
        samples[rank] += [stream(0.94 / 2, rank=rank) for _ in range(5)]
    # All turns together, those of other messages among them, reached twice as much.
    said = report(plan(), samples)
    alone = report(plan(), measured(plan(), slow=2.0))
    assert said.rows[-1].tcp_gb_per_s == pytest.approx(0.94 / 16)
    assert said.rows[-1].share_of_tcp == pytest.approx(1.0, rel=0.01)
    assert alone.rows[-1].share_of_tcp == pytest.approx(0.5, rel=0.01)
    # The others took no turns: they are held against what there is.
    assert said.rows[0].tcp_gb_per_s is None
    assert said.rows[0].share_of_tcp == pytest.approx(said.rows[0].busbw_gb_per_s / (0.94 / 8))
    (_, share) = said.verdict.shares
    assert share.share_of_tcp == pytest.approx(1.0, rel=0.01)
