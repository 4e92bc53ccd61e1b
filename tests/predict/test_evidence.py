from __future__ import annotations

from typing import Any

import msgspec
import pytest

from multinode.errors import UsageError
from multinode.levers.averaging import Averaging
from multinode.levers.levers import Levers
from multinode.network.measure import load_scan
from multinode.predict.calibration import Residual
from multinode.predict.cost_model import Scenario
from multinode.predict.evidence import Evidence, gather
from multinode.predict.forecast import predict_scenario
from multinode.predict.network_model import Link
from multinode.profile.calls import SeenCall
from multinode.profile.summary import Comm, StepTimes
from multinode.stats.estimate import exactly
from multinode.stats.unknown import UNMEASURED, Unknown, known
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Strategy
from tests.golden import Golden, error_of
from tests.levers.compressed import compressed
from tests.predict.stored import (
    BYTES,
    COMPUTE_MS,
    JOB,
    OPTIMIZER_MS,
    comm_ms,
    renamed,
    sweep_record,
    training_record,
)

# What the model exposes of it: the second of two buckets.
ONE, TWO = training_record("one", 1), training_record("two", 2, exposed_ms=113.5)
SWEEP = sweep_record("sweep")


def test_the_sides_of_a_contrast_and_an_nccl_test_are_told_apart() -> None:
    found = gather([ONE, TWO, SWEEP])
    assert found.sources == ("one node: run one", "2 nodes: run two", "network: nccl-test sweep at 1 Gbit/s")
    assert found.calibration.costs.compute_ms == COMPUTE_MS
    assert found.calibration.costs.optimizer_ms == OPTIMIZER_MS
    assert (found.today.layout, found.today.link.gbit_per_s) == (Layout(nodes=2), 1.0)
    assert found.today_samples_per_s == TWO.samples_per_s
    assert found.notes == ()
    assert found.calibration.network.backend == "gloo"


def test_a_speed_is_the_mean_of_its_repeats_as_a_contrast_tells_it() -> None:
    repeats = [training_record(f"two-{index}", 2, exposed_ms=exposed) for index, exposed in enumerate((90, 300, 110))]
    # Another training of the same nodes is no repeat, nor is one on another link.
    other = training_record("other", 2, job={**JOB, "per_device_train_batch_size": 4})
    slow = training_record("slow", 2, 0.1, exposed_ms=900)
    found = gather([other, slow, ONE, *repeats, SWEEP])
    assert found.today_samples_per_s == pytest.approx(sum(record.samples_per_s for record in repeats) / 3)
    assert found.single_samples_per_s == ONE.samples_per_s


def test_the_newest_sweep_of_these_nodes_is_found_and_one_of_their_link_before_it() -> None:
    others = [
        sweep_record("slow", 0.1),
        sweep_record("ours", 1.0),
        sweep_record("slower", 0.1),
        sweep_record("more", 1.0, 3),
    ]
    assert gather([ONE, TWO], others).sources[-1] == "network: nccl-test ours at 1 Gbit/s"
    assert gather([ONE, TWO], others[:1]).sources[-1] == "network: nccl-test slow at 100 Mbit/s"
    # Of more nodes than these it still tells of their network.
    assert gather([ONE, TWO], others[3:]).sources[-1] == "network: nccl-test more at 1 Gbit/s"


def test_without_a_sweep_the_stated_rate_counts_and_that_is_said() -> None:
    found = gather([ONE, TWO])
    assert found.calibration.network.curves == {}
    assert found.calibration.network.link.gbit_per_s == 1.0
    assert [note.code for note in found.notes] == ["nominal-rate"]
    streamed = gather([ONE, TWO], stream=0.8).notes[-1]
    assert (streamed.code, streamed.figures) == ("measured-stream", {"stream_gbit_per_s": 0.8})


def test_a_link_that_no_nic_tells_must_be_named() -> None:
    runs = [training_record("one", 1, None), training_record("two", 2, None)]
    assert gather(runs, link_measured=2.5).today.link.gbit_per_s == 2.5
    # What a NIC does say comes before it.
    assert gather([ONE, TWO, SWEEP], link_measured=2.5).today.link.gbit_per_s == 1.0
    assert gather([ONE, TWO], link_measured=2.5).calibration.network.link.gbit_per_s == 1.0


def test_without_one_node_its_own_work_is_what_the_others_did_not_wait_for() -> None:
    found = gather([TWO, SWEEP])
    assert found.calibration.costs.compute_ms == COMPUTE_MS
    assert found.calibration.layout == Layout(nodes=1)
    (note,) = found.notes
    assert (note.code, note.figures["run_id"]) == ("without-single-node", "two")
    assert any(doubt.message == "no run on one node was measured" for doubt in found.calibration.doubts)


def test_where_the_others_do_not_tell_either_a_stored_run_on_one_node_is_taken() -> None:
    silent = training_record("two", 2, exposed_ms=None)
    assert gather([silent, SWEEP], [ONE]).sources[0] == "one node: run one"


def test_one_node_alone_is_asked_about_the_nodes_of_the_sweep() -> None:
    found = gather([ONE, SWEEP])
    assert found.today.layout == Layout(nodes=2)
    assert found.today_samples_per_s is None


