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
from multinode.job.job import JobEnvironment, TrainingJob
from multinode.job.launch_options import LaunchOptions
from multinode.stats.unknown import Entries
from tests import make
from tests.golden import Golden

from .inspecting import PACKAGES, SCRIPT, but, check_cases, inspection, silent

BATCH = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}


def job(deepspeed: dict[str, Any] | None = None, **config: Any) -> Inspection:
    text = None if deepspeed is None else json.dumps(deepspeed)
    return inspection(job=TrainingJob(config_path="sft.yaml", text="", config=config, deepspeed_text=text))


SPACED = but(job(), "b", home="/home/jane doe", python="/opt/env/bin/python")
UNKNOWN_KEYS = but(
    job(cutof_len=128, zzz=1), "b", unknown_arguments=Entries({"cutof_len": "cutoff_len", "zzz": None, "other": "x"})
)


def as_training(asked: Inspection) -> TrainingJob:
    assert isinstance(asked.job, TrainingJob)
    return asked.job


def by_set() -> Inspection:
    asked = but(job(cutof_len=128), "b", unknown_arguments=Entries({"cutof_len": "cutoff_len"}))
    return replace(asked, job=replace(as_training(asked), overridden=("cutof_len",)))


def of_axolotl(deepspeed: dict[str, Any]) -> Inspection:
    asked = job(deepspeed)
    config = {"base_model": "m", "micro_batch_size": 2}
    return replace(asked, job=replace(as_training(asked), framework="axolotl", config=config))


TOTAL = job({"train_batch_size": 8}, **BATCH)
ON_CPU = {"packages": Entries(PACKAGES | {"torch": "2.13.0+cpu"})}
ZERO_3 = {"train_batch_size": "auto", "zero_optimization": {"stage": 3}}


def on_devices(session: str | None, stage: int = 2, **given: str) -> Inspection:
    """One H100 on b with a DeepSpeed that reads CUDA_VISIBLE_DEVICES; variables of the session and of --env."""
    asked = replace(
        job({"zero_optimization": {"stage": stage}}), options=LaunchOptions(environment=JobEnvironment(env=given))
    )
    return but(
        asked,
        "b",
        packages=Entries(PACKAGES | {"deepspeed": "0.19.8"}),
        gpus=(Gpu(index=0, name="NVIDIA H100", uuid="GPU-00aa"),),
        env={"CUDA_VISIBLE_DEVICES": session} if session else {},
    )


# Slurm names MIG devices so; none of nvidia-smi's GPUs stands for one.
MIG = on_devices("MIG-1c2,MIG-1c3")


def test_what_would_stop_or_spoil_a_training_is_found(golden: Golden) -> None:
    unequal = make.cluster(Node(name="a", slots=1), Node(name="b", slots=2))
    check_cases(
        golden,
        "training",
        {
            "a space in the home directory": check_spaces(SPACED),
            "a space in the path of Python": check_spaces(but(job(), "a", python="/my env/bin/python")),
            "keys that LLaMA-Factory does not know": check_arguments(UNKNOWN_KEYS),
            "a key of --set that it does not know": check_arguments(by_set()),
            "a timeout of years": check_timeout(job(ddp_timeout=180000000)),
            "a different batch per GPU": check_deepspeed(job({"train_micro_batch_size_per_gpu": 4}, **BATCH)),
            "other accumulation steps": check_deepspeed(job({"gradient_accumulation_steps": 1}, **BATCH)),
            "another precision": check_deepspeed(job({"bf16": {"enabled": True}}, **BATCH)),
            "a different batch per GPU in the keys of axolotl": check_deepspeed(
                of_axolotl({"train_micro_batch_size_per_gpu": 4})
            ),
            "another clipping": check_deepspeed(job({"gradient_clipping": 0.5}, **BATCH)),
            "a different global batch": check_batch_size(TOTAL),
            "a different global batch, with unequal nodes": check_batch_size(replace(TOTAL, cluster=unequal)),
            "ZeRO-3 on CPUs": check_deepspeed_on_cpu(but(job(ZERO_3), "b", **ON_CPU)),
            "ZeRO-3 of axolotl on CPUs": check_deepspeed_on_cpu(but(of_axolotl(ZERO_3), "b", **ON_CPU)),
            "devices by MIG ids": check_deepspeed_devices(MIG),
            "devices by ids in --env": check_deepspeed_devices(on_devices(None, CUDA_VISIBLE_DEVICES="GPU-00aa")),
            "devices in another order": check_deepspeed_devices(on_devices(None, CUDA_DEVICE_ORDER="FASTEST_FIRST")),
        },
    )


