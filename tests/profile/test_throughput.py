from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.profile.observed import Observed, ObservedNode, observe
from multinode.profile.throughput import all_steps_samples_per_s, measure_throughput, trained_s
from multinode.records.samples import CpuSample, ModelSample, Sample, StepSample
from multinode.stats.estimate import value_of
from tests.reasons import reasons


def steps(rank: int, times_ms: Sequence[float | None], **fields: Any) -> list[StepSample]:
    counts = {"samples": 8, "tokens": 800, "effective_tokens": 600, "squared_lengths": 90_000, "micro_steps": 2}
    known = counts | fields
    return [
        StepSample(
            rank=rank,
            step=number,
            time_s=0,
            mono_ns=0,
            step_time_us=None if time_ms is None else time_ms * 1000,
            **known,
        )
        for number, time_ms in enumerate(times_ms, start=1)
    ]


def observed(*workers: list[StepSample]) -> Observed:
    """A node for each worker."""
    nodes = [
        ObservedNode(name=f"node{rank}", node_rank=rank, ranks=(rank,), samples=tuple(samples))
        for rank, samples in enumerate(workers)
    ]
    return observe("r", nodes)


def test_workers_are_added_and_a_tgs_is_of_one() -> None:
    found = measure_throughput(observed(steps(0, [100.0] * 20), steps(1, [100.0] * 20)))
    assert value_of(found.samples_per_s) == pytest.approx(160.0)  # 2 workers x 8 samples / 0.1 s
    assert (value_of(found.tokens_per_s), value_of(found.tgs)) == pytest.approx((16000.0, 8000.0))
    assert (found.effective_tokens_per_s, found.effective_tgs) == pytest.approx((12000.0, 6000.0))
    assert (found.tokens_per_sample, found.micro_steps, found.per_device_batch) == (100.0, 2.0, 4.0)
    assert reasons(found) == {}


def test_a_batch_is_counted_and_a_short_one_at_the_end_of_an_epoch_does_not_change_it() -> None:
    short = [msgspec.structs.replace(one, samples=37) if one.step == 12 else one for one in steps(0, [100.0] * 20)]
    whole = [msgspec.structs.replace(one, samples=128) if one.step != 12 else one for one in short]
    assert measure_throughput(observed(whole)).per_device_batch == 64.0


def test_the_mean_token_attends_to_the_squares_of_lengths_over_their_sum() -> None:
    # 3000 tokens see 3000 each, 1000 tokens see 1000: (9 + 1) / 4.
    lengths = {"tokens": 8000, "effective_tokens": 4000, "squared_lengths": 3000**2 + 1000**2}
    assert measure_throughput(observed(steps(0, [100.0] * 20, **lengths))).attention_length == 2500.0
    rows = {"tokens": 8000, "effective_tokens": None, "squared_lengths": 8 * 1000**2}
    assert measure_throughput(observed(steps(0, [100.0] * 20, **rows))).attention_length == 1000.0


def test_older_records_tell_no_length_that_tokens_attend_to() -> None:
    found = measure_throughput(observed(steps(0, [100.0] * 20, squared_lengths=None)))
    assert reasons(found) == {"attention_length": "the training does not report its sequence length"}


def test_warm_up_is_in_the_one_rate_and_not_in_the_other() -> None:
    seen = observed(steps(0, [1000.0] * 5 + [100.0] * 15))
    assert value_of(measure_throughput(seen).samples_per_s) == pytest.approx(80.0)
    assert all_steps_samples_per_s(seen) == pytest.approx(20 * 8 / 6.5)


def test_the_rate_is_all_samples_over_all_time_and_not_the_mean_of_rates() -> None:
    found = measure_throughput(observed(steps(0, [100.0, 300.0] * 10)))
    assert value_of(found.samples_per_s) == pytest.approx(15 * 8 / (8 * 0.3 + 7 * 0.1))


def test_a_first_step_without_a_time_is_in_no_rate() -> None:
    seen = observed(steps(0, [None, *[100.0] * 20]))
    assert all_steps_samples_per_s(seen) == pytest.approx(80.0)
    assert value_of(measure_throughput(seen).samples_per_s) == pytest.approx(80.0)


def test_a_lost_record_takes_its_time_along_with_its_samples() -> None:
    whole = steps(0, [100.0] * 20)
    found = measure_throughput(observed(whole, [step for step in steps(1, [100.0] * 20) if step.step != 12]))
    assert value_of(found.samples_per_s) == pytest.approx(160.0)


def test_a_worker_that_does_not_say_its_samples_leaves_the_whole_without() -> None:
    seen = observed(steps(0, [100.0] * 20), steps(1, [100.0] * 20, samples=None))
    found = measure_throughput(seen)
    assert value_of(found.tgs) == pytest.approx(8000.0)
    assert all_steps_samples_per_s(seen) is None
    reason = "the training does not report the number of samples per step (rank 1)"
    assert reasons(found) == {"samples_per_s": reason, "tokens_per_sample": reason}


def test_a_worker_that_recorded_nothing_leaves_the_whole_without() -> None:
    found = measure_throughput(observed(steps(0, [100.0] * 20), []))
    assert reasons(found)["tgs"] == "rank 1 recorded no measured step"


