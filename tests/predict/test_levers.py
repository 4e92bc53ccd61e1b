"""What averaging every H-th step and PowerSGD are predicted to take, against figures computed by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from multinode.levers.averaging import Averaging
from multinode.levers.axes import LeverAxes
from multinode.levers.compression import Compression
from multinode.levers.levers import NONE, Levers
from multinode.predict.cost_model import Scenario, StepCosts, make_low_rank
from multinode.predict.evidence import Evidence, gather
from multinode.predict.forecast import ForecastRequest, PredictedScenario, make_forecast
from multinode.predict.network_model import Link
from multinode.predict.prediction import Prediction, calls_of, sent_bytes
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Call, Strategy, TrafficInputs, Work
from tests.golden import Golden, error_of
from tests.levers.compressed import compressions
from tests.predict.stored import COMPUTE_MS, OPTIMIZER_MS, comm_ms, sweep_record, training_record
from tests.predict.test_prediction import CALIBRATION, LINK, G

changed = msgspec.structs.replace
TWO = Layout(nodes=2)
# Of 12.5 MB/s.
SLOW = Link(gbit_per_s=LINK.gbit_per_s / 10)
COMM_MS = G / 12.5e3
# All that DDP could hide is hidden.
CALIBRATED = changed(CALIBRATION, costs=StepCosts(compute_ms=146, optimizer_ms=20, overlap=1))
# As tests.model.trainings has TINY: 3,691,776 parameters, of which 5,376 are no matrices.
TRAINED, VECTORS = 3_691_776, 5_376
# Four columns of the rows, and of the columns, of all matrices: 7 a layer of 4, and the embedding.
THIN = 4 * (4 * (4 * 256 + 2 * 688 + 256) + 2048) + 4 * (4 * (4 * 256 + 2 * 256 + 688) + 256)


def asked(averaging: Averaging | None, layout: Layout = TWO, **others: Any) -> Prediction:
    usual = Scenario(link=SLOW, layout=layout, per_device_batch=2, levers=Levers(averaging=averaging))
    return Prediction(others.pop("calibration", CALIBRATED), changed(usual, **others))


@pytest.mark.parametrize(
    ("averaging", "nodes", "part"),
    [
        (Averaging(every=1), 2, 1.0),
        (Averaging(every=4), 2, 1 / 4),
        (Averaging(every=16), 2, 1 / 16),
        (Averaging(every=16, dtype="fp16"), 2, 1 / 32),
        (Averaging(every=16, dtype="bf16"), 2, 1 / 32),
        (Averaging(every=64, outer_lr=0.7, momentum=0.9), 2, 1 / 64),
        # 2(n-1)/n: 1.5 times what passes the NIC of two nodes.
        (Averaging(every=16), 4, 1.5 / 16),
    ],
)
def test_a_step_takes_the_nodes_own_work_and_a_part_of_an_average(
    averaging: Averaging, nodes: int, part: float
) -> None:
    found = asked(averaging, Layout(nodes=nodes))
    # T_local + C 2(n-1)/n / H, and what a round computes: twice an optimizer step.
    expected_ms = 166 + 2 * 20 / averaging.every + COMM_MS * part
    assert found.step_time_ms == pytest.approx(expected_ms, rel=2e-3)
    assert found.parts.exposed_ms == pytest.approx(COMM_MS * part, rel=5e-3)
    assert found.interval[0] < found.samples_per_s < found.interval[1]
    # It is fully exposed, however the buckets of DDP would overlap.
    assert asked(averaging, Layout(nodes=nodes), overlap=False).parts == found.parts
    assert "the time that nodes wait for each other in each round was not measured" in {
        one.message for one in found.doubts
    }


def test_accumulation_and_a_larger_batch_make_rounds_longer_and_send_as_much() -> None:
    once = asked(Averaging(every=4))
    more = asked(Averaging(every=4), accumulation=3, per_device_batch=4)
    assert more.parts.exposed_ms == pytest.approx(once.parts.exposed_ms)
    assert more.parts.compute_ms == pytest.approx(6 * once.parts.compute_ms)


def test_a_node_averages_once_however_many_workers_it_has_and_these_exchange_in_every_step() -> None:
    calibration = changed(CALIBRATED, local_ms=40.0)
    found = asked(Averaging(every=4), Layout(nodes=2, workers_per_node=2), calibration=calibration)
    assert found.parts.exposed_ms == pytest.approx(40 + COMM_MS / 4, rel=5e-3)
    scenario = found.scenario
    assert sent_bytes(scenario, calls_of(calibration, scenario)) == G / 4
    # On one node there is nothing to average.
    alone = changed(scenario, layout=Layout(nodes=1, workers_per_node=2))
    assert Prediction(calibration, alone).parts == Prediction(calibration, changed(alone, levers=NONE)).parts


def test_a_back_test_of_ddp_narrows_no_interval_of_rounds() -> None:
    found = make_forecast(
        gather([training_record("one", 1), training_record("two", 2, exposed_ms=comm_ms(1.0)), sweep_record("sweep")]),
        ForecastRequest(links=(1.0,), levers=LeverAxes(averaging=(None, Averaging(every=16)))),
    ).scenarios
    assert [one.basis for one in found] == ["measured", "assumed"]
    assert [one.measured for one in found] == [True, False]


def evidence(**job: Any) -> Evidence:
    return gather([training_record("one", 1, job=job), sweep_record("sweep")])


def outlooks(request: ForecastRequest, **job: Any) -> tuple[PredictedScenario, ...]:
    return make_forecast(evidence(**job), request).scenarios


def test_power_sgd_sends_thin_matrices_and_computes_more() -> None:
    plain, thin = outlooks(ForecastRequest(links=(0.1,), levers=compressions(None, "powersgd:4")))
    assert thin.parts.comm_ms == pytest.approx(comm_ms(0.1, 4 * (THIN + VECTORS)), rel=0.02)
    assert thin.parts.comm_ms < plain.parts.comm_ms / 39
    assert thin.parts.optimizer_ms == pytest.approx(OPTIMIZER_MS * (1 + 4.5 * (1 - VECTORS / TRAINED)))
    assert thin.parts.compute_ms == plain.parts.compute_ms == COMPUTE_MS
    assert [one.message.split()[:4] for one in thin.doubts if one.code == "lever-compute"] == [
        ["the", "time", "of", "PowerSGD"]
    ]
    eight = outlooks(ForecastRequest(links=(0.1,), levers=compressions("powersgd:8")))[0]
    assert eight.parts.comm_ms == pytest.approx(comm_ms(0.1, 4 * (2 * THIN + VECTORS)), rel=0.02)


def test_thin_matrices_of_an_adapter_stay_as_they_are() -> None:
    plain, thin = outlooks(ForecastRequest(links=(0.1,), methods=("lora:8",), levers=compressions(None, "powersgd:4")))
    assert thin.parts == plain.parts


def test_power_sgd_is_exposed_where_the_backward_pass_waits_for_it() -> None:
    load = TrafficInputs(parameters=1000, trainable=1000, gradient_bytes=2, parameter_bytes=2)
    low_rank = make_low_rank([(30, 30, 1)], load, 2)
    # 60 and 60 of fp32 in place of 900 of half that; 100 stay.
    assert (low_rank.left, low_rank.right, low_rank.rest) == (0.12, 0.12, 0.1)
    for backend, hideable in (("gloo", True), ("nccl", False)):
        work = Work(strategy=Strategy.DDP, load=load)
        calibration = changed(CALIBRATED, work=work, network=changed(CALIBRATED.network, backend=backend))
        scenario = Scenario(link=SLOW, layout=Layout(nodes=2), per_device_batch=2, low_rank=low_rank)
        calls = calls_of(calibration, scenario)
        assert [call.size_bytes for call in calls] == [200, 240, 240]
        assert {call.hideable for call in calls} == {hideable}
    assert isinstance(calls[0], Call)


def test_what_cannot_be_predicted_is_refused(golden: Golden) -> None:
    script = gather([training_record("one", 1), sweep_record("sweep")])
    unknown = changed(script, calibration=changed(script.calibration, matrices=()))
    fp16 = Compression(kind="fp16")
    cases = {
        "compression of ZeRO-2": ForecastRequest(strategies=(Strategy.ZERO2,), levers=compressions("fp16")),
        "averaging of ZeRO-2": ForecastRequest(
            strategies=(Strategy.ZERO2,), levers=LeverAxes(averaging=(Averaging(every=4),))
        ),
        "both": ForecastRequest(levers=LeverAxes(compression=(fp16,), averaging=(Averaging(every=4),))),
        "no round": ForecastRequest(levers=LeverAxes(averaging=(Averaging(every=0),))),
        "no rank": ForecastRequest(levers=compressions("powersgd:0")),
    }
    golden.check_errors(
        "refused_levers",
        {case: error_of(outlooks, request) for case, request in cases.items()}
        | {
            "PowerSGD of an unknown model": error_of(
                make_forecast, unknown, ForecastRequest(levers=compressions("powersgd"))
            )
        },
    )


def test_levers_go_with_every_other_setting() -> None:
    found = outlooks(
        ForecastRequest(
            links=(0.1,),
            accumulations=(1, 4),
            methods=("full", "lora:8"),
            levers=LeverAxes(
                averaging=(None, Averaging(every=16), Averaging(every=64, outer_lr=0.7, momentum=0.9, dtype="fp16"))
            ),
        )
    )
    assert len(found) == 2 * 2 * 3
    assert {one.levers.words.get("averaging") for one in found} == {
        None,
        "every 16 steps (local SGD)",
        "every 64 steps (DiLoCo, outer lr 0.7), in fp16",
    }
    for full in (one for one in found if one.levers.averaging is None):
        alike = [one for one in found if (one.method, one.accumulation) == (full.method, full.accumulation)]
        assert [one.parts.exposed_ms for one in alike] == sorted((one.parts.exposed_ms for one in alike), reverse=True)


def test_a_break_even_is_of_the_lever_that_alone_is_asked_for_and_of_as_many_nodes() -> None:
    plain, averaging = ForecastRequest(links=(0.1, 1.0), nodes=(1, 4)), Averaging(every=16)
    requests = {
        "ddp": plain,
        "averaged": changed(plain, levers=LeverAxes(averaging=(averaging,))),
        "both": changed(plain, levers=LeverAxes(averaging=(None, averaging))),
        "thin": changed(plain, levers=compressions("powersgd:4")),
    }
    asked = {name: make_forecast(evidence(), request) for name, request in requests.items()}
    found = {name: one.break_even for name, one in asked.items() if one.break_even is not None}
    assert {one.next_node.nodes for one in found.values()} == {5}
    link = {name: one.efficient.value or 0.0 for name, one in found.items()}
    assert link["both"] == link["ddp"]
    assert link["averaged"] < link["ddp"] / 4
    assert link["thin"] < link["ddp"] / 4
