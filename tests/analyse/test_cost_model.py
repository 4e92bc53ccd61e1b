from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.analyse.collectives.traffic import Layout, Strategy, TrafficInputs
from multinode.analyse.job.step_calls import StepCall, calls_of_messages, calls_of_strategy, passing_bytes
from multinode.analyse.job.step_messages import StepMessage, StepMessages
from multinode.analyse.prediction.cost_model import StepCosts, bucketed_overlap, late_ms, step_parts
from multinode.analyse.prediction.network_model import CommTimes

MB = 1_000_000
TWO = Layout(nodes=2)
LOAD = TrafficInputs(parameters=8 * MB, trainable=MB, parameter_bytes=2, gradient_bytes=4)
COSTS = StepCosts(compute_ms=90, optimizer_ms=10, host_ms=5, data_ms=1)
milliseconds = st.floats(min_value=0, max_value=1e6)


def test_a_step_is_its_parts_and_what_is_not_hidden() -> None:
    parts = step_parts(COSTS, CommTimes(step_ms=100), accumulation=2, overlap=0.5)
    # 2 x (90 + 1) + 10 + 5, and 100 less half of the backward pass, which is 60.
    assert parts.exposed_ms == 70
    assert parts.step_ms == 267


def test_a_tail_stays_exposed_and_never_more_than_there_is() -> None:
    costs = StepCosts(compute_ms=90, hideable_ms=60, tail_ms=8)
    hidden = step_parts(costs, CommTimes(step_ms=40), accumulation=1, overlap=1)
    assert (hidden.beyond_ms, hidden.exposed_ms) == (0, 8)
    assert step_parts(costs, CommTimes(step_ms=5), accumulation=1, overlap=1).exposed_ms == 5
    assert step_parts(costs, CommTimes(step_ms=40), accumulation=1, overlap=0).exposed_ms == 40
    assert step_parts(costs, CommTimes(), accumulation=1, overlap=1).exposed_ms == 0


def test_what_follows_the_optimizer_hides_behind_nothing() -> None:
    parts = step_parts(COSTS, CommTimes(micro_batch_ms=50, after_ms=7), accumulation=4, overlap=1)
    assert parts.exposed_ms == 7
    assert parts.comm_ms == 207


@given(milliseconds, milliseconds, milliseconds, st.integers(1, 64), st.floats(min_value=0, max_value=1))
def test_more_communication_is_never_faster_and_more_overlap_never_slower(
    compute: float, comm: float, more: float, accumulation: int, overlap: float
) -> None:
    costs = StepCosts(compute_ms=compute, tail_ms=3)

    def step(comm_ms: float, rho: float) -> float:
        times = CommTimes(step_ms=comm_ms, micro_batch_ms=comm_ms, after_ms=comm_ms)
        return step_parts(costs, times, accumulation=accumulation, overlap=rho).step_ms

    assert step(comm, overlap) <= step(comm + more, overlap)
    assert step(comm, 1.0) <= step(comm, overlap) <= step(comm, 0.0)


@pytest.mark.parametrize(
    ("strategy", "grow", "once", "after"),
    [
        (Strategy.DDP, 0, 4 * MB, 0),
        (Strategy.ZERO1, 0, 4 * MB, 2 * MB),
        (Strategy.ZERO2, 4 * MB, 0, 2 * MB),
        (Strategy.ZERO3, 36 * MB, 0, 0),
        (Strategy.FSDP, 36 * MB, 0, 0),
        (Strategy.SHARD_GRAD_OP, 20 * MB, 0, 0),
    ],
)
def test_what_a_strategy_sends_once_and_in_every_micro_batch(
    strategy: Strategy, grow: float, once: float, after: float
) -> None:
    calls = calls_of_strategy(strategy, LOAD, TWO)
    assert size_bytes(call for call in calls if call.per_micro_batch) == grow
    assert size_bytes(call for call in calls if not call.per_micro_batch and call.hideable) == once
    assert size_bytes(call for call in calls if not call.hideable) == after


def size_bytes(calls: Iterable[StepCall]) -> float:
    return sum(call.times * call.size_bytes for call in calls)


