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
from multinode.job.job import JobEnvironment, LlamaFactoryJob
from multinode.job.launch_options import LaunchOptions
from multinode.stats.unknown import Entries, or_empty
from multinode.traffic.pair_speeds import PairSpeed
from tests.model.trainings import LLAMA_3_8B, TINY

from .inspecting import but, expect, inspection, only, silent

LORA = {"stage": "sft", "finetuning_type": "lora", "lora_rank": 8, "lora_target": "all", "bf16": True}
FULL = {"stage": "sft", "finetuning_type": "full"}


def training(
    config: dict[str, Any], *, stage: int | None = None, gbit: float = 1.0, model: dict[str, Any] = LLAMA_3_8B
) -> Inspection:
    """Two nodes with one worker each; a stream between them reaches `gbit`."""
    text = json.dumps({"zero_optimization": {"stage": stage}}) if stage is not None else None
    config = config | ({"deepspeed": "ds.json"} if stage is not None else {})
    job = LlamaFactoryJob(config_path="sft.yaml", text="", config=config, deepspeed_text=text)
    streams = (
        PairSpeed(source="a", target="b", gbit_per_s=5 * gbit),
        PairSpeed(source="b", target="a", gbit_per_s=gbit),
    )
    found = inspection(job=job, connectivity=ConnectivityResult(streams=streams))
    big = {"gpus": (Gpu(index=0, name="NVIDIA A100", memory_total_mib=81920),), "model": Entries(model)}
    return but(found, "ab", **big)


def judge(*args: Any, **named: Any) -> Iterator[CheckFinding]:
    return check_strategy(training(*args, **named))


def test_zero_3_with_lora_on_ethernet_is_told_what_ddp_would_cost() -> None:
    finding = expect(judge(LORA, stage=3), "warning", None, check="strategy")
    # Two gathers of 15 GB and one of the output layer, half of each through the NIC of either node; against 84 MB of
    # fp32 gradients.
    assert finding.message.startswith("ZeRO-3 with LoRA sends 15.6 GB through each node's NIC in every optimizer step")
    assert "which takes 2 min 04 s at 1 Gbit/s (measured between the nodes)" in finding.message
    assert "DDP with LoRA would send 83.9 MB, in 0.7 s" in finding.message
    assert "an estimate" in finding.message
    assert str(finding.hint).startswith("--set deepspeed=null, if a GPU holds the whole model")


def test_the_slowest_stream_counts_and_without_streams_the_slowest_nic() -> None:
    unmeasured = replace(training(LORA, stage=3), connectivity=ConnectivityResult())
    assert "at 1 Gbit/s (what the slowest NIC negotiated)" in only(check_strategy(unmeasured)).message
    silent(check_strategy(replace(unmeasured, endpoints={})))


def test_zero_3_is_left_alone_where_the_link_is_fast_or_the_model_too_large_for_one_gpu() -> None:
    assert only(judge(LORA, stage=3, gbit=100)).severity == "warning"
    assert only(judge(LORA, stage=3, gbit=200)).severity == "note"
    silent(judge(LORA, stage=3, gbit=400))
    small = but(training(LORA, stage=3), "b", gpus=(Gpu(index=0, name="NVIDIA T4", memory_total_mib=15360),))
    finding = only(check_strategy(small))
    assert finding.severity == "note"
    assert "per_device_train_batch_size" in str(finding.hint)


def test_zero_2_grows_with_accumulation_and_ddp_does_not() -> None:
    steps = {"gradient_accumulation_steps": 8}
    finding = only(judge(LORA | steps, stage=2))
    # bf16 gradients of 42 MB are reduced eight times, half of twice that a node, and the weights gathered once.
    assert "ZeRO-2 with LoRA, 8 accumulation steps sends 357 MB" in finding.message
    assert finding.severity == "warning"
    assert str(finding.hint).startswith("--set deepspeed=null; ")
    assert only(judge(LORA | steps)).severity == "note"
    assert "--set gradient_accumulation_steps=16" in str(only(judge(LORA | steps)).hint)


