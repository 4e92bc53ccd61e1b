from __future__ import annotations

import json
from typing import Any

import pytest

from multinode.check.machine import (
    check_disk,
    check_limits,
    check_offload,
    check_shared_memory,
)
from multinode.check.rule import Inspection
from multinode.cluster.facts import Gpu
from multinode.job.job import TrainingJob
from multinode.stats.unknown import Entries
from tests.golden import Golden

from .inspecting import SCRIPT, but, check_cases, inspection, silent

TWO_GPUS = tuple(Gpu(index=index, name="NVIDIA GeForce RTX 4090") for index in range(2))
CHECKS = (check_disk, check_limits, check_limits, check_offload, check_shared_memory)
# The sizes of Llama-3-8B, 8.03 billion parameters, and of the tiny model that the lab trains.
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
TINY = {**LLAMA, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "vocab_size": 2048}


def job(**config: Any) -> TrainingJob:
    return TrainingJob(config_path="sft.yaml", text="", config=config)


def offloading(*keys: str, **config: Any) -> TrainingJob:
    zero = {"stage": 3, **{key: {"device": "cpu"} for key in keys}}
    text = json.dumps({"zero_optimization": zero})
    whole = {"finetuning_type": "full", "model_name_or_path": "models/llama", **config}
    return TrainingJob(config_path="sft.yaml", text="", config=whole, deepspeed_text=text)


@pytest.mark.parametrize("check", CHECKS)
def test_nodes_that_have_enough_or_tell_nothing_have_no_finding(check: Any) -> None:
    limits = {"open_files": 65536, "processes": None, "locked_memory_bytes": 8 << 20}
    roomy = but(
        inspection(),
        "b",
        shm_total_gib=31.0,
        shm_free_gib=31.0,
        disk_free_gib=70.0,
        memory_total_gib=64.0,
        limits=limits,
        gpus=TWO_GPUS,
    )
    for known in (inspection(), inspection(facts={}), roomy):
        silent(check(known))


def small(what: Any, **changes: Any) -> Inspection:
    """Two nodes whose /dev/shm is what docker gives."""
    known = inspection(job=what)
    for name in "ab":
        known = but(known, name, shm_total_gib=64 / 1024, shm_free_gib=64 / 1024, **changes)
    return known


OFFLOADED = but(inspection(job=offloading("offload_optimizer", "offload_param")), "b", model=Entries(LLAMA))
FEW_PROCESSES = but(inspection(), "b", limits={"processes": 512}, user="eve")


def on_b(**facts: Any) -> Inspection:
    return but(inspection(), "b", **facts)


def test_what_a_node_has_too_little_of_is_told_with_the_sum(golden: Golden) -> None:
    full = but(inspection(job=job(dataloader_num_workers=2)), "b", shm_total_gib=16.0, shm_free_gib=0.01)
    by_name = inspection(job=offloading("offload_optimizer", model_name_or_path="Qwen/Qwen2.5-32B-Instruct"))
    check_cases(
        golden,
        "resources",
        {
            "/dev/shm for data loaders": check_shared_memory(small(job(dataloader_num_workers=4))),
            "/dev/shm for NCCL": check_shared_memory(small(job(), gpus=TWO_GPUS)),
            "/dev/shm for a script": check_shared_memory(small(SCRIPT)),
            "/dev/shm is full": check_shared_memory(full),
            "little room on the disk": check_disk(on_b(disk_free_gib=0.9)),
            "no room on the disk": check_disk(on_b(disk_free_gib=0.01)),
            # 8.03e9 parameters, 18 bytes each, over two nodes.
            "memory for offload": check_offload(but(OFFLOADED, "b", memory_total_gib=62.0)),
            "memory for offload, with a limit": check_offload(
                but(OFFLOADED, "b", memory_total_gib=128.0, memory_limit_gib=32.0)
            ),
            "memory for offload of a model of this name": check_offload(but(by_name, "b", memory_total_gib=128.0)),
            "a limit of memory": check_limits(on_b(memory_total_gib=64.0, memory_limit_gib=16.0)),
            "256 open files": check_limits(on_b(limits={"open_files": 256})),
            "1024 open files": check_limits(on_b(limits={"open_files": 1024})),
            "4095 open files": check_limits(on_b(limits={"open_files": 4095})),
            "few processes": check_limits(FEW_PROCESSES),
        },
    )


def test_a_small_dev_shm_that_nobody_uses_does_not_matter() -> None:
    silent(check_shared_memory(small(job(dataloader_num_workers=0))), check_shared_memory(small(None)))


def test_offload_that_fits_or_of_a_model_of_unknown_size_is_no_finding() -> None:
    silent(check_offload(but(OFFLOADED, "b", memory_total_gib=128.0)))
    unknown = offloading("offload_optimizer", model_name_or_path="models/mine-4bit")
    silent(check_offload(but(inspection(job=unknown), "b", memory_total_gib=1.0)))


@pytest.mark.parametrize(
    "what",
    [
        offloading("offload_optimizer", finetuning_type="lora"),
        offloading(),
        job(finetuning_type="full"),
        TrainingJob(config_path="x", text="", config={"finetuning_type": "full"}, deepspeed_text="{"),
        TrainingJob(config_path="x", text="", config={}, deepspeed_text='{"zero_optimization": [1]}'),
        SCRIPT,
    ],
)
def test_what_is_not_offloaded_needs_no_memory(what: Any) -> None:
    silent(check_offload(but(inspection(job=what), "b", model=Entries(LLAMA), memory_total_gib=16.0)))


@pytest.mark.parametrize("model", [TINY, {"hidden_size": "wide"}, {**LLAMA, "num_attention_heads": 0}, {}])
def test_a_tiny_model_fits_everywhere_and_a_config_that_says_nothing_is_no_finding(model: Any) -> None:
    known = inspection(job=offloading("offload_optimizer", "offload_param"))
    silent(
        check_offload(but(known, "b", model=Entries(model), memory_total_gib=2.0)),
        check_offload(but(known, "b", memory_total_gib=2.0)),
    )


def test_few_processes_do_not_matter_to_root() -> None:
    silent(check_limits(but(FEW_PROCESSES, "b", user="root")))