def test_more_workers_on_the_one_node_are_told_as_speed_ups_are_not_over_them() -> None:
    (note,) = gather([training_record("one", 1, workers_per_node=2), TWO, SWEEP]).notes
    assert note.message.startswith("one node was measured with 2 workers, at 28.57 samples/s")
    assert note.figures == {"workers": 2, "samples_per_s": pytest.approx(28.57, abs=0.01), "one_node_workers": 2}


def test_an_nccl_test_alone_finds_the_newest_training_on_its_nodes() -> None:
    assert gather([SWEEP], [training_record("old", 1), ONE, TWO]).sources[:2] == (
        "one node: run one",
        "2 nodes: run two",
    )


def test_of_repeats_the_middle_one_counts() -> None:
    repeats = [training_record(f"two-{index}", 2, exposed_ms=exposed) for index, exposed in enumerate((90, 300, 110))]
    several, middle = (gather([ONE, *runs, SWEEP]).calibration for runs in (repeats, repeats[2:]))
    assert several.residual == middle.residual
    assert several.costs == middle.costs


def test_what_repeats_differ_by_counts_where_it_is_more_than_their_steps_scatter() -> None:
    again = renamed(training_record("again", 1, 0.1), samples_per_s=exactly(ONE.samples_per_s * 1.3))
    other = renamed(training_record("other", 1, job={"per_device_train_batch_size": 4}), samples_per_s=exactly(1.0))
    found = gather([ONE, TWO, SWEEP], [again, other]).calibration
    # One node uses no link; another batch is no repeat.
    assert found.scatter == pytest.approx(0.3)
    alone = gather([ONE, TWO, SWEEP], [other]).calibration
    assert alone.scatter == 0.01
    widths = []
    for calibration in (alone, found):
        row = predict_scenario(
            calibration, Scenario(link=Link(gbit_per_s=10.0), layout=Layout(nodes=2), per_device_batch=2)
        )
        widths.append(row.samples_per_s.high / row.samples_per_s.low)
    assert widths[1] > 1.5 * widths[0]
    assert "its repeats differ by 30%" in [doubt.message for doubt in row.doubts]


def test_runs_of_other_data_are_of_another_training_where_both_are_known() -> None:
    other = training_record("other", 1, job={"dataset": "long_ones"})
    silent = training_record("two", 2, exposed_ms=None)
    assert error_of(gather, [silent, SWEEP], [other]).message == error_of(gather, [silent, SWEEP]).message
    unknown = training_record("unknown", 1, job={"dataset": None})
    assert gather([silent, SWEEP], [unknown]).sources[0] == "one node: run unknown"


def test_a_run_of_another_strategy_does_not_give_its_overlap_to_one_that_is_held() -> None:
    zero = training_record(
        "zero", 2, 0.3, exposed_ms=30.0, deepspeed='{"zero_optimization": {"stage": 2}}', job={"deepspeed": "ds.json"}
    )
    held = {one.name.split(",")[0]: one for one in gather([ONE, zero, TWO, SWEEP]).holdouts}
    # Of the two on several nodes only the other one could tell, and it sends other calls.
    assert held["two"].calibration.costs.overlap is None
    assert held["two"].calibration.residual == Residual()


def bad_mean() -> object:
    assert ONE.summary is not None
    assert ONE.summary.split.mean is not None
    return msgspec.structs.replace(ONE.summary.split.mean, compute_ms=-5.0)


def test_a_script_is_predicted_from_what_its_workers_called() -> None:
    call = SeenCall(op="all_reduce", ranks=2, nodes=2, backend="gloo", size_bytes=BYTES, count=1.0, source="ddp")
    record = renamed(training_record("script", 2, exposed_ms=comm_ms(1.0), model=None), comm=Comm(calls=(call,)))
    plan = msgspec.structs.replace(record.plan, engine="torchrun", job="train.py", framework="", config_path="")
    found = gather([record.having(plan=plan), SWEEP])
    (known,) = found.calibration.work.calls[Strategy.DDP]
    assert (known.size_bytes, known.times, known.per_micro_batch) == (BYTES, 1.0, False)
    assert found.subject.job is None


def test_where_micro_batches_were_not_counted_the_file_says_how_many() -> None:
    record = renamed(training_record("one", 1, job={"gradient_accumulation_steps": 4}), micro_steps=UNMEASURED)
    found = gather([record, SWEEP])
    assert (found.calibration.accumulation, found.calibration.per_device_batch) == (4, 2.0)
    assert found.today.accumulation == 4


def test_a_batch_is_that_of_the_settings_however_the_rate_was_rounded() -> None:
    record = training_record("one", 1, job={"per_device_train_batch_size": 64})
    assert record.summary is not None
    # At 1% more samples per second than its steps have, the rate makes 65 of them.
    found = gather([renamed(record, samples_per_s=known(record.summary.samples_per_s) * 1.01), SWEEP])
    assert (found.calibration.per_device_batch, found.today.per_device_batch) == (64.0, 64.0)


