"""What a measured speed of several nodes says about their network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from multinode.findings.finding import Finding
from multinode.predict.early_verdict import judge, verdict_line
from multinode.predict.evidence import gather
from multinode.predict.forecast import Forecast, ForecastRequest, make_forecast
from multinode.predict.published_benchmarks import evidence_of_benchmarks
from multinode.predict.shortfall import shortfall_words
from multinode.profile.step_split import StepSplit
from multinode.stats.estimate import exactly
from tests import make
from tests.predict.stored import comm_ms, renamed, sweep_record, training_record
from tests.predict.test_published_benchmarks import figures
from tests.profile.made_up_steps import MadeUp, always
from tests.profile.running import keep_running

# A step of 166 ms; its gradients take 1.5 x 14.8 MB / 0.118 GB/s = 188 ms at 1 Gbit/s.


def forecast(step_time_ms: float, **changes: Any) -> Forecast:
    told = {"nodes": 2, "workers_per_node": 2, "step_time_ms": step_time_ms}
    link = changes["network"]["gbit_per_s"]
    evidence = evidence_of_benchmarks(figures(several_nodes=told, overlap=False, **changes))
    return make_forecast(evidence, ForecastRequest(links=(link,)))


def judged(step_time_ms: float, **network: Any) -> Finding | None:
    return forecast(step_time_ms, network=network).shortfall


def test_a_speed_that_the_network_allows_is_not_judged() -> None:
    assert judged(170.0, gbit_per_s=100, rdma=True) is None
    assert judged(170.0, gbit_per_s=25) is None


def test_over_rdma_the_rate_is_told_as_from_which_the_nodes_are_as_slow() -> None:
    # 22.15 MB more in 443 ms are 0.05 GB/s.
    found = judged(166 + 443.0, gbit_per_s=400, rdma=True)
    assert found is not None
    assert found.figures["as_from_gbit_per_s"] == pytest.approx(0.4, rel=0.05)
    assert shortfall_words(found) == (
        "3.7x slower than 400 Gbit/s over RDMA allows; the measured speed corresponds to a link of about 400 Mbit/s. "
        "Check whether NCCL uses RDMA on every NIC: multinode nccl-test"
    )


def test_over_tcp_below_25_gbit_slow_computation_is_not_blamed_on_the_network() -> None:
    inside, beyond = judged(166 + 188 * 1.5, gbit_per_s=1), judged(166 + 188 * 6.0, gbit_per_s=1)
    assert inside is None
    assert beyond is not None
    assert "allows; the measured speed corresponds to a link of about 170 Mbit/s" in beyond.message
    assert beyond.hint is not None
    assert "RDMA" not in beyond.hint


def test_in_a_cloud_a_cap_on_a_flow_is_named_and_at_home_it_is_not() -> None:
    """At 25 Gbit/s they take 8 ms; capped at 5, 35."""
    model = {"trainable": 369_177_600}
    capped = forecast(166 + 3544.0, model=model, network={"gbit_per_s": 25}).shortfall
    assert capped is not None
    assert capped.figures["case"] == "a capped flow"
    assert capped.hint == "check whether a cloud caps TCP flows: multinode nccl-test"
    at_home = forecast(166 + 3544.0, model=model, network={"gbit_per_s": 25, "cloud": False})
    assert at_home.shortfall is not None
    assert "case" not in at_home.shortfall.figures
    assert at_home.scenarios[0].cases == ()
    assert at_home.measure == ""


def test_a_shortfall_does_not_widen_what_is_predicted() -> None:
    fair, short = (
        forecast(step_ms, network={"gbit_per_s": 400, "rdma": True}).scenarios[0] for step_ms in (170.0, 900.0)
    )
    assert short.samples_per_s.bounds == pytest.approx(fair.samples_per_s.bounds, rel=0.03)


def test_of_own_runs_what_was_exposed_is_judged_and_not_a_slow_node() -> None:
    """An nccl-test of 1 Gbit/s: a step that exposed four times what that takes, and one whose own work took longer."""
    single, sweep = training_record("a", 1), sweep_record("s")
    slow = make.split(700.0, compute_ms=580.0, exposed_ms=comm_ms(1.0) - 80)
    blamed, slow_node = (
        make_forecast(gather([sweep, single, several]), ForecastRequest()).shortfall
        for several in (
            training_record("b", 2, exposed_ms=4 * comm_ms(1.0) + 80),
            renamed(training_record("b", 2), samples_per_s=exactly(4 / 0.7), split=StepSplit(mean=slow)),
        )
    )
    assert blamed is not None
    assert (
        "slower than 1 Gbit/s allows (as measured); the measured speed corresponds to a link of about" in blamed.message
    )
    assert blamed.hint == "find what the step waits for: multinode show"
    assert slow_node is None


def test_the_early_verdict_says_that_a_run_is_slower_than_its_network_allows(tmp_path: Path) -> None:
    directory = keep_running(tmp_path, MadeUp(steps=15, transfer_ms=always(1000.0)), link_gbit_per_s=10.0)
    verdict = judge(directory).verdict
    assert verdict is not None
    assert verdict.shortfall is not None
    assert "slower than 10 Gbit/s allows; the measured speed corresponds to a link of about" in verdict_line(verdict)
