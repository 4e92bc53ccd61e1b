from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.profile.bottleneck import find_bottleneck
from multinode.profile.exposure import WorkerStep, find_exposure
from multinode.profile.observed import Observed
from multinode.profile.step_split import StepSplit, WorkerSplit, split_steps
from multinode.records.samples import DdpSample, DeviceWaitSample, ModelSample, Sample, StepSample
from multinode.stats.unknown import Unknown, known, or_none
from tests.golden import Golden
from tests.profile.made_up_steps import MadeUp, always, changed
from tests.reasons import split_reasons

if TYPE_CHECKING:
    from _collections_abc import dict_values

PARTS = ("compute_ms", "exposed_ms", "wait_ms", "data_ms", "optimizer_ms", "host_ms")


def split_of(observed: Observed) -> StepSplit:
    return split_steps(find_exposure(observed))


def parts(worker: WorkerSplit | Unknown) -> dict[str, float]:
    return {name: round(known(getattr(worker, name)), 6) for name in PARTS}


def test_a_balanced_training_on_cpus_is_split_into_what_it_did() -> None:
    split = split_of(MadeUp().observed())
    expected = dict(zip(PARTS, (100.0, 10.0, 0.0, 2.0, 5.0, 1.0), strict=True))
    assert split.source == "ddp"
    assert parts(split.mean) == expected
    assert [parts(worker) for worker in split.workers] == [expected] * 2
    mean = known(split.mean)
    assert mean.rank == -1
    assert mean.step_ms == pytest.approx(118.0)
    assert mean.overlap == pytest.approx(20 / 30)
    assert split.comm_ms == pytest.approx(30.0)
    assert split_reasons(split) == {}
    assert split.rule.startswith("Means over the 15 measured steps. Communication is exposed if DDP's counters")


def test_a_split_knows_from_how_many_of_the_measured_steps_it_is() -> None:
    def early(sample: Sample) -> Sample | None:
        # As in a loop on a GPU that does not look at its loss.
        return None if isinstance(sample, DdpSample) and sample.step > 9 else sample

    split = split_of(changed(MadeUp().observed(), early))
    assert split.steps.words == "from 4 of 15 measured steps"
    assert find_bottleneck(split).message.endswith("per step (8%), from 4 of 15 measured steps")
    assert split_of(MadeUp().observed()).steps.words == ""


def test_what_the_others_wait_for_a_slow_worker_is_waiting_and_no_transfer() -> None:
    split = split_of(MadeUp(compute_ms=always(100.0, r1=300.0)).observed())
    fast, slow = split.workers
    assert (fast.exposed_ms, fast.wait_ms, fast.compute_ms) == pytest.approx((10.0, 200.0, 100.0))
    assert (slow.exposed_ms, slow.wait_ms, slow.compute_ms) == pytest.approx((10.0, 0.0, 300.0))
    assert split.comm_ms == pytest.approx(30.0)


def test_transfer_is_found_in_each_step_where_nodes_take_turns_to_be_late() -> None:
    split = split_of(MadeUp(compute_ms=lambda rank, step: 150.0 if (rank + step) % 2 else 100.0).observed())
    mean = known(split.mean)
    assert mean.exposed_ms == pytest.approx(10.0)
    assert mean.wait_ms == pytest.approx(25.0)


def test_a_cpu_that_is_blocked_in_calls_is_told_by_its_host_clock(golden: Golden) -> None:
    split = split_of(MadeUp(told_by="host").observed())
    assert split.source == "host"
    assert parts(split.mean) == dict(zip(PARTS, (100.0, 10.0, 0.0, 2.0, 5.0, 1.0), strict=True))
    golden.check_texts("split_by_host", split_reasons(split))


