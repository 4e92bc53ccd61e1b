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
from multinode.job.job import LlamaFactoryJob
from multinode.stats.unknown import Entries

from .inspecting import SCRIPT, but, expect, inspection, only, silent

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


def job(**config: Any) -> LlamaFactoryJob:
    return LlamaFactoryJob(config_path="sft.yaml", text="", config=config)


def offloading(*keys: str, **config: Any) -> LlamaFactoryJob:
    zero = {"stage": 3, **{key: {"device": "cpu"} for key in keys}}
    text = json.dumps({"zero_optimization": zero})
    whole = {"finetuning_type": "full", "model_name_or_path": "models/llama", **config}
    return LlamaFactoryJob(config_path="sft.yaml", text="", config=whole, deepspeed_text=text)


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


def test_a_small_dev_shm_matters_to_data_loaders_and_to_nccl() -> None:
    finding = expect(
        check_shared_memory(small(job(dataloader_num_workers=4))),
        "warning",
        None,
        "has only 64 MiB in /dev/shm, and 4 data loader workers",
        hint="--shm-size",
    )
    assert "on a and b:\nsudo mount -o remount,size=" in str(finding.hint)
    assert "NCCL's 2 workers" in only(check_shared_memory(small(job(), gpus=TWO_GPUS))).message
    assert "if the script has any" in only(check_shared_memory(small(SCRIPT))).message


def test_a_small_dev_shm_that_nobody_uses_does_not_matter() -> None:
    silent(check_shared_memory(small(job(dataloader_num_workers=0))), check_shared_memory(small(None)))


def test_a_full_dev_shm_is_told() -> None:
    known = but(inspection(job=job(dataloader_num_workers=2)), "b", shm_total_gib=16.0, shm_free_gib=0.01)
    finding = only(check_shared_memory(known))
    assert (finding.node, "b has 10 MiB of 16.0 GiB free in /dev/shm" in finding.message) == ("b", True)


@pytest.mark.parametrize(("free", "severity"), [(0.9, "warning"), (0.01, "error")])
def test_a_disk_with_little_room(free: float, severity: str) -> None:
    expect(check_disk(but(inspection(), "b", disk_free_gib=free)), severity, "b", f"{free * 1024:.0f} MiB free")


def test_offload_that_does_not_fit_is_told_with_the_sum() -> None:
    known = but(inspection(job=offloading("offload_optimizer", "offload_param")), "b", model=Entries(LLAMA))
    # 8.03e9 parameters, 18 bytes each, over two nodes.
    expect(
        check_offload(but(known, "b", memory_total_gib=62.0)),
        "warning",
        "b",
        "8.03 billion parameters (by its config.json) on 2 nodes this takes about 67 GiB on each, but b may use 62",
        "optimizer and parameters",
    )
    silent(check_offload(but(known, "b", memory_total_gib=128.0)))
    limited = only(check_offload(but(known, "b", memory_total_gib=128.0, memory_limit_gib=32.0)))
    assert "b may use 32 GiB" in limited.message


def test_the_name_of_a_model_tells_its_size_where_its_config_does_not() -> None:
    named = offloading("offload_optimizer", model_name_or_path="Qwen/Qwen2.5-32B-Instruct")
    finding = only(check_offload(but(inspection(job=named), "b", memory_total_gib=128.0)))
    assert "32 billion parameters (by its name)" in finding.message
    unknown = offloading("offload_optimizer", model_name_or_path="models/mine-4bit")
    silent(check_offload(but(inspection(job=unknown), "b", memory_total_gib=1.0)))


@pytest.mark.parametrize(
    "what",
    [
        offloading("offload_optimizer", finetuning_type="lora"),
        offloading(),
        job(finetuning_type="full"),
        LlamaFactoryJob(config_path="x", text="", config={"finetuning_type": "full"}, deepspeed_text="{"),
        LlamaFactoryJob(config_path="x", text="", config={}, deepspeed_text='{"zero_optimization": [1]}'),
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


def test_a_memory_limit_is_noted() -> None:
    finding = only(check_limits(but(inspection(), "b", memory_total_gib=64.0, memory_limit_gib=16.0)))
    assert (finding.severity, "16 of the machine's 64 GiB" in finding.message) == ("note", True)


@pytest.mark.parametrize(("files", "severity"), [(256, "warning"), (1024, "note"), (4095, "note")])
def test_few_open_files(files: int, severity: str) -> None:
    expect(
        check_limits(but(inspection(), "b", limits={"open_files": files})),
        severity,
        "b",
        f"may open {files} files",
        hint="nofile 65536",
    )


def test_few_processes_matter_to_ordinary_users() -> None:
    few = {"processes": 512}
    finding = only(check_limits(but(inspection(), "b", limits=few, user="eve")))
    assert (finding.severity, "user eve may have 512" in finding.message) == ("warning", True)
    silent(check_limits(but(inspection(), "b", limits=few, user="root")))
