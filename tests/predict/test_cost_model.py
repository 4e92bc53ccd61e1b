from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.predict.cost_model import (
    Overlap,
    StepCosts,
    exposed_ms,
    hideable_part,
    hideable_share,
    overlaps,
    step_parts,
)
from multinode.predict.network_model import CommTimes
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Call, Strategy, TrafficInputs, in_buckets, passing_bytes, strategy_calls
from tests.model.trainings import MEASURED_SENT

MB = 1_000_000
TWO = Layout(nodes=2)
LOAD = TrafficInputs(parameters=8 * MB, trainable=MB, parameter_bytes=2, gradient_bytes=4)
COSTS = StepCosts(compute_ms=90, optimizer_ms=10, host_ms=5, data_ms=1)
milliseconds = st.floats(min_value=0, max_value=1e6)


def test_a_step_is_its_parts_and_what_is_not_hidden() -> None:
    parts = step_parts(COSTS, CommTimes(step_ms=100), accumulation=2, overlap=Overlap(hide_ms=COSTS.hideable_ms / 2))
    # 2 x (90 + 1) + 10 + 5, and 100 less half of the backward pass, which is 60.
    assert (parts.exposed_ms, parts.beyond_ms) == (70, 70)
    assert parts.step_ms == 267


def test_what_follows_the_optimizer_hides_behind_nothing() -> None:
    comm, hidden = CommTimes(micro_batch_ms=50, after_ms=7), Overlap(hide_ms=60)
    parts = step_parts(COSTS, comm, accumulation=4, overlap=hidden)
    assert (parts.exposed_ms, parts.beyond_ms) == (7, 0)
    assert parts.comm_ms == 207


def test_the_last_bucket_is_exposed_and_nothing_beyond_it() -> None:
    calls = (Call(collective="all_reduce", size_bytes=MB, times=4, per_micro_batch=True),)
    parts = step_parts(COSTS, CommTimes(micro_batch_ms=20), accumulation=3, overlap=Overlap(hide_ms=60, calls=calls))
    assert (parts.exposed_ms, parts.beyond_ms) == (15, 0)


def test_on_gloo_ddp_alone_computes_and_communicates_at_once() -> None:
    assert [overlaps(one, "gloo") for one in (Strategy.DDP, Strategy.ZERO2, Strategy.FSDP)] == [True, False, False]
    assert all(overlaps(one, "nccl") for one in Strategy)


@given(milliseconds, milliseconds, milliseconds, st.integers(1, 64), st.floats(min_value=0, max_value=1))
def test_more_communication_is_never_faster_and_more_overlap_never_slower(
    compute: float, comm: float, more: float, accumulation: int, overlap: float
) -> None:
    costs = StepCosts(compute_ms=compute)
    calls = [Call(collective="all_reduce", size_bytes=MB, times=3, per_micro_batch=grows) for grows in (False, True)]

    def step(comm_ms: float, rho: float) -> float:
        times = CommTimes(step_ms=comm_ms, micro_batch_ms=comm_ms, after_ms=comm_ms)
        hidden = Overlap(hide_ms=rho * costs.hideable_ms, calls=tuple(calls))
        return step_parts(costs, times, accumulation=accumulation, overlap=hidden).step_ms

    assert step(comm, overlap) <= step(comm + more, overlap) * (1 + 1e-12)
    assert step(comm, 1.0) * (1 - 1e-12) <= step(comm, overlap) <= step(comm, 0.0) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("strategy", "grow", "once", "after"),
    [
        (Strategy.DDP, 0, 4 * MB, 0),
        (Strategy.ZERO1, 0, 4 * MB, 2 * MB),
        (Strategy.ZERO2, 4 * MB, 0, 2 * MB),
        (Strategy.ZERO3, 36 * MB, 0, 0),
        (Strategy.FSDP, 32 * MB, 4 * MB, 0),
        (Strategy.SHARD_GRAD_OP, 0, 20 * MB, 0),
    ],
)
def test_what_a_strategy_sends_once_and_in_every_micro_batch(
    strategy: Strategy, grow: float, once: float, after: float
) -> None:
    calls = strategy_calls(strategy, LOAD, TWO)
    assert size_bytes(call for call in calls if call.per_micro_batch) == grow
    assert size_bytes(call for call in calls if not call.per_micro_batch and call.hideable) == once
    assert size_bytes(call for call in calls if not call.hideable) == after