def test_calls_beside_ddp_are_added_to_what_ddp_says() -> None:
    """Clipping of gradients calls an all-reduce of its own."""

    def clip(sample: Sample) -> Sample:
        if not isinstance(sample, StepSample):
            return sample
        longer = (sample.step_time_us or 0) + 4000
        return msgspec.structs.replace(sample, step_time_us=longer, phases_us=(sample.phases_us or {}) | {"comm": 4000})

    split = split_of(changed(MadeUp().observed(), clip))
    assert parts(split.mean) == dict(zip(PARTS, (100.0, 14.0, 0.0, 2.0, 5.0, 1.0), strict=True))
    assert (split.comm_ms, split.beside_ms) == pytest.approx((34.0, 4.0))


def test_calls_beside_ddp_have_the_latency_of_the_step_in_which_they_took_least() -> None:
    """What passed in all others is waiting, for a peer or a core."""
    steps = []

    def wait(sample: Sample) -> Sample:
        if not isinstance(sample, StepSample):
            return sample
        steps.append(sample.step)
        return msgspec.structs.replace(
            sample, phases_us=(sample.phases_us or {}) | {"comm": 9000 - 100 * sample.step + 50 * sample.rank}
        )

    split = split_of(changed(MadeUp().observed(), wait))
    assert split.beside_ms == pytest.approx(9 - 0.1 * max(steps))


def test_a_gpu_under_ddp_computes_what_its_counters_say_times_the_micro_batches() -> None:
    split = split_of(MadeUp(device="cuda", micro_steps=4).observed())
    mean = known(split.mean)
    assert (mean.compute_ms, mean.exposed_ms) == pytest.approx((100.0, 10.0))


@pytest.mark.parametrize(("device", "micro_steps"), [("cuda", 2), ("cuda", 1), ("cpu", 2)])
def test_reductions_of_one_step_are_added_up(device: str, micro_steps: int) -> None:
    """Two micro-batches that are reduced one by one, or two models in turn."""
    observed = MadeUp(device=device, micro_steps=micro_steps).observed()
    halves = [
        msgspec.structs.replace(
            node,
            samples=tuple(
                part
                for sample in node.samples
                for part in ([_half(sample, micro_steps)] * 2 if isinstance(sample, DdpSample) else [sample])
            ),
        )
        for node in observed.nodes
    ]
    split = split_of(msgspec.structs.replace(observed, nodes=tuple(halves)))
    mean = known(split.mean)
    assert (mean.compute_ms, mean.exposed_ms) == pytest.approx((100.0, 10.0))
    assert mean.overlap == pytest.approx(20 / 30)


def _half(sample: DdpSample, micro_steps: int) -> DdpSample:
    parts = 2 / micro_steps  # what was made up is of one micro-batch already
    return msgspec.structs.replace(
        sample,
        forward_us=sample.forward_us / parts,
        backward_us=sample.backward_us / parts,
        comm_us=sample.comm_us / 2,
        overlap_us=sample.overlap_us / 2,
    )


def test_what_a_host_does_while_its_gpu_computes_is_not_counted_twice(golden: Golden) -> None:
    """The host runs ahead and stands in the loader for most of the step, while the GPU computes."""

    def run_ahead(sample: Sample) -> Sample:
        if not isinstance(sample, StepSample):
            return sample
        return msgspec.structs.replace(sample, phases_us={"data": 90_000, "optimizer": 20_000})

    split = split_of(changed(MadeUp(device="cuda").observed(), run_ahead))
    # Of 118 ms per step, 100 ms are computing and 10 ms communication: the loader can have cost 8 ms, and no more.
    assert parts(split.mean) == dict(zip(PARTS, (100.0, 10.0, 0.0, 8.0, 0.0, 0.0), strict=True))
    golden.check("split_rule_host_times.txt", split.rule)


def test_a_gpu_whose_waits_were_timed_by_events_has_exposed_communication_and_no_computing(golden: Golden) -> None:
    split = split_of(MadeUp(device="cuda", told_by="device").observed())
    assert split.source == "device"
    mean = known(split.mean)
    assert (mean.exposed_ms, mean.data_ms) == pytest.approx((10.0, 2.0))
    assert {type(part) for part in (mean.compute_ms, mean.host_ms)} == {Unknown}
    golden.check_texts("split_by_device", {"rule": split.rule, **split_reasons(split)})