def test_runs_that_test_the_model_are_not_known_to_it() -> None:
    others = [
        training_record("slow", 2, 0.1, exposed_ms=comm_ms(0.1)),
        training_record("stranger", 2, 0.1, job={"cutoff_len": 512}),
        training_record("four", 2, 0.1, job={"gradient_accumulation_steps": 4}),
        training_record("zero", 2, 0.1, deepspeed='{"zero_optimization": {"stage": 2}}', job={"deepspeed": "ds.json"}),
        training_record("nowhere", 2, None),
    ]
    found = gather([ONE, TWO, SWEEP], others)
    assert [held.name.split(",")[0] for held in found.holdouts] == ["slow", "four", "zero", "two"]
    held = dict(zip(("slow", "four", "zero", "two"), found.holdouts, strict=True))
    assert held["two"].calibration.costs.overlap is None
    assert held["slow"].calibration.costs == found.calibration.costs
    assert held["four"].scenario.accumulation == 4
    assert held["zero"].scenario.strategy is Strategy.ZERO2
    assert held["zero"].calibration.work.calls_of(Strategy.ZERO2, Layout(nodes=2))[0].per_micro_batch


def test_a_repeat_does_not_give_a_run_away() -> None:
    repeats = [training_record(name, 2, exposed_ms=100.0) for name in ("first", "again")]
    slow = training_record("slow", 2, 0.1, exposed_ms=1000.0)
    alone, both = (gather([ONE, *runs, SWEEP]).holdouts for runs in (repeats, [*repeats, slow]))
    assert [held.calibration.costs.overlap for held in alone] == [None, None]
    assert all(held.calibration.costs.overlap is not None for held in both)


def test_runs_whose_nics_are_silent_are_held_at_the_link_that_was_named() -> None:
    runs = [training_record("one", 1, None), training_record("two", 2, None, exposed_ms=100.0)]
    assert [held.scenario.link.gbit_per_s for held in gather(runs, link_measured=1.0).holdouts] == [1.0]
    assert not gather([training_record("one", 1), runs[1], SWEEP]).holdouts


@pytest.mark.parametrize("step_ms", [0.0, -1.0])
def test_a_step_that_takes_no_time_is_no_training(step_ms: float) -> None:
    with pytest.raises(UsageError):
        gather([renamed(ONE, step_time_ms=StepTimes(median=exactly(step_ms), p95=step_ms, cv=0.0)), SWEEP])


def test_records_of_which_nothing_can_be_predicted_are_refused(golden: Golden) -> None:
    assert ONE.summary is not None
    assert SWEEP.sweep is not None
    unlinked = [training_record("one", 1, None), training_record("two", 2, None)]
    odd = msgspec.structs.replace(SWEEP.sweep.curves["all_reduce"], points=((0, 1.0), (1, -1.0)))
    report = msgspec.structs.replace(SWEEP.sweep, curves={"all_reduce": odd})
    other = training_record("other", 2, job={"cutoff_len": 512})
    long = training_record("other", 1, job={"dataset": "long_ones"})
    cases = {
        "no rate of the link": unlinked,
        "no rate of the nccl-test's link": [*unlinked, sweep_record("sweep", None)],
        "nothing is known about the exposed part": [training_record("two", 2, exposed_ms=None), SWEEP],
        "an nccl-test alone": [SWEEP],
        "other settings": [ONE, other, SWEEP],
        "other data": [long, TWO, SWEEP],
        "no speed": [renamed(ONE, samples_per_s=Unknown("the training does not say it"))],
        "an absurd split": [renamed(ONE, split=msgspec.structs.replace(ONE.summary.split, mean=bad_mean())), SWEEP],
        "an absurd speed": [ONE, renamed(training_record("two", 2), samples_per_s=exactly(-1.0)), SWEEP],
        "no files and no calls": [training_record("two", 2, model=None), SWEEP],
        "an nccl-test of one node": [ONE, sweep_record("sweep", nodes=1)],
        "an absurd nccl-test": [ONE, SWEEP.having(results={load_scan: report})],
    }
    golden.check_errors("refused_evidence", {case: error_of(gather, records) for case, records in cases.items()})


def test_the_evidence_is_the_same_whichever_way_it_is_asked() -> None:
    found: Evidence = gather([SWEEP, TWO, ONE])
    assert found.calibration == gather([ONE, TWO, SWEEP]).calibration


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"levers": Levers(averaging=Averaging(every=16, dtype="fp16"))},
            "its nodes average every 16 steps (local SGD), in fp16",
        ),
        ({"levers": compressed("powersgd:4")}, "its gradients are sent as powersgd:4"),
    ],
)
def test_nothing_is_predicted_from_a_run_of_another_algorithm(changed: dict[str, Any], words: str) -> None:
    one, two = training_record("one", 1), training_record("two", 2, exposed_ms=100.0)
    plain, many = gather([one, two]), two.having(plan=msgspec.structs.replace(two.plan, **changed))
    with pytest.raises(UsageError) as refused:
        gather([one, many])
    assert refused.value.message == f"run two cannot be used: {words}"
    # One that is stored beside is passed over.
    assert gather([one, two], [many]) == plain
