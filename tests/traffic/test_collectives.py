"""busbw and its factors, held against nccl-tests' own definitions (its doc/PERFORMANCE.md)."""

from __future__ import annotations

from fractions import Fraction

import pytest

from multinode.network.scan_evidence import collective_rows, with_shares
from multinode.records.samples import CollectiveSample
from multinode.traffic.algorithms import bus_factor
from tests.golden import raised

MIB = 1 << 20


def sample(
    rank: int, times_us: tuple[float, ...], *, index: int = 0, num_wrong: int | None = 0, collective: str = "all_reduce"
) -> CollectiveSample:
    return CollectiveSample(
        rank=rank,
        collective=collective,
        dtype="float",
        size_bytes=MIB << index,
        count=MIB // 4,
        times_us=times_us,
        num_wrong=num_wrong,
        index=index,
    )


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_factors_are_those_of_nccl_tests(ranks: int) -> None:
    assert bus_factor("all_reduce", ranks) == pytest.approx(float(Fraction(2 * (ranks - 1), ranks)))
    for collective in ("all_gather", "reduce_scatter", "all_to_all"):
        assert bus_factor(collective, ranks) == pytest.approx(float(Fraction(ranks - 1, ranks)))
    for collective in ("broadcast", "reduce", "sendrecv"):
        assert bus_factor(collective, ranks) == 1


def test_an_unknown_collective_has_no_factor() -> None:
    assert str(raised(ValueError, bus_factor, "all_sum", 2)) == "unknown collective 'all_sum'"


def test_a_row_is_the_median_over_iterations_of_the_slowest_worker() -> None:
    (row,) = collective_rows([sample(0, (100.0, 400.0, 200.0)), sample(1, (150.0, 300.0, 250.0))], 2)
    # Slowest of each iteration: 150, 400, 250; fastest: 100, 300, 200.
    assert (row.time_us.value, row.p95_us, row.iters) == (250.0, 400.0, 3)
    assert row.transfer_us == 200.0
    assert row.cv == pytest.approx(125.83 / 266.67, rel=1e-3)
    assert row.algbw_gb_per_s == pytest.approx(MIB / 250e-6 / 1e9)
    assert row.busbw_gb_per_s == pytest.approx(row.algbw_gb_per_s)


@pytest.mark.parametrize(("collective", "factor"), [("all_reduce", 1.5), ("all_gather", 0.75), ("broadcast", 1.0)])
def test_busbw_of_four_ranks_is_algbw_times_the_factor(collective: str, factor: float) -> None:
    (row,) = collective_rows([sample(rank, (100.0,), collective=collective) for rank in range(4)], 4)
    assert row.busbw_gb_per_s == pytest.approx(factor * row.algbw_gb_per_s)
    assert row.cv == 0


def test_shares_are_of_the_ceiling_and_of_tcp() -> None:
    (row,) = collective_rows([sample(rank, (10_000.0,)) for rank in range(2)], 2)
    (shared,) = with_shares([row], 0.2, 0.15)
    assert shared.share_of_ceiling == pytest.approx(row.busbw_gb_per_s / 0.2)
    assert shared.share_of_tcp == pytest.approx(row.busbw_gb_per_s / 0.15)
    assert with_shares([row], None, None) == (row,)


def test_a_message_that_a_worker_has_not_measured_gives_no_row() -> None:
    samples = [sample(0, (1.0,)), sample(1, (1.0,)), sample(0, (2.0,), index=1)]
    assert [row.size_bytes for row in collective_rows(samples, 2)] == [MIB]


def test_rows_are_in_the_order_in_which_they_were_measured() -> None:
    samples = [sample(rank, (1.0,), index=index) for index in (2, 0, 1) for rank in (1, 0)]
    assert [row.size_bytes for row in collective_rows(samples, 2)] == [MIB, 2 * MIB, 4 * MIB]


def test_wrong_values_are_summed_and_what_nobody_verified_is_not_right() -> None:
    (row,) = collective_rows([sample(0, (1.0,), num_wrong=3), sample(1, (1.0,), num_wrong=4)], 2)
    assert row.num_wrong == 7
    (row,) = collective_rows([sample(0, (1.0,), num_wrong=3), sample(1, (1.0,), num_wrong=None)], 2)
    assert row.num_wrong is None