def size_bytes(calls: Iterable[Call]) -> float:
    return sum(call.times * call.size_bytes for call in calls)


@pytest.mark.parametrize(("strategy", "k", "measured_mb"), MEASURED_SENT)
def test_what_a_worker_sends_is_what_was_measured(strategy: Strategy, k: int, measured_mb: float) -> None:
    tiny = TrafficInputs(parameters=3_691_776, trainable=3_691_776, parameter_bytes=4, gradient_bytes=4)
    assert passing_bytes(strategy_calls(strategy, tiny, TWO), k, TWO) / MB == pytest.approx(measured_mb, rel=0.005)


def test_buckets_cut_reductions_and_nothing_else() -> None:
    reduced, gathered = in_buckets(strategy_calls(Strategy.ZERO2, LOAD, TWO), 1.5 * MB)
    assert (reduced.size_bytes, reduced.times) == (4 * MB / 3, 3)
    assert (gathered.size_bytes, gathered.times) == (2 * MB, 1)


def test_one_bucket_hides_behind_nothing_and_many_behind_nearly_all() -> None:
    def part(bucket_bytes: float | None) -> float:
        return hideable_part(in_buckets(strategy_calls(Strategy.DDP, LOAD, TWO), bucket_bytes))

    assert part(None) == 0
    assert part(MB) == 0.75
    assert part(MB / 25) == 0.99
    assert hideable_part(()) == 1


def test_what_is_full_last_is_sent_after_the_backward_pass() -> None:
    first, last = (Call(collective="all_reduce", size_bytes=size) for size in (1 * MB, 9 * MB))
    # Full after 10 and 100 ms; they take 5 and 45 ms.
    assert exposed_ms((first, last), 50, 100) == pytest.approx(45)
    # Turned round: full after 90 and 100 ms.
    assert exposed_ms((last, first), 50, 100) == pytest.approx(90 + 45 + 5 - 100)
    # A slow link is busy from the first bucket on.
    assert exposed_ms((first, last), 1000, 100) == pytest.approx(10 + 1000 - 100)
    # Divisible at will.
    assert (exposed_ms((), 50, 100), exposed_ms((), 150, 100)) == (0, 50)


@pytest.mark.parametrize("comm_ms", [10.0, 99.0, 101.0, 1000.0])
def test_equal_buckets_are_late_as_one_after_the_other_is(comm_ms: float) -> None:
    together = Call(collective="all_reduce", size_bytes=MB, times=4)
    single = [Call(collective="all_reduce", size_bytes=MB)] * 4
    late = exposed_ms((together,), comm_ms, 100)
    assert late == pytest.approx(exposed_ms(single, comm_ms, 100))
    assert late == pytest.approx(max(comm_ms / 4, comm_ms - 75))


@pytest.mark.parametrize(
    ("strategy", "lora", "recompute", "share"),
    [
        (Strategy.DDP, False, False, 2 / 3),
        (Strategy.DDP, False, True, 3 / 4),
        (Strategy.DDP, True, False, 1 / 2),
        (Strategy.DDP, True, True, 2 / 3),
        (Strategy.ZERO2, False, True, 3 / 4),
        (Strategy.ZERO3, False, False, 1),
        (Strategy.SHARD_GRAD_OP, True, True, 1),
    ],
)
def test_reductions_hide_beside_the_backward_pass_and_gathers_beside_both(
    strategy: Strategy, *, lora: bool, recompute: bool, share: float
) -> None:
    assert hideable_share(strategy, lora=lora, recompute=recompute) == pytest.approx(share)