@pytest.mark.parametrize(
    ("changes", "stage", "sent"),
    [
        # Of the tiny model, 14.8 MB, on two nodes: parameters that stay whole are gathered once in a micro-batch.
        ({}, 3, "59.1 MB"),
        ({"fsdp": "full_shard auto_wrap"}, None, "62.3 MB"),
        ({"fsdp": "shard_grad_op auto_wrap"}, None, "14.8 MB"),
        ({"fsdp": "shard_grad_op auto_wrap", "fsdp_config": {"version": 2}}, None, "36.9 MB"),
    ],
)
def test_what_is_sharded_is_counted_as_often_as_it_is_sent(
    changes: dict[str, Any], stage: int | None, sent: str
) -> None:
    accumulated = FULL | {"gradient_accumulation_steps": 4} | changes
    finding = only(judge(accumulated, stage=stage, gbit=0.05, model=TINY))
    assert f"sends {sent} through" in finding.message


def test_a_strategy_that_sends_little_more_than_ddp_is_left_alone() -> None:
    finding = only(judge(LORA | {"bf16": False}, stage=1, gbit=0.5))
    assert "ZeRO-1 with LoRA sends 126 MB" in finding.message
    assert "2.0 s" in finding.message
    assert finding.severity == "note"


def test_full_fine_tuning_on_a_slow_link_is_told_what_an_adapter_would_cost() -> None:
    finding = only(judge(FULL, gbit=0.1, model=TINY))
    assert finding.severity == "warning"
    assert "DDP with full fine-tuning sends 14.8 MB" in finding.message
    assert "1.2 s at 100 Mbit/s" in finding.message
    assert "DDP with LoRA at rank 8 would send 0.625 MB, in under 0.1 s" in finding.message
    assert "--set finetuning_type=lora" in str(finding.hint)
    sharded = only(judge(FULL | {"fsdp": "full_shard auto_wrap"}))
    assert "FSDP with full fine-tuning" in sharded.message
    assert "remove fsdp from the YAML" in str(sharded.hint)


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


@pytest.mark.parametrize(
    ("config", "transformers", "env", "warned"),
    [
        ({"fsdp": "hybrid_shard auto_wrap"}, "5.6.0", {}, True),
        ({"fsdp": "shard_grad_op auto_wrap", "fsdp_config": {"version": 1}}, "5.7.1", {}, True),
        ({"fsdp": "full_shard auto_wrap"}, "5.6.0", {}, False),
        ({"fsdp": "hybrid_shard auto_wrap"}, "4.57.1", {}, False),
        ({"fsdp": "hybrid_shard auto_wrap"}, None, {}, False),
        ({"fsdp": "hybrid_shard auto_wrap"}, "5.6.0", {"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}, False),
        ({"fsdp": "shard_grad_op", "fsdp_config": {"version": 2}}, "5.6.0", {}, False),
        ({}, "5.6.0", {}, False),
    ],
)
def test_a_sharding_strategy_that_does_not_reach_accelerate_is_told(
    config: dict[str, Any], transformers: str | None, env: dict[str, str], *, warned: bool
) -> None:
    packages = {"transformers": transformers} if transformers is not None else {}
    found = but(training(FULL | config), "b", packages=Entries(packages))
    found = replace(found, options=LaunchOptions(environment=JobEnvironment(env=env)))
    findings = list(check_sharding(found))
    assert bool(findings) is warned
    if warned:
        assert "is trained as full_shard" in only(findings).message
        assert only(findings).hint == f"--env FSDP_SHARDING_STRATEGY={config['fsdp'].split()[0].upper()}"


def test_what_accelerates_launcher_starts_has_its_strategy() -> None:
    told = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}}
    found = but(training(FULL), "a", packages=Entries({"transformers": "5.6.0"}))
    job = with_accelerate(found.training, told)
    silent(check_sharding(replace(found, job=job)))
