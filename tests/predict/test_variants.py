from __future__ import annotations

import msgspec
import pytest

from multinode.errors import UsageError
from multinode.model.model_size import parse_model
from multinode.model.workload import JobSettings
from multinode.predict.calibration import Calibration
from multinode.predict.evidence import gather
from multinode.predict.variants import Subject, method_of, parse_method, vary
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Strategy
from tests.model.trainings import TINY
from tests.predict.stored import sweep_record, training_record

TWO = Layout(nodes=2)
EVIDENCE = gather([training_record("one", 1, exposed_ms=12.0, workers_per_node=2), sweep_record("sweep")])
CALIBRATION, SUBJECT = EVIDENCE.calibration, EVIDENCE.subject
SCRIPT = Subject(settings=JobSettings(method="script", command="train.py"))


def step_bytes(calibration: Calibration, strategy: Strategy) -> float:
    return sum(call.size_bytes * call.times for call in calibration.work.calls_of(strategy, TWO))


@pytest.mark.parametrize(("text", "rank"), [("full", None), ("lora:8", 8), ("lora:128", 128)])
def test_a_method_is_full_or_an_adapter_of_a_rank(text: str, rank: int | None) -> None:
    assert parse_method(text) == rank


@pytest.mark.parametrize(
    "text", ["lora", "lora:", "lora:x", "lora:-1", "lora:0", "LoRA:8", "full:1", "", "lora:\u0663"]
)
def test_no_other_method_is_predicted(text: str) -> None:
    with pytest.raises(UsageError, match="is not a predictable method"):
        parse_method(text)


def test_what_was_measured_stays_as_it_is() -> None:
    assert vary(CALIBRATION, SUBJECT, strategy=Strategy.DDP) is CALIBRATION
    assert vary(CALIBRATION, SUBJECT, strategy=Strategy.DDP, method="full") is CALIBRATION
    assert method_of(SUBJECT.settings) == "full"


def test_another_strategy_sends_its_own_calls_and_computes_the_same() -> None:
    found = vary(CALIBRATION, SUBJECT, strategy=Strategy.ZERO2)
    # G and Psi where DDP sends G; both are cut by the job's own files.
    assert step_bytes(found, Strategy.ZERO2) == pytest.approx(2 * step_bytes(CALIBRATION, Strategy.DDP), rel=1e-3)
    assert found.work.is_cut(Strategy.ZERO2)
    assert found.costs == CALIBRATION.costs
    assert found.local_ms == CALIBRATION.local_ms


def test_the_job_s_own_deepspeed_json_is_kept_where_the_stage_alone_changes() -> None:
    text = '{"zero_optimization": {"stage": 2, "reduce_bucket_size": 1000000}}'
    record = training_record("one", 1, deepspeed=text, job={"deepspeed": "ds.json"})
    evidence = gather([record, sweep_record("sweep")])
    found = vary(evidence.calibration, evidence.subject, strategy=Strategy.ZERO1)
    calls = [call for call in found.work.calls_of(Strategy.ZERO1, TWO) if call.collective == "all_reduce"]
    assert sum(call.times for call in calls) > 1
    assert not any(call.per_micro_batch for call in calls)


def test_an_adapter_trains_less_and_exchanges_less_inside_the_node() -> None:
    found = vary(CALIBRATION, SUBJECT, strategy=Strategy.DDP, method="lora:4")
    part = found.work.load.trainable / CALIBRATION.work.load.trainable
    assert part < 0.1
    assert found.local_ms == pytest.approx(CALIBRATION.local_ms * part, rel=0.01)
    assert found.costs.optimizer_ms == pytest.approx(CALIBRATION.costs.optimizer_ms * part, rel=0.01)
    # 4 P and the adapter for 6 P.
    assert 0.6 < found.costs.compute_ms / CALIBRATION.costs.compute_ms < 0.9
    assert found.costs.overlap is None


def test_of_figures_the_shape_tells_another_method() -> None:
    shape = parse_model(TINY)
    subject = Subject(settings=JobSettings(method="lora", lora_rank=8, sequence_length=128), shape=shape)
    found = vary(CALIBRATION, subject, strategy=Strategy.DDP, method="full")
    assert shape is not None
    assert found.work.load.trainable == shape.parameters


def test_what_is_not_known_of_a_script_is_refused() -> None:
    with pytest.raises(UsageError, match="the number of trainable parameters of another method is unknown"):
        vary(CALIBRATION, SCRIPT, strategy=Strategy.DDP, method="full")
    found = vary(CALIBRATION, SCRIPT, strategy=Strategy.ZERO2)
    assert [call.collective for call in found.work.calls_of(Strategy.ZERO2, TWO)] == ["all_reduce", "all_gather"]


def test_a_job_that_cannot_be_read_under_it_says_why() -> None:
    assert SUBJECT.job is not None
    job = msgspec.structs.replace(SUBJECT.job, config=SUBJECT.job.config | {"quantization_bit": 4})
    with pytest.raises(UsageError, match="quantization_bit"):
        vary(CALIBRATION, msgspec.structs.replace(SUBJECT, job=job), strategy=Strategy.ZERO3)
