"""busbw and its factors, held against nccl-tests' own definitions (its doc/PERFORMANCE.md)."""

from __future__ import annotations

from fractions import Fraction

import pytest

from multinode.analyse.collectives import bus_factor, collective_rows, collective_verdict
from multinode.core.samples import CollectiveSample
from multinode.units import goodput_gb_per_s

MIB = 1 << 20


def sample(rank: int, times_us: tuple[float, ...], *, size_bytes: int = MIB, num_wrong: int = 0) -> CollectiveSample:
    return CollectiveSample(
        rank=rank,
        op="all_reduce",
        dtype="float",
        size_bytes=size_bytes,
        count=size_bytes // 4,
        times_us=times_us,
        num_wrong=num_wrong,
    )


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_factors_are_those_of_nccl_tests(ranks: int) -> None:
    assert bus_factor("all_reduce", ranks) == pytest.approx(float(Fraction(2 * (ranks - 1), ranks)))
    for op in ("all_gather", "reduce_scatter", "all_to_all"):
        assert bus_factor(op, ranks) == pytest.approx(float(Fraction(ranks - 1, ranks)))
    for op in ("broadcast", "reduce", "sendrecv"):
        assert bus_factor(op, ranks) == 1


def test_an_unknown_collective_has_no_factor() -> None:
    with pytest.raises(ValueError, match="all_sum"):
        bus_factor("all_sum", 2)


def test_a_row_is_the_median_over_iterations_of_the_slowest_worker() -> None:
    (row,) = collective_rows([sample(0, (100.0, 400.0, 200.0)), sample(1, (150.0, 300.0, 250.0))], 2, None)
    # Slowest of each iteration: 150, 400, 250.
    assert (row.time_us, row.iters) == (250.0, 3)
    assert row.algbw_gb_per_s == pytest.approx(MIB / 250e-6 / 1e9)
    assert row.busbw_gb_per_s == pytest.approx(row.algbw_gb_per_s)
    assert row.share_of_ceiling is None


def test_four_ranks_have_busbw_one_and_a_half_times_algbw() -> None:
    (row,) = collective_rows([sample(rank, (100.0,)) for rank in range(4)], 4, 1.0)
    assert row.busbw_gb_per_s == pytest.approx(1.5 * row.algbw_gb_per_s)
    assert row.share_of_ceiling == pytest.approx(row.busbw_gb_per_s / goodput_gb_per_s(1.0))


def test_a_size_that_a_worker_has_not_measured_gives_no_row() -> None:
    samples = [sample(0, (1.0,)), sample(1, (1.0,)), sample(0, (2.0,), size_bytes=2 * MIB)]
    assert [row.size_bytes for row in collective_rows(samples, 2, None)] == [MIB]


def test_wrong_values_are_summed_and_come_before_any_speed() -> None:
    rows = collective_rows([sample(0, (1.0,), num_wrong=3), sample(1, (1.0,), num_wrong=4)], 2, None)
    assert rows[0].num_wrong == 7
    assert collective_verdict(rows, None).startswith("7 values were wrong")


def test_the_verdict_says_whether_the_link_is_used() -> None:
    full_us = MIB / (goodput_gb_per_s(1.0) * 1e9) * 1e6
    for times, said in ((full_us * 1.02, "the link is used in full"), (full_us * 3, "it could be more")):
        rows = collective_rows([sample(rank, (times,)) for rank in range(2)], 2, 1.0)
        assert collective_verdict(rows, 1.0).endswith(f"{said}.")
    assert collective_verdict((), 1.0) == "No size was measured by all workers."
