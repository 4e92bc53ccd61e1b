from __future__ import annotations

from typing import Any

import pytest

from multinode.job.engines.accelerate import with_accelerate
from multinode.model.engine_calls import step_messages
from multinode.model.training import read_training
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Strategy
from tests.golden import Golden, error_of

from .trainings import FULL, LLAMA_3_8B, LORA, TINY, training_job


def test_an_adapter_under_ddp_travels_as_fp32_and_under_deepspeed_in_the_half_type() -> None:
    ddp = read_training(training_job(LORA | {"bf16": True}), LLAMA_3_8B)
    assert (ddp.strategy, ddp.lora, ddp.name) == (Strategy.DDP, True, "DDP with LoRA")
    assert (ddp.load.trainable, ddp.load.gradient_bytes) == (20_971_520, 4)
    zero = read_training(training_job(LORA | {"bf16": True, "gradient_accumulation_steps": 8}, stage=2), LLAMA_3_8B)
    assert (zero.strategy, zero.load.gradient_bytes) == (Strategy.ZERO2, 2)
    assert zero.name == "ZeRO-2 with LoRA and 8 accumulation steps"


def test_full_fine_tuning_trains_every_parameter() -> None:
    training = read_training(training_job(FULL), TINY)
    assert not training.lora
    assert training.load.trainable == training.load.parameters == 3_691_776
    assert training.small.trainable == 156_160


def test_what_is_not_understood_is_refused(golden: Golden) -> None:
    changes: tuple[dict[str, Any], ...] = (
        *({"quantization_bit": 4}, {"use_dora": True}, {"additional_target": "embed_tokens"}),
        *({"stage": "dpo"}, {"stage": ["sft"]}, {"finetuning_type": "freeze"}, {"lora_target": "qkv"}),
        *({"lora_rank": "8"}, {"gradient_accumulation_steps": "many"}, {"fsdp": True}, {"deepspeed": "elsewhere.json"}),
    )
    wrong_cap = FULL | {"ddp_bucket_cap_mb": "big"}
    experts = TINY | {"model_type": "qwen3_moe"}
    models: dict[str, Any] = {
        "no config.json": None,
        "a mixture of experts": experts,
        "no node could build it": {"model_type": "qwen3_moe", "uncounted": "KeyError: 'qwen3_moe'"},
        "no node was asked": {"model_type": "qwen3_moe"},
    }
    golden.check_errors(
        "refused_training",
        {str(one)[1:-1]: error_of(read_training, training_job(LORA | one), TINY) for one in changes}
        | {case: error_of(read_training, training_job(FULL), model) for case, model in models.items()}
        | {
            "ddp_bucket_cap_mb": error_of(step_messages, training_job(wrong_cap), TINY, Layout(nodes=2)),
        },
    )


@pytest.mark.parametrize(
    ("told", "strategy", "version"),
    [
        ({}, Strategy.FSDP, 1),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, Strategy.SHARD_GRAD_OP, 1),
        ({"fsdp_sharding_strategy": 4}, Strategy.HYBRID_SHARD, 1),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": True}, Strategy.FSDP, 2),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": False}, Strategy.SHARD_GRAD_OP, 2),
    ],
)
def test_fsdp_is_read_from_accelerates_configuration_too(
    told: dict[str, Any], strategy: Strategy, version: int
) -> None:
    job = with_accelerate(training_job(FULL), {"distributed_type": "FSDP", "fsdp_config": told})
    training = read_training(job, TINY)
    assert (training.strategy, training.load.fsdp_version) == (strategy, version)


def test_what_accelerate_does_not_shard_is_as_the_job_has_it() -> None:
    job = training_job(FULL)
    assert with_accelerate(job, {"distributed_type": "MULTI_GPU", "fsdp_config": {}}) == job
    no_shard = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD"}}
    unknown = with_accelerate(job, no_shard)
    error_of(read_training, unknown, TINY)


def part(*elements: int, times: int = 1, layer: bool = True, adapter: int = 0, frozen: bool = False) -> dict[str, Any]:
    """A part of a counted model: matrices, of which an adapter's alone are trained if it has any."""
    tensors = [[each, True, not (adapter or frozen), False] for each in elements]
    return {
        "times": times,
        "layer": layer,
        "tensors": [*tensors, *([[adapter, True, True, True]] if adapter else [])],
    }


def counted(*parts: dict[str, Any], adapted: dict[str, Any] | None = None) -> dict[str, Any]:
    """A config.json with what a node counted: an embedding of 1000, two layers of 300, a head."""
    told = {"hidden": 10, "tied": False, "table": 1000, "parts": parts, "work": {"is": "work", "trained": 2000}}
    return {"model_type": "qwen3_moe", "counted": told | {"adapted": (adapted or {}).get("counted")}}


OUTSIDE = part(1000, layer=False, frozen=True)
ADAPTED = counted(OUTSIDE, part(100, 200, times=2, adapter=40), OUTSIDE)
EXPERTS = counted(part(1000, layer=False), part(100, 200, times=2), part(10, 1000, layer=False), adapted=ADAPTED)


def test_a_model_that_a_node_counted_is_like_one_of_the_table() -> None:
    training = read_training(training_job(FULL), EXPERTS)
    assert (training.load.parameters, training.load.trainable, training.small.trainable) == (2610, 2610, 80)
    assert [layer.base for layer in training.tensors.layers] == [300, 300]
    assert training.tensors.outside.base == 2010
    step = step_messages(training_job(FULL), EXPERTS, Layout(nodes=2)).messages
    assert sum(call.size_bytes * call.times for call in step) == 4 * 2610
    fsdp = step_messages(training_job(FULL | {"fsdp": "full_shard auto_wrap"}), EXPERTS, Layout(nodes=2)).messages
    reduced = [(call.size_bytes, call.times) for call in fsdp if call.collective == "reduce_scatter"]
    assert sorted(reduced) == [(4 * 300, 2), (4 * 2010, 1)]


@pytest.mark.parametrize(
    "changes", [{"quantization_bit": 4}, {"use_dora": True}, {"additional_target": "embed_tokens"}]
)
def test_what_only_a_node_can_count_is_known_where_it_did(changes: dict[str, Any]) -> None:
    training = read_training(training_job(LORA | changes), ADAPTED)
    assert (training.lora, training.load.trainable, training.load.parameters) == (True, 80, 2680)
    assert training.small.trainable == 80


@pytest.mark.parametrize("wrong", [5, {"hidden": -1}, {"hidden": 10, "tied": False, "table": 1000, "parts": [[1]]}])
def test_a_count_that_makes_no_sense_is_none(wrong: object) -> None:
    uncounted = error_of(read_training, training_job(FULL), {"model_type": "qwen3_moe"})
    found = error_of(read_training, training_job(FULL), {"model_type": "qwen3_moe", "counted": wrong})
    assert found.message == uncounted.message
