from __future__ import annotations

import msgspec

from multinode.profile.observed import Observed, ObservedNode, observe
from multinode.records.samples import LossSample, ModelSample, Sample, StepSample, TraceSample


def step(rank: int, number: int, time_us: float | None = 100_000.0) -> StepSample:
    return StepSample(rank=rank, step=number, time_s=0, mono_ns=0, step_time_us=time_us)


def node(name: str, rank: int, *samples: Sample) -> ObservedNode:
    return ObservedNode(name=name, node_rank=rank, ranks=(rank,), samples=samples)


def of_two(first: list[Sample], second: list[Sample]) -> Observed:
    return observe("r", [node("a", 0, *first), node("b", 1, *second)])


def test_a_node_is_believed_about_its_own_workers_alone() -> None:
    found = of_two([step(0, 1), step(1, 2)], [step(1, 1), step(7, 1)])
    assert {number: set(workers) for number, workers in found.steps.items()} == {1: {0, 1}}


def test_steps_count_after_the_warm_up_whatever_their_order_in_the_files() -> None:
    found = of_two([step(0, n) for n in range(20, 0, -1)], [step(1, n) for n in range(1, 21)])
    assert found.counted == tuple(range(6, 21))
    assert [set(workers) for workers in found.counted_steps] == [{0, 1}] * 15


def test_steps_that_the_profiler_slowed_on_one_worker_count_for_nobody() -> None:
    window = TraceSample(rank=1, first_step=12, last_step=14, disturbed_to=16, file="rank-1.json.gz")
    found = of_two([step(0, n) for n in range(1, 31)], [*(step(1, n) for n in range(1, 31)), window])
    assert found.counted == (*range(6, 11), *range(17, 31))
    assert "steps 11 to 16" in found.rule


def test_where_the_profiler_slowed_all_they_all_count_and_that_is_said() -> None:
    window = TraceSample(rank=0, first_step=3, last_step=9, file="rank-0.json.gz")
    found = of_two([*(step(0, n) for n in range(1, 11)), window], [step(1, n) for n in range(1, 11)])
    assert found.counted == tuple(range(4, 11))
    assert "all other steps (2 to 10) were slowed by the profiler" in found.rule


def test_a_window_that_failed_slows_nothing() -> None:
    failed = TraceSample(rank=0, error="no Kineto")
    assert of_two([*(step(0, n) for n in range(1, 11)), failed], []).counted == tuple(range(4, 11))


def later(rank: int, number: int, moment: int) -> StepSample:
    return msgspec.structs.replace(step(rank, number), mono_ns=moment)


def test_of_a_worker_that_began_anew_only_the_last_training_is_looked_at() -> None:
    model = ModelSample(rank=0, wrapper="ddp", parameters=1, trainable=1)
    first = [later(0, n, n) for n in range(1, 31)]
    second = [later(0, n, 100 + n) for n in range(1, 21)]
    found = of_two([model, *first, LossSample(rank=0, step=9, loss=9.0), *second], [step(1, n) for n in range(1, 21)])
    assert list(found.steps) == list(range(1, 21))
    assert {found.steps[n][0].mono_ns for n in found.steps} == set(range(101, 121))
    assert found.of(ModelSample) == [model]
    assert found.of(LossSample) == []
    assert "earlier training in the same run" in found.rule


def test_steps_that_were_too_many_to_look_at_are_counted_and_told() -> None:
    found = observe("r", [node("a", 0, *(step(0, n) for n in range(981, 1001)))], recorded=1000)
    assert (found.recorded, len(found.steps)) == (1000, 20)
    assert "20 of 1000 steps are read" in found.rule
