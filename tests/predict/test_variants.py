from __future__ import annotations

import functools
from typing import Any

import msgspec
import pytest

from multinode.model.model_size import parse_model
from multinode.model.workload import JobSettings
from multinode.predict.calibration import Calibration
from multinode.predict.evidence import Evidence, gather
from multinode.predict.variants import Subject, method_of, parse_method, vary
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Strategy
from tests.golden import Golden, error_of
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


def test_no_other_method_is_predicted(golden: Golden) -> None:
    assert SUBJECT.job is not None
    quantized = msgspec.structs.replace(SUBJECT.job, config=SUBJECT.job.config | {"quantization_bit": 4})
    of_script = functools.partial(vary, CALIBRATION, SCRIPT, strategy=Strategy.DDP)
    of_job = functools.partial(vary, CALIBRATION, msgspec.structs.replace(SUBJECT, job=quantized))
    whole = counted_evidence("full", None, count_of(trained=True))
    texts = ("lora", "lora:", "lora:x", "lora:-1", "lora:0", "LoRA:8", "full:1", "", "lora:\u0663")
    golden.check_errors(
        "refused_methods",
        {f"--method {text!a}": error_of(parse_method, text) for text in texts}
        | {
            "another method of a script": error_of(of_script, method="full"),
            "a quantized model under ZeRO-3": error_of(of_job, strategy=Strategy.ZERO3),
            "an adapter that the node could not attach": error_of(
                vary, whole.calibration, whole.subject, strategy=Strategy.DDP, method="lora:8"
            ),
        },
    )


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


# A node's count of a mixture of experts: embedding and head of 4,000 parameters, two layers with 1,000 of attention and
# 8 experts of 500 each, of which a token passes two; on attention an adapter of 80.
ACTIVE, HEAD = 2 * (1_000 + 2 * 500) + 4_000, 4_000


def count_of(trained: bool, adapter: int = 0, **more: Any) -> dict[str, Any]:  # noqa: FBT001 - as the node tells it
    ends = {"times": 1, "layer": False, "tensors": [[HEAD, True, trained, False]]}
    tensors = [[1_000, True, trained, False], [8 * 500, True, trained, False]]
    layer = [*tensors, [adapter, True, True, True]] if adapter else tensors
    work = {"trained": ACTIVE} if trained else {"trained": 2 * adapter, "passed": ACTIVE}
    parts = [ends, {"times": 2, "layer": True, "tensors": layer}, ends]
    return {
        "hidden": 8,
        "tied": False,
        "table": HEAD,
        "parts": parts,
        "work": work | {"is": "work", "experts": "2 of 8"},
        **more,
    }


def counted_evidence(method: str, rank: int | None, count: dict[str, Any]) -> Evidence:
    model, job = {"model_type": "qwen3_moe", "counted": count}, {"finetuning_type": method, "lora_rank": rank or 8}
    return gather([training_record("one", 1, exposed_ms=12.0, job=job, model=model), sweep_record("sweep")])


# The layers' forward pass is repeated, not the head's.
WHOLE_FLOPS = 6 * ACTIVE + 2 * (ACTIVE - HEAD)


@pytest.mark.parametrize("rank", [8, 16])
def test_of_a_mixture_of_experts_the_active_parameters_tell_the_compute_of_another_method(rank: int) -> None:
    evidence = counted_evidence("full", None, count_of(trained=True, adapted=count_of(trained=False, adapter=80)))
    found = vary(evidence.calibration, evidence.subject, strategy=Strategy.DDP, method=f"lora:{rank}")
    adapter = 2 * 80 * rank / 8
    assert found.work.load.trainable == adapter
    flops = 4 * ACTIVE + 6 * adapter + 2 * (ACTIVE + adapter - HEAD)
    assert found.costs.compute_ms / evidence.calibration.costs.compute_ms == pytest.approx(flops / WHOLE_FLOPS)
    back = counted_evidence("lora", 8, count_of(trained=False, adapter=80))
    found = vary(back.calibration, back.subject, strategy=Strategy.DDP, method="full")
    assert found.work.load.trainable == 2 * (1_000 + 8 * 500) + 2 * HEAD
    flops = 4 * ACTIVE + 6 * 160 + 2 * (ACTIVE + 160 - HEAD)
    assert found.costs.compute_ms / back.calibration.costs.compute_ms == pytest.approx(WHOLE_FLOPS / flops)


def test_of_figures_the_shape_tells_another_method() -> None:
    shape = parse_model(TINY)
    subject = Subject(settings=JobSettings(method="lora", lora_rank=8, sequence_length=128), shape=shape)
    found = vary(CALIBRATION, subject, strategy=Strategy.DDP, method="full")
    assert shape is not None
    assert found.work.load.trainable == shape.parameters


def test_another_strategy_of_a_script_is_predicted() -> None:
    found = vary(CALIBRATION, SCRIPT, strategy=Strategy.ZERO2)
    assert [call.collective for call in found.work.calls_of(Strategy.ZERO2, TWO)] == ["all_reduce", "all_gather"]
