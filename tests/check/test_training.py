from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from multinode.check.rule import Inspection
from multinode.check.training import (
    check_arguments,
    check_batch_size,
    check_deepspeed,
    check_deepspeed_devices,
    check_deepspeed_on_cpu,
    check_spaces,
    check_timeout,
)
from multinode.cluster.cluster import Node
from multinode.cluster.facts import Gpu
from multinode.job.job import JobEnvironment, LlamaFactoryJob
from multinode.job.launch_options import LaunchOptions
from multinode.stats.unknown import Entries
from tests import make

from .inspecting import PACKAGES, SCRIPT, but, expect, inspection, only, silent

BATCH = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}


def job(deepspeed: dict[str, Any] | None = None, **config: Any) -> Inspection:
    text = None if deepspeed is None else json.dumps(deepspeed)
    return inspection(job=LlamaFactoryJob(config_path="sft.yaml", text="", config=config, deepspeed_text=text))


def test_a_space_in_a_path_that_llama_factory_splits_is_named() -> None:
    spaced = but(job(), "b", home="/home/jane doe", python="/opt/env/bin/python")
    expect(check_spaces(spaced), "error", "b", "'/home/jane doe'", hint="user=")
    assert "python=" in str(only(check_spaces(but(job(), "a", python="/my env/bin/python"))).hint)
    silent(check_spaces(replace(spaced, job=SCRIPT)), check_spaces(job()))


def test_a_key_that_llamafactory_has_no_argument_for_is_named_with_the_nearest() -> None:
    unknown = Entries({"cutof_len": "cutoff_len", "zzz": None, "other": "x"})
    asked = but(job(cutof_len=128, zzz=1), "b", unknown_arguments=unknown)
    near, far = check_arguments(asked)
    assert (near.severity, near.node) == ("error", "b")
    assert near.message == "LLaMA-Factory 0.9.5 has no argument 'cutof_len' (sft.yaml): it refuses to start"
    assert near.hint == "the closest argument is cutoff_len: in sft.yaml"
    assert "'zzz'" in far.message
    assert "remove it" in str(far.hint)
    silent(check_arguments(job(cutof_len=128)), check_arguments(replace(asked, job=SCRIPT)))


def test_a_key_of_set_is_mended_there() -> None:
    asked = but(job(cutof_len=128), "b", unknown_arguments=Entries({"cutof_len": "cutoff_len"}))
    assert isinstance(asked.job, LlamaFactoryJob)
    by_set = replace(asked.job, overridden=("cutof_len",))
    finding = only(check_arguments(replace(asked, job=by_set)))
    assert "(--set)" in finding.message
    assert finding.hint == "the closest argument is --set cutoff_len=..."


def test_a_timeout_of_years_is_told_in_years() -> None:
    finding = only(check_timeout(job(ddp_timeout=180000000)))
    assert finding.severity == "note"
    assert "180000000 s, 5.7 years" in finding.message
    assert finding.hint == "--set ddp_timeout=1800"


@pytest.mark.parametrize("timeout_s", [180, 1800, 86400, None, True, "180000000 "])
def test_any_other_timeout_is_well(timeout_s: Any) -> None:
    assert list(check_timeout(job(ddp_timeout=timeout_s))) == list(check_timeout(job())) == []


@pytest.mark.parametrize(
    ("deepspeed", "said", "auto"),
    [
        (
            {"train_micro_batch_size_per_gpu": 4},
            "is 4 in the DeepSpeed JSON, but per_device_train_batch_size is 2",
            '"train_micro_batch_size_per_gpu": "auto"',
        ),
        (
            {"gradient_accumulation_steps": 1},
            "is 1 in the DeepSpeed JSON, but gradient_accumulation_steps is 4",
            '"gradient_accumulation_steps": "auto"',
        ),
        (
            {"bf16": {"enabled": True}},
            "is true in the DeepSpeed JSON, but bf16 is not in the YAML, which means false",
            '"bf16": {"enabled": "auto"}',
        ),
        (
            {"gradient_clipping": 0.5},
            "is 0.5 in the DeepSpeed JSON, but max_grad_norm is not in the YAML, which means 1.0",
            '"gradient_clipping": "auto"',
        ),
    ],
)
def test_what_contradicts_the_yaml_is_told_with_both_and_auto(deepspeed: dict[str, Any], said: str, auto: str) -> None:
    finding = only(check_deepspeed(job(deepspeed, **BATCH)))
    assert finding.severity == "error"
    assert said in finding.message
    assert auto in str(finding.hint)


