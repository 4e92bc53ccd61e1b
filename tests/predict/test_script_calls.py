"""What a script calls for itself in every step: next to no bytes, and a round trip each."""

from __future__ import annotations

import msgspec
import pytest

from multinode.job.job_files import Change
from multinode.levers.averaging import Averaging
from multinode.levers.levers import Levers
from multinode.network.measure import load_scan
from multinode.predict.advice import advice_notes, rank_options
from multinode.predict.evidence import gather
from multinode.predict.prediction import Prediction
from multinode.predict.run_selection import Record
from multinode.predict.training_state import TrainingState
from multinode.profile.calls import SeenCall
from multinode.profile.summary import Comm
from multinode.traffic.algorithms import Layout
from multinode.traffic.pair_speeds import RawTcp, RoundTrip
from tests.predict.stored import COMPUTE_MS, OPTIMIZER_MS, comm_ms, renamed, sweep_record, training_record

changed = msgspec.structs.replace
OWN_MS = COMPUTE_MS + OPTIMIZER_MS
# Of two workers: the tokens of a step (int64) and a logged loss (float32), which HF's Trainer gathers, and DDP's
# broadcast of its buffers.
COUNT, LOSS = (
    SeenCall(op="all_gather", ranks=2, nodes=2, backend="gloo", size_bytes=size, count=1.0) for size in (16, 8)
)
BUFFERS = SeenCall(op="broadcast", ranks=2, nodes=2, backend="gloo", size_bytes=128, count=1.0, source="call")
LARGE = SeenCall(op="all_reduce", ranks=2, nodes=2, backend="gloo", size_bytes=1e7, count=1.0)


def trained(*calls: SeenCall, beside_ms: float | None = 30.0, link: float = 1.0) -> Record:
    """On two nodes, where calls beside DDP's own took so long."""
    record = training_record("two", 2, link=link, exposed_ms=comm_ms(link) + (beside_ms or 0.0))
    assert record.summary is not None
    split = changed(record.summary.split, beside_ms=beside_ms)
    return renamed(record, comm=Comm(calls=calls), split=split)


def swept(round_trip_us: float | None = None) -> Record:
    """An nccl-test, with what a round trip took between its nodes."""
    record = sweep_record("sweep")
    assert record.sweep is not None
    told = (RoundTrip(source="node0", target="node1", median_us=round_trip_us),)
    return record.having(results={load_scan: changed(record.sweep, tcp=RawTcp(latency=told))})


def asked(records: list[Record], averaging: Averaging | None = None, nodes: int = 2) -> Prediction:
    found = gather(records)
    return Prediction(
        found.calibration, changed(found.today, levers=Levers(averaging=averaging), layout=Layout(nodes=nodes))
    )


@pytest.mark.parametrize("records", [[], [swept()], [training_record("one", 1)], [training_record("one", 1), swept()]])
def test_they_stay_in_every_step_where_nodes_average_less_often(records: list[Record]) -> None:
    records = [*records, trained(COUNT, LOSS)]
    assert asked(records).parts.exposed_ms == pytest.approx(comm_ms(1.0) + 30, rel=1e-3)
    rare = asked(records, Averaging(every=64))
    assert rare.parts.exposed_ms == pytest.approx(comm_ms(1.0) / 64 + 30, rel=1e-2)
    assert asked(records, nodes=1).parts.exposed_ms == pytest.approx(0, abs=0.01)


def test_more_nodes_take_more_messages_one_after_the_other() -> None:
    four = asked([trained(COUNT, LOSS)], Averaging(every=64), nodes=4)
    assert four.parts.exposed_ms == pytest.approx(1.5 * comm_ms(1.0) / 64 + 3 * 30, rel=1e-2)


def test_buffers_of_ddp_pass_between_nodes_only_where_its_gradients_do() -> None:
    records = [trained(COUNT, LOSS, BUFFERS)]
    assert asked(records).parts.exposed_ms == pytest.approx(comm_ms(1.0) + 30, rel=1e-3)
    assert asked(records, Averaging(every=64)).parts.exposed_ms == pytest.approx(comm_ms(1.0) / 64 + 20, rel=1e-2)


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(trained(COUNT, LOSS, beside_ms=None), id="not timed"),
        pytest.param(trained(COUNT, LOSS, LARGE), id="together with large ones"),
    ],
)
def test_where_the_run_does_not_tell_what_they_take_it_is_the_round_trip_that_nccl_test_measured(
    record: Record,
) -> None:
    found = gather([record, swept(5000.0)])
    assert found.calibration.network.round_trip_us == 5000
    assert len(found.calibration.script) == 2


def test_what_an_nccl_test_did_not_measure_of_them_is_no_doubt_of_the_network() -> None:
    found = asked([trained(changed(COUNT, op="broadcast")), swept()], Averaging(every=64))
    assert not [one.message for one in found.doubts if "derived from other" in one.message]


def state(*calls: SeenCall, beside_ms: float = 30.0) -> TrainingState:
    found = gather([trained(*calls, beside_ms=beside_ms)])
    return TrainingState(calibration=found.calibration, scenario=found.today, settings=found.subject.settings)


def test_advice_names_the_settings_that_remove_them_and_what_these_mean() -> None:
    today = state(COUNT, LOSS, BUFFERS)
    advice = next(one.advice for one in rank_options(today) if one.option.kind == "script")
    assert advice.change == Change(overrides=("average_tokens_across_devices=false", "logging_steps=10"))
    step_ms = OWN_MS + comm_ms(1.0) + 30
    # One is left out, and one is made every tenth step.
    assert advice.gain.value == pytest.approx(step_ms / (step_ms - 10 - 9), rel=1e-3)
    assert [effect.code for effect in advice.effects] == ["equal-weight"]
    assert advice.why[-1].code == "small-collectives"
    assert advice.why[-1].figures == pytest.approx({"calls_before": 3, "calls": 1.1})
    (note,) = (one for one in advice_notes(today, today.outlook()) if one.code == "small-collectives")
    assert note.message.startswith("the script calls 3 small collectives per step, which take 30 ms in total")
    assert note.figures == pytest.approx({"calls": 3, "calls_ms": 30})
    assert note.hint == "with the Trainer, set average_tokens_across_devices: false and a larger logging_steps"


def test_a_script_is_told_the_settings_in_words() -> None:
    today = state(COUNT, LOSS)
    today = changed(today, settings=changed(today.settings, command="train.py"))
    advice = next(one.advice for one in rank_options(today) if one.option.kind == "script")
    assert (advice.change, advice.command) == (
        None,
        "with the Trainer, set average_tokens_across_devices: false and a larger logging_steps",
    )


@pytest.mark.parametrize("calls", [(BUFFERS,), (changed(LOSS, count=0.1),), (changed(COUNT, op="all_reduce"),)])
def test_what_no_setting_of_the_trainer_removes_is_not_advised(calls: tuple[SeenCall, ...]) -> None:
    assert "script" not in {option.kind for _, option in rank_options(state(*calls))}


def test_calls_that_take_next_to_nothing_are_no_note() -> None:
    today = state(COUNT, LOSS, beside_ms=0.4)
    assert not [one for one in advice_notes(today, today.outlook()) if one.code == "small-collectives"]
