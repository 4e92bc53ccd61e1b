from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from multinode.core.job.deepspeed import DeepSpeedConfig, parse_deepspeed

SAMPLE = Path(__file__).parents[2] / "configs" / "deepspeed" / "ds_z2_config.json"


def parse(**data: Any) -> DeepSpeedConfig:
    config = parse_deepspeed(json.dumps(data))
    assert config is not None
    return config


def test_our_sample_leaves_everything_to_the_trainer() -> None:
    config = parse_deepspeed(SAMPLE.read_text())
    assert config == DeepSpeedConfig(stage=2, names_train_batch_size=True)


def test_what_is_fixed_is_told_by_its_place() -> None:
    config = parse(
        train_micro_batch_size_per_gpu=4,
        gradient_accumulation_steps="auto",
        bf16={"enabled": True},
        fp16={"enabled": "auto"},
        optimizer={"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": "auto"}},
    )
    assert config.fixed == {"train_micro_batch_size_per_gpu": 4, "bf16.enabled": True, "optimizer.params.lr": 1e-4}
    assert not config.names_train_batch_size


def test_stage_three_overlaps_unless_it_is_told_not_to() -> None:
    assert parse(zero_optimization={"stage": 3}).overlap_comm
    assert not parse(zero_optimization={"stage": 3, "overlap_comm": False}).overlap_comm
    assert not parse(zero_optimization={"stage": 2}).overlap_comm
    assert parse(zero_optimization={"stage": 2, "overlap_comm": True}).overlap_comm


def test_offload_buckets_and_the_wire_format() -> None:
    zero = {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "none"},
        "reduce_bucket_size": "auto",
        "allgather_bucket_size": 5e7,
    }
    config = parse(zero_optimization=zero, communication_data_type="fp32")
    assert (config.offload_optimizer, config.offload_parameters) == ("cpu", None)
    assert (config.reduce_bucket_elements, config.allgather_bucket_elements) == (None, 50_000_000)
    assert config.communication_bytes == 4


def test_what_stage_three_keeps_whole_and_gathers_at_once() -> None:
    config = parse(
        zero_optimization={
            "stage": 3,
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 3e7,
        }
    )
    assert (config.prefetch_elements, config.persistent_elements, config.live_elements) == (None, 0, 30_000_000)
    default = parse(zero_optimization={"stage": 3, "stage3_max_live_parameters": "auto"})
    assert (default.prefetch_elements, default.persistent_elements) == (50_000_000, 100_000)
    assert default.live_elements == 1_000_000_000


def test_a_bucket_is_reduced_to_all_workers_unless_it_says_otherwise() -> None:
    assert parse(zero_optimization={"stage": 2}).multi_rank_allreduce
    assert not parse(zero_optimization={"stage": 2, "use_multi_rank_bucket_allreduce": False}).multi_rank_allreduce


@pytest.mark.parametrize("text", ["", "[]", "3", "{", '{"a":' * 100_000])
def test_what_is_no_configuration_is_none(text: str) -> None:
    assert parse_deepspeed(text) is None


@pytest.mark.parametrize(
    "data",
    [
        {"zero_optimization": {"stage": "3"}},
        {"zero_optimization": {"stage": 7}},
        {"zero_optimization": [3]},
        {"bf16": "yes", "optimizer": {"params": []}, "communication_data_type": ["fp16"]},
    ],
)
def test_a_value_of_the_wrong_kind_counts_as_absent(data: dict[str, Any]) -> None:
    assert parse(**data) == DeepSpeedConfig()