def test_a_gpu_that_waits_for_streams_which_were_not_timed_is_not_said_to_wait_little(golden: Golden) -> None:
    def unseen(sample: Sample) -> Sample:
        return msgspec.structs.replace(sample, calls=2) if isinstance(sample, DeviceWaitSample) else sample

    split = split_of(changed(MadeUp(device="cuda", told_by="device").observed(), unseen))
    assert split.source is None
    golden.check_texts("split_unseen_streams", split_reasons(split))


def test_a_step_with_more_waits_than_are_timed_is_told_as_such() -> None:
    def dropped(sample: Sample) -> Sample:
        if isinstance(sample, DeviceWaitSample) and sample.step > 5:
            return msgspec.structs.replace(sample, calls=16384, of_calls=20000, dropped=3616)
        return sample

    split = split_of(changed(MadeUp(device="cuda", told_by="device").observed(), dropped))
    assert split.source is None
    reason = split_reasons(split)["exposed_ms"]
    assert reason.startswith(
        "step 6 of rank 0 had more waits than multinode can time: 16384 of its 20000 collectives were timed"
    )


def test_without_any_source_a_gpu_has_no_exposed_communication_and_is_told_how_to_get_it() -> None:
    split = split_of(MadeUp(device="cuda", told_by="nothing").observed())
    assert split.source is None
    mean = known(split.mean)
    unknown = (mean.exposed_ms, mean.wait_ms, mean.compute_ms, mean.host_ms)
    assert {type(part) for part in unknown} == {Unknown}
    assert (mean.step_ms, mean.data_ms, mean.optimizer_ms) == pytest.approx((118.0, 2.0, 5.0))
    assert "--trace" in split_reasons(split)["exposed_ms"]
    assert set(split_reasons(split)) == {"exposed_ms", "wait_ms", "compute_ms", "host_ms", "overlap", "comm_ms"}


def wait_beside_ddp(calls: int) -> Observed:
    """Each step reduces a gradient norm beside DDP's buckets, in two calls of which so many were timed."""
    observed = MadeUp(device="cuda").observed()
    nodes = tuple(
        msgspec.structs.replace(
            node,
            samples=(
                *node.samples,
                *(
                    DeviceWaitSample(rank=rank, step=step, wait_us=4000.0, calls=calls, of_calls=2)
                    for rank in node.ranks
                    for step in range(1, 21)
                ),
            ),
        )
        for node in observed.nodes
    )
    return msgspec.structs.replace(observed, nodes=nodes)


def test_what_a_gpu_waits_beside_ddp_is_added_where_it_was_timed_and_never_taken_for_nothing() -> None:
    timed = split_of(wait_beside_ddp(2))
    mean = known(timed.mean)
    assert mean.exposed_ms == pytest.approx(14.0)
    untimed = split_of(wait_beside_ddp(1))
    assert untimed.source is None
    assert split_reasons(untimed)["exposed_ms"].startswith("too few collectives other than DDP's were timed")


def test_ddp_on_a_cpu_without_its_counters_is_unknown_although_nothing_blocked_in_python() -> None:
    observed = changed(MadeUp().observed(), lambda sample: None if isinstance(sample, DdpSample) else sample)
    split = split_of(observed)
    assert split.source is None
    assert split_reasons(split)["exposed_ms"].startswith("DDP's counters were not recorded")


def test_one_worker_has_no_communication() -> None:
    split = split_of(MadeUp(nodes=((0,),), told_by="host").observed())
    assert split.source == "alone"
    assert parts(split.mean) == dict(zip(PARTS, (100.0, 0.0, 0.0, 2.0, 5.0, 1.0), strict=True))
    assert split.comm_ms == 0.0
    assert split_reasons(split) == {"overlap": "one worker does not communicate"}


