from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from multinode.check.connectivity import ConnectivityResult
from multinode.check.rule import CheckFinding, Inspection
from multinode.check.training import check_sharding, check_strategy
from multinode.cluster.facts import Gpu
from multinode.job.engines.accelerate import with_accelerate
from multinode.job.job import JobEnvironment, TrainingJob
from multinode.job.launch_options import LaunchOptions
from multinode.stats.unknown import Entries, or_empty
from multinode.traffic.pair_speeds import PairSpeed
from tests.golden import Golden
from tests.model.trainings import LLAMA_3_8B, TINY

from .inspecting import but, check_cases, inspection, silent

LORA = {"stage": "sft", "finetuning_type": "lora", "lora_rank": 8, "lora_target": "all", "bf16": True}
FULL = {"stage": "sft", "finetuning_type": "full"}


def training(
    config: dict[str, Any], *, stage: int | None = None, gbit: float = 1.0, model: dict[str, Any] = LLAMA_3_8B
) -> Inspection:
    """Two nodes with one worker each; a stream between them reaches `gbit`."""
    text = json.dumps({"zero_optimization": {"stage": stage}}) if stage is not None else None
    config = config | ({"deepspeed": "ds.json"} if stage is not None else {})
    job = TrainingJob(config_path="sft.yaml", text="", config=config, deepspeed_text=text)
    streams = (
        PairSpeed(source="a", target="b", gbit_per_s=5 * gbit),
        PairSpeed(source="b", target="a", gbit_per_s=gbit),
    )
    found = inspection(job=job, connectivity=ConnectivityResult(streams=streams))
    big = {"gpus": (Gpu(index=0, name="NVIDIA A100", memory_total_mib=81920),), "model": Entries(model)}
    return but(found, "ab", **big)


def judge(*args: Any, **named: Any) -> Iterator[CheckFinding]:
    return check_strategy(training(*args, **named))


STEPS = {"gradient_accumulation_steps": 8}
ZERO_3 = training(LORA, stage=3)
UNMEASURED = replace(ZERO_3, connectivity=ConnectivityResult())
CASES = {
    # Two gathers of 15 GB and one of the output layer, half of each through the NIC of either node; against 84 MB of
    # fp32 gradients.
    "ZeRO-3 with LoRA": check_strategy(ZERO_3),
    "ZeRO-3 with LoRA, no stream was measured": check_strategy(UNMEASURED),
    "ZeRO-3 with LoRA at 100 Gbit/s": judge(LORA, stage=3, gbit=100),
    "ZeRO-3 with LoRA at 200 Gbit/s": judge(LORA, stage=3, gbit=200),
    "ZeRO-3 with LoRA on small GPUs": check_strategy(
        but(ZERO_3, "b", gpus=(Gpu(index=0, name="NVIDIA T4", memory_total_mib=15360),))
    ),
    # bf16 gradients of 42 MB are reduced eight times, half of twice that a node, and the weights gathered once.
    "ZeRO-2 with LoRA, 8 accumulation steps": judge(LORA | STEPS, stage=2),
    "DDP with LoRA, 8 accumulation steps": judge(LORA | STEPS),
    "ZeRO-1 with LoRA": judge(LORA | {"bf16": False}, stage=1, gbit=0.5),
    "DDP with full fine-tuning": judge(FULL, gbit=0.1, model=TINY),
    "FSDP with full fine-tuning": judge(FULL | {"fsdp": "full_shard auto_wrap"}),
}


def test_a_strategy_is_a_warning_where_another_would_send_far_less_over_a_slow_link(golden: Golden) -> None:
    check_cases(golden, "strategy", CASES)


def test_what_to_change_is_in_the_keys_of_the_framework(golden: Golden) -> None:
    frameworks = {
        "trl": {"model_name_or_path": "m", "use_peft": False, "max_length": 512},
        "swift": {"model": "m", "tuner_type": "full", "gradient_accumulation_steps": 1},
        "axolotl": {"base_model": "m", "datasets": [], "bf16": True},
    }
    asked = {
        name: (replace(training(FULL).job, framework=name, config=config))  # type: ignore[type-var]
        for name, config in frameworks.items()
    }
    check_cases(
        golden, "strategy_of", {name: check_strategy(replace(training(FULL), job=job)) for name, job in asked.items()}
    )


def test_without_a_rate_or_on_a_fast_link_nothing_is_said() -> None:
    silent(judge(LORA, stage=3, gbit=400), check_strategy(replace(UNMEASURED, endpoints={})))