@pytest.mark.parametrize(
    ("strategy", "k", "measured_mb"),
    [
        # Counted on the cards of two nodes with one worker each, gloo, DeepSpeed 0.19.
        (Strategy.DDP, 1, 14.74),
        (Strategy.DDP, 4, 14.74),
        (Strategy.ZERO2, 1, 22.1),
        (Strategy.ZERO2, 4, 66.3),
    ],
)
def test_what_a_worker_sends_is_what_was_measured(strategy: Strategy, k: int, measured_mb: float) -> None:
    tiny = TrafficInputs(parameters=3_691_776, trainable=3_691_776, parameter_bytes=4, gradient_bytes=4)
    assert passing_bytes(calls_of_strategy(strategy, tiny, TWO), k, 2) / MB == pytest.approx(measured_mb, rel=0.005)


def test_buckets_cut_reductions_and_nothing_else() -> None:
    reduced, gathered = calls_of_strategy(Strategy.ZERO2, LOAD, TWO, bucket_bytes=1.5 * MB)
    assert (reduced.size_bytes, reduced.times) == (4 * MB / 3, 3)
    assert (gathered.size_bytes, gathered.times) == (2 * MB, 1)


def messages(*counted: tuple[str, int, int]) -> StepMessages:
    return StepMessages(
        training="made up",
        messages=tuple(
            StepMessage(collective=collective, size_bytes=size, times=times, what="gradients")
            for collective, size, times in counted
        ),
    )


def test_messages_that_a_second_micro_batch_adds_belong_to_each() -> None:
    calls = calls_of_messages(
        messages(("all_reduce", 4 * MB, 3), ("all_gather", 2 * MB, 2), ("all_gather", 10, 3)),
        messages(("all_reduce", 4 * MB, 6), ("all_gather", 2 * MB, 2), ("all_gather", 10, 5)),
    )
    assert calls == (
        StepCall(collective="all_reduce", size_bytes=4 * MB, times=3, per_micro_batch=True),
        StepCall(collective="all_gather", size_bytes=2 * MB, times=2, hideable=False),
        StepCall(collective="all_gather", size_bytes=10, times=2, per_micro_batch=True),
        StepCall(collective="all_gather", size_bytes=10, times=1, hideable=False),
    )


def test_one_bucket_hides_behind_nothing_and_many_behind_nearly_all() -> None:
    def overlap(bucket_bytes: float | None) -> float:
        return bucketed_overlap(calls_of_strategy(Strategy.DDP, LOAD, TWO, bucket_bytes=bucket_bytes))

    assert overlap(None) == 0
    assert overlap(MB) == 0.75
    assert overlap(MB / 25) == 0.99
    assert bucketed_overlap(()) == 0


def test_what_is_full_last_is_sent_after_the_backward_pass() -> None:
    first, last = (StepCall(collective="all_reduce", size_bytes=size) for size in (1 * MB, 9 * MB))
    comm = CommTimes(step_ms=50)
    # Full after 10 and 100 ms; they take 5 and 45 ms.
    assert late_ms((first, last), comm, hide_ms=100, accumulation=1) == pytest.approx(45)
    # Turned round: full after 90 and 100 ms.
    assert late_ms((last, first), comm, hide_ms=100, accumulation=1) == pytest.approx(90 + 45 + 5 - 100)
    # A slow link is busy from the first bucket on.
    slow = CommTimes(step_ms=1000)
    assert late_ms((first, last), slow, hide_ms=100, accumulation=1) == pytest.approx(10 + 1000 - 100)
    assert late_ms((), comm, hide_ms=100, accumulation=1) == 0


@pytest.mark.parametrize("comm_ms", [10.0, 99.0, 101.0, 1000.0])
def test_equal_buckets_are_late_as_one_after_the_other_is(comm_ms: float) -> None:
    together = StepCall(collective="all_reduce", size_bytes=MB, times=4)
    single = [StepCall(collective="all_reduce", size_bytes=MB)] * 4
    comm = CommTimes(step_ms=comm_ms)
    late = late_ms((together,), comm, hide_ms=100, accumulation=1)
    assert late == pytest.approx(late_ms(single, comm, hide_ms=100, accumulation=1))
    assert late == pytest.approx(max(comm_ms / 4, comm_ms - 75))


def test_each_micro_batch_has_its_own_backward_pass_to_be_late_for() -> None:
    call = StepCall(collective="all_reduce", size_bytes=MB, per_micro_batch=True)
    assert late_ms((call,), CommTimes(micro_batch_ms=30), hide_ms=100, accumulation=4) == 120
    hidden = StepCall(collective="all_gather", size_bytes=MB, hideable=False)
    assert late_ms((hidden,), CommTimes(after_ms=30), hide_ms=100, accumulation=4) == 0