def test_a_step_that_one_worker_did_not_record_is_left_out_and_the_rule_says_so() -> None:
    made_up = MadeUp(compute_ms=lambda _, step: 190.0 if step == 10 else 100.0, lost=frozenset({(1, 10)}))
    split = split_of(made_up.observed())
    assert [worker.compute_ms for worker in split.workers] == pytest.approx([100.0, 100.0])
    assert split.rule.startswith("Means over 14 of the 15 measured steps.")


def test_counters_that_come_now_and_then_are_used_where_they_are() -> None:
    def sampled(sample: Sample) -> Sample | None:
        return None if isinstance(sample, DdpSample) and sample.step % 5 else sample

    split = split_of(changed(MadeUp(device="cuda").observed(), sampled))
    mean = known(split.mean)
    assert mean.exposed_ms == pytest.approx(10.0)
    assert split.rule.startswith("Means over 3 of the 15 measured steps.")


def test_a_checkpoint_now_and_then_is_left_out_and_the_rule_says_so(golden: Golden) -> None:
    split = split_of(MadeUp(compute_ms=lambda _, step: 9000.0 if step == 12 else 100.0).observed())
    mean = known(split.mean)
    assert mean.step_ms == pytest.approx(118.0)
    golden.check("split_rule_left_out.txt", split.rule)


def test_a_loader_that_stalls_every_fifth_step_is_no_rare_event() -> None:
    split = split_of(MadeUp(data_ms=lambda _, step: 500.0 if step % 5 == 0 else 0.0).observed())
    mean = known(split.mean)
    assert mean.data_ms == pytest.approx(100.0)


def test_a_loader_that_nobody_saw_is_missing_and_not_zero() -> None:
    def unseen(sample: Sample) -> Sample:
        if not isinstance(sample, StepSample):
            return sample
        return msgspec.structs.replace(sample, phases_us={"forward": 33_000, "backward": 77_000, "comm": 0})

    split = split_of(changed(MadeUp().observed(), unseen))
    mean = known(split.mean)
    assert {type(part) for part in (mean.data_ms, mean.optimizer_ms)} == {Unknown}
    assert mean.host_ms == pytest.approx(8.0)
    assert set(split_reasons(split)) == {"data_ms", "optimizer_ms"}


def test_nothing_recorded_is_nothing_split_and_every_part_has_its_reason() -> None:
    reason = Unknown("no measured step was recorded by all workers")
    assert split_of(MadeUp(steps=0).observed()) == StepSplit(mean=reason, comm_ms=reason)


def test_a_worker_that_recorded_no_step_leaves_the_split_unknown(golden: Golden) -> None:
    lost = frozenset((1, step) for step in range(1, 21))
    split = split_of(MadeUp(lost=lost).observed())
    assert split.workers == ()
    golden.check_texts("split_lost_steps", split_reasons(split))


def test_a_node_is_not_believed_about_workers_of_another() -> None:
    observed = MadeUp().observed()
    foreign = DdpSample(
        rank=1, step=15, iteration=1, bucket_sizes_bytes=(), forward_us=0, backward_us=0, comm_us=99, overlap_us=0
    )
    node = observed.nodes[0]
    liar = msgspec.structs.replace(node, samples=(*node.samples, foreign))
    moved = msgspec.structs.replace(observed, nodes=(observed.nodes[1], liar))
    assert split_of(moved) == split_of(observed)


@pytest.mark.parametrize(
    "lie",
    [
        {"comm_us": 1e300},
        {"comm_us": -1e9},
        {"comm_us": math.nan},
        {"overlap_us": math.inf},
        {"comm_us": 500_000.0},
        {"backward_us": 1e9},
    ],
)
def test_counters_that_cannot_be_true_are_not_used(lie: dict[str, Any]) -> None:
    def tell(sample: Sample) -> Sample:
        return msgspec.structs.replace(sample, **lie) if isinstance(sample, DdpSample) and sample.rank else sample

    split = split_of(changed(MadeUp().observed(), tell))
    assert split.source is None
    assert "plausible" in split_reasons(split)["exposed_ms"]