def test_what_only_llamafactory_reads_is_well_in_a_script() -> None:
    silent(check_spaces(replace(SPACED, job=SCRIPT)), check_spaces(job()))
    silent(check_spaces(replace(SPACED, job=replace(as_training(SPACED), framework="trl"))))
    silent(check_arguments(job(cutof_len=128)), check_arguments(replace(UNKNOWN_KEYS, job=SCRIPT)))


@pytest.mark.parametrize("timeout_s", [180, 1800, 86400, None, True, "180000000 "])
def test_any_other_timeout_is_well(timeout_s: Any) -> None:
    assert list(check_timeout(job(ddp_timeout=timeout_s))) == list(check_timeout(job())) == []


@pytest.mark.parametrize(
    ("deepspeed", "config"),
    [
        ({"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}, BATCH),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, BATCH),
        ({"train_micro_batch_size_per_gpu": 8}, {}),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": False}}, {"bf16": True}),
        ({"bf16": {"enabled": True}}, {"bf16": 1}),
        ({"bf16": {"enabled": True}}, {"bf16_full_eval": True}),
        ({"bf16": {"enabled": True}}, {"bf16": "yes"}),
        ({"train_micro_batch_size_per_gpu": 4}, {"per_device_train_batch_size": "two"}),
    ],
)
def test_what_agrees_or_cannot_be_told_is_well(deepspeed: dict[str, Any], config: dict[str, Any]) -> None:
    silent(check_deepspeed(job(deepspeed, **config)))


def test_a_batch_size_that_agrees_is_well() -> None:
    silent(
        check_batch_size(job({"train_batch_size": 16}, **BATCH)),
        check_batch_size(job({"train_batch_size": "auto"}, **BATCH)),
    )


def test_zero_3_needs_no_gpu_where_the_json_does_not_have_the_batch_size() -> None:
    silent(check_deepspeed_on_cpu(job(ZERO_3)))
    for fine in ({"zero_optimization": {"stage": 3}}, ZERO_3 | {"zero_optimization": {"stage": 2}}):
        silent(check_deepspeed_on_cpu(but(job(fine), "b", **ON_CPU)))


@pytest.mark.parametrize("text", ["[]", '{"zero_optimization": 3, "bf16": 1, "train_batch_size": [2]}'])
def test_a_json_of_another_kind_breaks_nothing(text: str) -> None:
    strange = inspection(job=TrainingJob(config_path="sft.yaml", text="", config=BATCH, deepspeed_text=text))
    for check in (check_deepspeed, check_batch_size, check_deepspeed_on_cpu):
        silent(check(strange))


@pytest.mark.parametrize(
    "known",
    [
        # These become numbers, are numbers, or are left to DeepSpeed.
        on_devices("GPU-00aa"),
        on_devices("MIG-1c2", CUDA_VISIBLE_DEVICES=" 0, 1"),
        on_devices(None, CUDA_DEVICE_ORDER="PCI_BUS_ID"),
        on_devices(None),
        on_devices("MIG-1c2", stage=3),
        but(MIG, "b", packages=Entries(PACKAGES | {"deepspeed": "0.18.4"})),
        but(MIG, "b", accelerator="rocm"),
    ],
)
def test_devices_that_deepspeed_can_read_or_does_not(known: Inspection) -> None:
    silent(check_deepspeed_devices(known))
