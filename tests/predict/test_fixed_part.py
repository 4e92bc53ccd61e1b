"""A step is a part done once and a part per micro-batch: what a published figure says of them."""

from __future__ import annotations

from typing import Any

import pytest

from multinode.predict.forecast import Forecast, ForecastRequest, PredictedScenario, make_forecast
from multinode.predict.published_benchmarks import evidence_of_benchmarks
from tests.predict.test_published_benchmarks import figures

# Nothing of a step is sent for long.
FAST = {"gbit_per_s": 3200, "rdma": True}
EIGHT = {"workers_per_node": 2, "step_time_ms": 800.0, "accumulation": 8}


def forecast(accumulation: int, **changes: Any) -> Forecast:
    evidence = evidence_of_benchmarks(figures(**{"network": FAST, "single_node": EIGHT} | changes))
    return make_forecast(evidence, ForecastRequest(links=(3200.0,), nodes=(2,), accumulations=(accumulation,)))


def predicted(accumulation: int, **changes: Any) -> PredictedScenario:
    (row,) = forecast(accumulation, **changes).scenarios
    return row


def slowest_ms(row: PredictedScenario) -> float:
    return row.step_time_ms * row.samples_per_s.value / row.samples_per_s.low


def test_up_to_a_third_of_a_published_step_may_be_done_once() -> None:
    """Of 800 ms with 8 micro-batches: one takes 100 ms, or up to 267 + 67."""
    row = predicted(1)
    assert row.step_time_ms == pytest.approx(100, rel=0.01)
    assert slowest_ms(row) == pytest.approx(267 + 67, rel=0.1)
    assert any(
        "up to 33% of the step time may not depend on the number of samples" in doubt.message for doubt in row.doubts
    )
    # More micro-batches share it.
    more = predicted(16)
    assert more.step_time_ms * more.samples_per_s.value / more.samples_per_s.high == pytest.approx(1600 - 267, rel=0.05)
    same = predicted(8)
    assert slowest_ms(same) < 1.05 * same.step_time_ms
    assert not any("done once per step" in doubt.message for doubt in same.doubts)


def test_two_figures_of_one_machine_tell_the_part_that_is_done_once() -> None:
    """timm#1659: 24 samples in 0.477 s, and 768 in 12.9 s."""
    two = [
        {"workers_per_node": 2, "accumulation": 1, "step_time_ms": 476.0},
        {"workers_per_node": 2, "accumulation": 32, "step_time_ms": 12907.0},
    ]
    row = predicted(8, single_node=two)
    assert row.step_time_ms == pytest.approx(75 + 8 * 401, rel=0.001)
    assert not any("done once per step" in doubt.message for doubt in row.doubts)
    assert slowest_ms(row) < 1.15 * row.step_time_ms


def test_start_up_is_part_of_the_mean_of_a_short_run() -> None:
    """18 steps, and start-up for up to 10: 36% of the mean, and a third of the rest."""
    short = EIGHT | {"steps": 18}
    row = predicted(1, single_node=short)
    assert slowest_ms(row) == pytest.approx(800 * (0.57 + 0.43 / 8), rel=0.1)
    assert [note.figures["steps"] for note in forecast(1, single_node=short).notes if note.code == "start-up"] == [18]
