"""Averaging between nodes: what the options ask for, what is refused, and what the workers are told."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from multinode.cluster.cluster import Node
from multinode.errors import UsageError
from multinode.job.engines.engine import Engine
from multinode.job.job import Job, LlamaFactoryJob, ScriptJob
from multinode.job.launch_options import LaunchOptions
from multinode.job.planning import plan_launch
from multinode.levers.averaging import Averaging, read_averaging
from multinode.levers.levers import NONE, Levers
from multinode.records.plan import LaunchPlan, Observation
from tests import make
from tests.levers.compressed import compressed

VARIABLE = "MULTINODE_SYNC"
CLUSTER = make.cluster(Node(name="a", addr="192.0.2.1", slots=2), Node(name="b", addr="192.0.2.2", slots=2))
SCRIPT = ScriptJob(argv=("train.py",))
SFT = LlamaFactoryJob(config_path="sft.yaml", text="", config={"model_name_or_path": "m", "stage": "sft"})
EVERY = Averaging(every=16)


def plan(job: Job, nodes: int = 2, **options: Any) -> LaunchPlan:
    return plan_launch(CLUSTER.first(nodes), job, {}, "r", LaunchOptions(**options))


def sft(**config: Any) -> LlamaFactoryJob:
    return msgspec.structs.replace(SFT, config=SFT.config | config)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((None, None, None), None),
        ((16, None, None), Averaging(every=16)),
        ((1, None, "fp16"), Averaging(every=1, dtype="fp16")),
        ((None, "64", None), Averaging(every=64, outer_lr=0.7, momentum=0.9)),
        ((None, "64:1", None), Averaging(every=64, outer_lr=1.0, momentum=0.9)),
        ((None, "64:0.5:0", "bf16"), Averaging(every=64, outer_lr=0.5, momentum=0.0, dtype="bf16")),
    ],
)
def test_options_are_read(options: tuple[int | None, str | None, str | None], expected: Averaging | None) -> None:
    found = read_averaging(*options)
    assert found == expected
    if found is not None:
        name, value = found.option.split()
        every, diloco = (int(value), None) if name == "--sync-every" else (None, value)
        assert read_averaging(every, diloco, found.dtype) == found


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((16, "64", None), "mutually exclusive"),
        ((None, None, "fp16"), "--sync-dtype fp16 applies to averages"),
        ((16, None, "fp8"), "--sync-dtype fp8: one of fp16, bf16"),
        *(
            ((None, text, None), "expected H, H:LR or H:LR:MOMENTUM")
            for text in ("", "x", "0", "-1", "64:", "64:0", "64:nan", "64:inf", "64:0.7:1", "64:0.7:-1", "64:1:0:1")
        ),
    ],
)
def test_what_contradicts_itself_or_is_wrong_is_refused(
    options: tuple[int | None, str | None, str | None], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        read_averaging(*options)


def test_workers_of_several_nodes_are_told_and_those_of_one_are_not() -> None:
    averaging = Averaging(every=64, dtype="fp16", outer_lr=0.7, momentum=0.9)
    planned = plan(SCRIPT, levers=Levers(averaging=averaging))
    assert planned.levers.averaging == averaging
    told = [json.loads(node.command.env[VARIABLE]) for node in planned.nodes]
    fields = {"every": 64, "dtype": "fp16", "outer_lr": 0.7, "momentum": 0.9, "workers": [2, 2]}
    assert told == [fields | {"option": "--diloco 64:0.7:0.9"}] * 2
    alone = plan(SCRIPT, nodes=1, levers=Levers(averaging=averaging))
    assert alone.levers.averaging is None
    assert VARIABLE not in alone.nodes[0].command.env
    assert alone.notes[-1].startswith("--diloco 64:0.7:0.9 has no effect on one node")
    assert VARIABLE not in plan(SCRIPT).nodes[0].command.env


@pytest.mark.parametrize(
    ("job", "options", "words"),
    [
        (SCRIPT, {"observation": Observation(profile=False)}, "--no-profile"),
        (SCRIPT, {"levers": compressed("fp16")}, "--grad-compress fp16 would compress them"),
        (sft(deepspeed="configs/ds_z2.json"), {}, "this job uses DeepSpeed"),
        (sft(fsdp="full_shard auto_wrap"), {}, "this job uses FSDP"),
        (
            SCRIPT,
            {"engine": Engine(name="accelerate", accelerate={"distributed_type": "FSDP"})},
            "accelerate with FSDP",
        ),
        (SCRIPT, {"engine": Engine(name="accelerate", accelerate={"mixed_precision": "fp16"})}, "gradients overflow"),
        (sft(fp16=True), {}, "gradients overflow"),
        (sft(optim="adalomo"), {}, "adalomo updates parameters individually"),
        (sft(optim="galore_adamw_layerwise"), {}, "galore_adamw_layerwise updates"),
        (sft(use_galore=True, galore_layerwise=True), {}, "galore_layerwise updates"),
        (sft(use_badam=True), {}, "use_badam updates"),
    ],
)
def test_jobs_that_cannot_be_averaged_are_refused_by_their_files(job: Job, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        plan(job, **{**options, "levers": Levers(averaging=EVERY).joined(options.get("levers", NONE))})
    assert str(refused.value).startswith("--sync-every 16")


def test_a_llamafactory_job_under_ddp_is_not() -> None:
    for job in (SFT, sft(bf16=True, optim="adamw_torch", finetuning_type="lora")):
        assert plan(job, levers=Levers(averaging=EVERY)).levers == Levers(averaging=EVERY)