def test_the_last_thing_that_a_worker_said_of_its_model_counts() -> None:
    observed = MadeUp(device="cuda", told_by="host").observed()
    node = observed.nodes[0]
    models = [ModelSample(rank=rank, wrapper="none", parameters=1, trainable=1, device="cpu") for rank in (0, 1)]
    nodes = (
        msgspec.structs.replace(node, samples=(*node.samples, models[0])),
        msgspec.structs.replace(observed.nodes[1], samples=(*observed.nodes[1].samples, models[1])),
    )
    assert split_of(msgspec.structs.replace(observed, nodes=nodes)).source == "host"


class Counting(dict[int, WorkerStep]):
    """A step that counts how often all its workers are gone through."""

    looks = 0

    def values(self) -> dict_values[int, WorkerStep]:
        self.looks += 1
        return super().values()


def test_what_is_transfer_in_a_step_is_looked_for_once_and_not_for_each_worker() -> None:
    looks = []
    for workers in (2, 16):
        exposure = find_exposure(MadeUp(nodes=tuple((rank,) for rank in range(workers))).observed())
        steps = tuple(Counting(step) for step in exposure.steps)
        split_steps(msgspec.structs.replace(exposure, steps=steps))
        looks.append(sum(step.looks for step in steps))
    assert looks[0] == looks[1]


WILD = st.floats(0, 1e12) | st.floats(0, 200_000)


@given(
    st.lists(WILD, min_size=8, max_size=40),
    st.lists(st.floats(1, 1e6), min_size=8, max_size=8),
    st.sampled_from(["cpu", "cuda"]),
    st.sampled_from(["ddp", "device", "host", "nothing"]),
)
def test_whatever_nodes_say_parts_are_never_negative_and_add_up(
    figures: list[float], times_us: list[float], device: str, told_by: str
) -> None:
    wild = itertools.cycle(figures)

    def lie(sample: Sample) -> Sample:
        if isinstance(sample, StepSample):
            phases = {phase: next(wild) for phase in ("data", "forward", "backward", "optimizer", "comm")}
            time_us = times_us[sample.step + 4 * sample.rank - 1]
            return msgspec.structs.replace(sample, phases_us=phases, step_time_us=time_us)
        if isinstance(sample, DdpSample):
            return msgspec.structs.replace(sample, comm_us=next(wild), overlap_us=next(wild))
        return sample

    split = split_of(changed(MadeUp(steps=4, device=device, told_by=told_by).observed(), lie))
    for worker in (*split.workers, *([] if isinstance(split.mean, Unknown) else [split.mean])):
        parts_ms = [value for name in PARTS if (value := or_none(getattr(worker, name))) is not None]
        assert all(value >= 0 for value in parts_ms)
        assert sum(parts_ms) <= worker.step_ms * (1 + 1e-9)
        if not isinstance(worker.host_ms, Unknown):
            assert sum(parts_ms) == pytest.approx(worker.step_ms)
        assert isinstance(worker.overlap, Unknown) or 0 <= worker.overlap <= 1


@given(
    st.permutations([0, 1, 2, 3]),
    st.lists(st.floats(10, 500), min_size=80, max_size=80),
    st.sampled_from(["ddp", "host", "device"]),
)
def test_renaming_ranks_renames_the_result_and_changes_nothing_else(
    order: list[int], times: list[float], told_by: str
) -> None:
    made_up = MadeUp(nodes=((0, 1), (2, 3)), compute_ms=lambda rank, step: times[20 * rank + step - 1], told_by=told_by)
    renamed = msgspec.structs.replace(
        made_up,
        nodes=((order[0], order[1]), (order[2], order[3])),
        compute_ms=lambda rank, step: times[20 * order.index(rank) + step - 1],
    )
    before, after = split_of(made_up.observed()), split_of(renamed.observed())
    back = {worker.rank: msgspec.structs.replace(worker, rank=order.index(worker.rank)) for worker in after.workers}
    assert tuple(back[rank] for rank in order) == before.workers
    assert after.mean == before.mean