def test_what_is_sharded_is_counted_as_often_as_it_is_sent(golden: Golden) -> None:
    # Of the tiny model, 14.8 MB, on two nodes: parameters that stay whole are gathered once in a micro-batch.
    accumulated = FULL | {"gradient_accumulation_steps": 4}
    fsdp_2 = {"fsdp": "shard_grad_op auto_wrap", "fsdp_config": {"version": 2}}
    cases: dict[str, tuple[dict[str, Any], int | None]] = {
        "ZeRO-3, 59.1 MB": ({}, 3),
        "full_shard, 62.3 MB": ({"fsdp": "full_shard auto_wrap"}, None),
        "shard_grad_op, 14.8 MB": ({"fsdp": "shard_grad_op auto_wrap"}, None),
        "shard_grad_op of FSDP2, 36.9 MB": (fsdp_2, None),
    }
    check_cases(
        golden,
        "strategy_bytes",
        {
            name: judge(accumulated | changes, stage=stage, gbit=0.05, model=TINY)
            for name, (changes, stage) in cases.items()
        },
    )


def test_the_sample_on_the_labs_network_is_well() -> None:
    lab = training(FULL, gbit=0.94, model=TINY)
    two_workers = [replace(node, slots=2) for node in lab.cluster.nodes]
    cluster = replace(lab.cluster, nodes=tuple(two_workers))
    silent(check_strategy(replace(lab, cluster=cluster)))


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_bit": 4},
        {"stage": "dpo"},
        {"finetuning_type": "freeze"},
        {"lora_target": "qkv"},
        {"lora_rank": "8"},
        {"additional_target": "embed_tokens"},
        {"gradient_accumulation_steps": "many"},
        {"fsdp": True},
    ],
)
def test_of_what_is_not_known_nothing_is_said(changes: dict[str, Any]) -> None:
    silent(judge(LORA | changes, gbit=0.01))


def test_a_node_that_tells_nonsense_breaks_nothing() -> None:
    for model in ({"model_type": "mystery"}, LLAMA_3_8B | {"hidden_size": -1}, {}):
        silent(judge(FULL, model=model))
    for gbit in (0.0, -1.0, 1e-300, float("nan"), float("inf")):
        assert all(finding.message for finding in judge(FULL, gbit=gbit))
    for changes in ({"speed_gbit_per_s": 1e-300}, {"mtu": -38}, {"mtu": 0}):
        lying = replace(training(FULL), connectivity=ConnectivityResult())
        link = replace(or_empty(lying.facts["b"].interfaces)[0], **changes)
        assert all(finding.message for finding in check_strategy(but(lying, "b", interfaces=(link,))))


def test_one_node_has_nobody_to_send_to() -> None:
    alone = training(FULL)
    cluster = alone.cluster.first(1)
    silent(check_strategy(replace(alone, cluster=cluster)))


def sharding(
    config: dict[str, Any], transformers: str | None = "5.6.0", env: dict[str, str] | None = None
) -> Iterator[CheckFinding]:
    packages = {"transformers": transformers} if transformers is not None else {}
    found = but(training(FULL | config), "b", packages=Entries(packages))
    return check_sharding(replace(found, options=LaunchOptions(environment=JobEnvironment(env=env or {}))))


HYBRID = {"fsdp": "hybrid_shard auto_wrap"}


def test_a_sharding_strategy_that_does_not_reach_accelerate_is_told(golden: Golden) -> None:
    grad_op = {"fsdp": "shard_grad_op auto_wrap", "fsdp_config": {"version": 1}}
    check_cases(
        golden,
        "sharding",
        {"hybrid_shard": sharding(HYBRID), "shard_grad_op of FSDP1": sharding(grad_op, "5.7.1")},
    )


def test_a_sharding_strategy_that_reaches_accelerate_is_well() -> None:
    silent(
        sharding({"fsdp": "full_shard auto_wrap"}),
        sharding(HYBRID, "4.57.1"),
        sharding(HYBRID, None),
        sharding(HYBRID, env={"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}),
        sharding({"fsdp": "shard_grad_op", "fsdp_config": {"version": 2}}),
        sharding({}),
    )


def test_what_accelerates_launcher_starts_has_its_strategy() -> None:
    told = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}}
    found = but(training(FULL), "a", packages=Entries({"transformers": "5.6.0"}))
    job = with_accelerate(found.training, told)
    silent(check_sharding(replace(found, job=job)))