def test_no_step_at_all_is_said() -> None:
    found = measure_throughput(observed([], []))
    assert reasons(found)["samples_per_s"] == "no worker recorded a step"
    assert all_steps_samples_per_s(observed([])) is None


def test_tokens_without_padding_that_come_some_steps_late_are_counted() -> None:
    """A GPU's worker learns of several steps at once, and says so in every second record."""
    late = [
        msgspec.structs.replace(step, effective_tokens=1200 if step.step % 2 else 0) for step in steps(0, [100.0] * 25)
    ]
    found = measure_throughput(observed(late))
    assert found.effective_tokens_per_s == pytest.approx(6000.0)


def on_gpu(count: int) -> Observed:
    """Of 800 tokens per step 600 are no padding, and each tenth step the GPU tells it of all since the time before."""
    late = [
        msgspec.structs.replace(step, effective_tokens=0 if step.step % 10 else 6000)
        for step in steps(0, [100.0] * count)
    ]
    seen = observed(late)
    model = ModelSample(rank=0, wrapper="none", parameters=1, trainable=1, device="cuda")
    node = msgspec.structs.replace(seen.nodes[0], samples=(*seen.nodes[0].samples, model))
    return msgspec.structs.replace(seen, nodes=(node,))


@pytest.mark.parametrize("count", [12, 19, 40])
def test_tokens_without_padding_are_not_told_of_few_steps_of_a_gpu(count: int) -> None:
    found = measure_throughput(on_gpu(count))
    assert "more than 50 measured steps" in reasons(found)["effective_tgs"]
    assert value_of(found.tgs) == pytest.approx(8000.0)


@pytest.mark.parametrize("count", range(70, 80))
def test_tokens_without_padding_of_a_gpu_are_those_between_two_times_that_it_told_them(count: int) -> None:
    assert measure_throughput(on_gpu(count)).effective_tgs == pytest.approx(6000.0)


def test_the_part_of_the_tokens_whose_masks_were_counted_is_told() -> None:
    seen = [
        msgspec.structs.replace(step, estimated_tokens=800 if step.step % 4 else None)
        for step in steps(0, [100.0] * 25)
    ]
    found = measure_throughput(observed(seen))
    assert (found.counted_masks, found.effective_tokens_per_s) == (0.25, 6000.0)
    assert measure_throughput(observed(steps(0, [100.0] * 25))).counted_masks == 1.0
    # What nobody says is not made up.
    assert measure_throughput(observed(steps(0, [100.0] * 25, effective_tokens=None))).counted_masks is None


def test_a_batch_without_a_mask_leaves_what_is_padding_unknown() -> None:
    gaps = [
        msgspec.structs.replace(step, effective_tokens=None if step.step == 20 else 600)
        for step in steps(0, [100.0] * 25)
    ]
    found = measure_throughput(observed(gaps))
    assert reasons(found)["effective_tgs"] == (
        "the training does not report the number of tokens without padding (rank 0)"
    )
    assert value_of(found.tgs) == pytest.approx(8000.0)


def test_a_training_that_counts_no_sample_has_no_rate() -> None:
    found = measure_throughput(observed(steps(0, [100.0] * 20, samples=0)))
    assert reasons(found)["samples_per_s"].endswith("it counted none")


@given(st.permutations([0, 1, 2]), st.lists(st.floats(1, 1e5), min_size=30, max_size=30))
def test_renaming_nodes_changes_nothing(order: list[int], times_ms: list[float]) -> None:
    def worker(rank: int, name: int) -> list[StepSample]:
        return steps(name, times_ms[10 * rank : 10 * rank + 10], samples=rank + 1)

    before = measure_throughput(observed(*(worker(rank, rank) for rank in range(3))))
    after = measure_throughput(observed(*(worker(order[name], name) for name in range(3))))
    assert value_of(before.samples_per_s) == pytest.approx(value_of(after.samples_per_s))
    assert before.tokens_per_sample == after.tokens_per_sample


def ends(ends_s: Sequence[float], rank: int = 0) -> list[Sample]:
    """Steps of a worker whose node has been up for an hour, and whose wall clock stands still."""
    return [
        StepSample(rank=rank, step=number, time_s=0.0, mono_ns=int((3600 + end_s) * 1e9))
        for number, end_s in enumerate(ends_s, 1)
    ]


def test_the_time_begins_at_the_end_of_the_first_step_and_has_the_step_that_was_cut_off() -> None:
    assert trained_s(ends([100, 102, 104, 106])) == pytest.approx(8)


def test_one_slow_step_does_not_make_the_last_one_slow() -> None:
    assert trained_s(ends([0, 1, 2, 30, 31])) == pytest.approx(32)


def test_the_worker_that_trained_least_decides() -> None:
    assert trained_s([*ends([0, 1, 2]), *ends([0, 1], rank=1)]) == pytest.approx(2)


@pytest.mark.parametrize("samples", [[], ends([5]), [*ends([0, 1, 2]), *ends([0], rank=1)]])
def test_too_few_steps_tell_nothing(samples: list[Sample]) -> None:
    assert trained_s([*samples, CpuSample(time_s=0.0, mono_ns=int(1e15))]) is None
