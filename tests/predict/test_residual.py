"""What a run on several nodes measured is what the model that was calibrated with it predicts for that run."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.errors import UsageError
from multinode.predict.evidence import Evidence, gather
from multinode.predict.forecast import Forecast, ForecastRequest, PredictedScenario, make_forecast
from multinode.predict.run_selection import Record
from multinode.profile.step_split import StepSplit, WorkerSplit
from multinode.profile.summary import StepTimes
from multinode.stats.estimate import exactly
from multinode.stats.unknown import Unknown, known
from tests.levers.compressed import compressions
from tests.predict.stored import COMPUTE_MS, OPTIMIZER_MS, comm_ms, renamed, sweep_record, training_record

OWN_MS = COMPUTE_MS + OPTIMIZER_MS
ONE, SWEEP = training_record("one", 1), sweep_record("sweep")
NOT_AT_ONCE: dict[str, Any] = {
    "deepspeed": '{"zero_optimization": {"stage": 2, "overlap_comm": false}}',
    "job": {"deepspeed": "ds.json"},
}


def waiting(record: Record, wait_ms: float) -> Record:
    """The same run if its workers had waited for each other as well."""
    summary = record.summary
    assert summary is not None
    step_ms = known(summary.step_time_ms).median.value + wait_ms
    mean = msgspec.structs.replace(known(summary.split.mean), step_ms=step_ms, wait_ms=wait_ms)
    return renamed(
        record,
        step_time_ms=StepTimes(median=exactly(step_ms), p95=step_ms, cv=0.01),
        samples_per_s=exactly(record.samples_per_s * (step_ms - wait_ms) / step_ms),
        split=StepSplit(mean=mean),
    )


def forecast(two: Record, request: ForecastRequest | None = None, one: Record = ONE) -> Forecast:
    return make_forecast(gather([one, two, SWEEP]), request or ForecastRequest(links=(1.0,)))


def measured_row(found: Forecast) -> PredictedScenario:
    (row,) = [row for row in found.scenarios if row.measured]
    return row


def test_more_than_the_network_explains_is_carried_on_to_other_links_and_told() -> None:
    two = training_record("two", 2, exposed_ms=400.0)
    found = forecast(two, ForecastRequest(links=(0.1, 1.0, 10.0)))
    slow, here, fast = found.scenarios
    assert here.step_time_ms == pytest.approx(OWN_MS + 400)
    assert here.speedup.value == pytest.approx(2 * OWN_MS / (OWN_MS + 400))
    # Up to a quarter more is the network's, on any link. A faster link saves that, and what it did not cost before not.
    extra_ms = 400 - 1.25 * comm_ms(1.0)
    assert fast.parts.exposed_ms == pytest.approx(extra_ms + 1.25 * comm_ms(10.0), rel=0.01)
    assert slow.parts.exposed_ms == pytest.approx(extra_ms + 1.25 * comm_ms(0.1), rel=0.01)
    (note,) = found.notes
    assert note.message.startswith(
        "a step of run two took 540 ms, but the cost model predicts 265 ms: 243 ms of the measured step is exposed"
    )
    assert "the collectives took 1.25 times as long as the network data" in note.message
    figures = {name: value for name, value in note.figures.items() if name != "run_id"}
    assert figures == pytest.approx(
        {"step_ms": 540, "predicted_ms": 265, "unexplained_ms": 243, "calls_factor": 1.25}, rel=0.01
    )
    why = "without the measured run, the prediction for several nodes was off by a factor of 2.03"
    assert [why in {doubt.message for doubt in row.doubts} for row in (slow, here, fast)] == [True, False, True]
    assert fast.samples_per_s.high / fast.samples_per_s.low > 4


def test_half_the_gradients_have_half_of_what_nothing_explains() -> None:
    two = training_record("two", 2, exposed_ms=400.0)
    full, half = forecast(two, ForecastRequest(links=(1.0,), levers=compressions(None, "fp16"))).scenarios
    assert half.parts.exposed_ms == pytest.approx(full.parts.exposed_ms / 2)


def test_waiting_for_a_slower_node_stays_on_any_link_and_grows_with_the_work() -> None:
    two = waiting(training_record("two", 2, exposed_ms=100.0), 70.0)
    request = ForecastRequest(links=(1.0, 100.0), nodes=(1, 2), accumulations=(1, 4))
    found = {(row.nodes, row.link_gbit_per_s, row.accumulation): row for row in forecast(two, request).scenarios}
    assert found[2, 1.0, 1].step_time_ms == pytest.approx(OWN_MS + 170)
    assert found[2, 100.0, 1].step_time_ms == pytest.approx(OWN_MS + 70, rel=0.02)
    assert found[2, 1.0, 4].parts.compute_ms == pytest.approx(4 * COMPUTE_MS * (OWN_MS + 70) / OWN_MS)
    # One node waits for nobody.
    assert found[1, None, 1].step_time_ms == pytest.approx(OWN_MS)
    (note,) = forecast(two).notes
    words = (
        "everything except exposed communication, including waits between workers, took 1.50 times as long as on one "
        "node"
    )
    assert words in note.message
    assert note.figures["own_work_factor"] == pytest.approx(1.5, rel=0.01)


def test_calls_that_took_less_than_the_network_says_do_so_on_other_links() -> None:
    one, two = (
        training_record(name, nodes, exposed_ms=100.0 * (nodes - 1), **NOT_AT_ONCE)
        for name, nodes in (("one", 1), ("two", 2))
    )
    slow, here = forecast(two, ForecastRequest(links=(0.1, 1.0)), one).scenarios
    assert here.parts.exposed_ms == pytest.approx(100)
    assert slow.parts.exposed_ms == pytest.approx(1000, rel=0.01)


def test_what_agrees_brings_no_note_and_no_doubt() -> None:
    # The second of two buckets takes 113.5 ms, and hides behind nothing.
    found = forecast(training_record("two", 2, exposed_ms=113.5), ForecastRequest(links=(0.1, 1.0)))
    assert found.notes == ()
    assert not any("model alone" in doubt.message for row in found.scenarios for doubt in row.doubts)


def test_one_node_and_an_nccl_test_alone_have_none() -> None:
    alone, both = (
        gather(records) for records in ([ONE, SWEEP], [ONE, training_record("two", 2, exposed_ms=400), SWEEP])
    )
    assert alone.calibration.residual.at is None
    assert both.calibration.residual.at == both.today


def test_a_method_that_nobody_ran_is_nowhere_taken_for_measured() -> None:
    two = training_record("two", 2, exposed_ms=400.0)
    (lora,) = forecast(two, ForecastRequest(links=(1.0,), methods=("lora:8",))).scenarios
    assert any("the prediction for several nodes was off" in doubt.message for doubt in lora.doubts)


UNKNOWN = st.just(Unknown("nobody looked"))
SPLITS = st.builds(
    WorkerSplit,
    rank=st.just(-1),
    step_ms=st.floats(1, 1e4),
    compute_ms=UNKNOWN | st.floats(1e-3, 1e4),
    exposed_ms=UNKNOWN | st.floats(0, 1e4),
    wait_ms=UNKNOWN | st.floats(0, 1e3),
    data_ms=UNKNOWN | st.floats(0, 1e3),
    optimizer_ms=UNKNOWN | st.floats(0, 1e3),
    host_ms=UNKNOWN | st.floats(0, 1e3),
)


@given(
    link=st.floats(0.01, 400),
    steps=st.tuples(SPLITS, SPLITS),
    workers=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    rate=st.floats(1e-2, 1e5),
    swept=st.booleans(),
    at_once=st.booleans(),
)
def test_whatever_was_measured_on_several_nodes_lies_in_the_interval_of_its_own_row(
    link: float,
    steps: tuple[WorkerSplit, WorkerSplit],
    workers: tuple[int, int],
    rate: float,
    *,
    swept: bool,
    at_once: bool,
) -> None:
    how = {} if at_once else NOT_AT_ONCE
    records = [
        renamed(
            training_record(name, nodes, link, workers_per_node=count, **how),
            split=StepSplit(mean=mean),
            step_time_ms=StepTimes(median=exactly(mean.step_ms), p95=mean.step_ms, cv=0.01),
        )
        for name, nodes, mean, count in zip(("one", "two"), (1, 2), steps, workers, strict=True)
    ]
    records[1] = renamed(records[1], samples_per_s=exactly(rate))
    try:
        evidence: Evidence = gather([*records, *([sweep_record("sweep", link)] if swept else [])])
    except UsageError:
        return
    row = measured_row(make_forecast(evidence, ForecastRequest(links=(link,))))
    low, high = row.samples_per_s.bounds
    assert low * (1 - 1e-6) <= rate <= high * (1 + 1e-6)
    assert row.samples_per_s.value == pytest.approx(rate, rel=1e-6) or evidence.calibration.residual.left > 0