@pytest.mark.parametrize(
    ("deepspeed", "config"),
    [
        ({"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}, BATCH),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, BATCH),
        ({"train_micro_batch_size_per_gpu": 8}, {}),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": False}}, {"bf16": True}),
        ({"bf16": {"enabled": True}}, {"bf16_full_eval": True}),
        ({"bf16": {"enabled": True}}, {"bf16": "yes"}),
        ({"train_micro_batch_size_per_gpu": 4}, {"per_device_train_batch_size": "two"}),
    ],
)
def test_what_agrees_or_cannot_be_told_is_well(deepspeed: dict[str, Any], config: dict[str, Any]) -> None:
    silent(check_deepspeed(job(deepspeed, **config)))


def test_a_batch_size_for_another_number_of_workers_is_told_with_the_sum() -> None:
    fixed = job({"train_batch_size": 8}, **BATCH)
    finding = only(check_batch_size(fixed))
    assert finding.severity == "error"
    assert "2 samples x 4 accumulation steps x 2 workers = 16" in finding.message
    assert '"train_batch_size": "auto"' in str(finding.hint)
    silent(
        check_batch_size(job({"train_batch_size": 16}, **BATCH)),
        check_batch_size(job({"train_batch_size": "auto"}, **BATCH)),
    )
    unequal = make.cluster(Node(name="a", slots=1), Node(name="b", slots=2))
    assert "x 3 workers = 24" in only(check_batch_size(replace(fixed, cluster=unequal))).message


def test_zero_3_without_a_gpu_needs_a_json_without_the_batch_size() -> None:
    processors = {"packages": Entries(PACKAGES | {"torch": "2.13.0+cpu"})}
    three = {"train_batch_size": "auto", "zero_optimization": {"stage": 3}}
    expect(check_deepspeed_on_cpu(but(job(three), "b", **processors)), "error", "b", hint="remove train_batch_size")
    silent(check_deepspeed_on_cpu(job(three)))
    for fine in ({"zero_optimization": {"stage": 3}}, three | {"zero_optimization": {"stage": 2}}):
        silent(check_deepspeed_on_cpu(but(job(fine), "b", **processors)))


@pytest.mark.parametrize("text", ["[]", '{"zero_optimization": 3, "bf16": 1, "train_batch_size": [2]}'])
def test_a_json_of_another_kind_breaks_nothing(text: str) -> None:
    strange = inspection(job=LlamaFactoryJob(config_path="sft.yaml", text="", config=BATCH, deepspeed_text=text))
    for check in (check_deepspeed, check_batch_size, check_deepspeed_on_cpu):
        silent(check(strange))


@pytest.mark.parametrize(
    ("session", "given", "shown", "way"),
    [
        # Slurm names MIG devices so; none of nvidia-smi's GPUs stands for one.
        ("MIG-1c2,MIG-1c3", {}, "will be MIG-1c2,MIG-1c3", "uninstall nvidia-ml-py"),
        (None, {"CUDA_VISIBLE_DEVICES": "GPU-00aa"}, "will be GPU-00aa", "write the GPU numbers"),
        (None, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, "will be GPU-00aa", "leave CUDA_DEVICE_ORDER to multinode"),
        # These become numbers, are numbers, or are left to DeepSpeed.
        ("GPU-00aa", {}, None, ""),
        ("MIG-1c2", {"CUDA_VISIBLE_DEVICES": " 0, 1"}, None, ""),
        (None, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, None, ""),
        (None, {}, None, ""),
    ],
)
def test_devices_that_deepspeed_cannot_read(
    session: str | None, given: dict[str, str], shown: str | None, way: str
) -> None:
    found = {
        "packages": Entries(PACKAGES | {"deepspeed": "0.19.8"}),
        "gpus": (Gpu(index=0, name="NVIDIA H100", uuid="GPU-00aa"),),
        "env": {"CUDA_VISIBLE_DEVICES": session} if session else {},
    }
    zero2 = replace(
        job({"zero_optimization": {"stage": 2}}), options=LaunchOptions(environment=JobEnvironment(env=given))
    )
    asked = but(zero2, "b", **found)
    if shown is None:
        silent(check_deepspeed_devices(asked))
    else:
        expect(check_deepspeed_devices(asked), "warning", "b", shown, hint=way)
    silent(
        check_deepspeed_devices(replace(asked, job=job({"zero_optimization": {"stage": 3}}).job)),
        check_deepspeed_devices(but(asked, "b", packages=Entries(PACKAGES | {"deepspeed": "0.18.4"}))),
        check_deepspeed_devices(but(asked, "b", accelerator="rocm")),
    )
