from __future__ import annotations

from typing import Any

import msgspec
import pytest

from multinode.core.cluster.cluster import Cluster, Node
from multinode.core.job.job import Job, LlamaFactoryJob, ScriptJob
from multinode.core.measure.benchmark import CollectiveTest, Message
from multinode.core.run.engines import ENGINES, Engine
from multinode.core.run.plan import LaunchPlan
from multinode.core.run.planning import LaunchOptions, plan_launch
from multinode.errors import UsageError

VARIABLE = "MULTINODE_GRAD_COMPRESS"
CLUSTER = Cluster(nodes=(Node(name="a", addr="10.0.0.1"), Node(name="b", addr="10.0.0.2")), source="h")
SCRIPT = ScriptJob(argv=("train.py",))
SFT = LlamaFactoryJob(config_path="sft.yaml", text="", config={"model_name_or_path": "m", "stage": "sft"})


def plan(job: Job | CollectiveTest, **options: Any) -> LaunchPlan:
    return plan_launch(CLUSTER, job, {}, "r", LaunchOptions(**options))


def sft(**config: Any) -> LlamaFactoryJob:
    return msgspec.structs.replace(SFT, config=SFT.config | config)


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
@pytest.mark.parametrize("name", sorted(set(ENGINES) - {"llamafactory"}))
def test_the_workers_of_every_node_are_told_whoever_starts_them(name: str, kind: str) -> None:
    planned = plan(SCRIPT, engine=Engine(name=name), grad_compress=kind)
    assert planned.grad_compress == kind
    assert [node.command.env[VARIABLE] for node in planned.nodes] == [kind, kind]


def test_a_llamafactory_training_under_ddp_is_told_too() -> None:
    for job in (SFT, sft(deepspeed=None, fsdp=None)):
        assert [node.command.env[VARIABLE] for node in plan(job, grad_compress="fp16").nodes] == ["fp16", "fp16"]


def test_nobody_is_told_what_was_not_asked_for() -> None:
    test = CollectiveTest(messages=(Message(size_bytes=8),), backend="gloo")
    for planned in (plan(SCRIPT), plan(SFT), plan(test, grad_compress="fp16")):
        assert planned.grad_compress is None
        assert [VARIABLE in node.command.env for node in planned.nodes] == [False, False]


@pytest.mark.parametrize(
    ("job", "options", "words"),
    [
        (SCRIPT, {"grad_compress": "powersgd"}, "aborts on gloo"),
        (SCRIPT, {"grad_compress": "PowerSGD"}, "aborts on gloo"),
        (SCRIPT, {"grad_compress": "int8"}, "there is no such compression"),
        (SCRIPT, {"grad_compress": ""}, "there is no such compression"),
        (SCRIPT, {"grad_compress": "fp16", "profile": False}, "--no-profile"),
        (sft(deepspeed="configs/ds_z2.json"), {"grad_compress": "fp16"}, "DeepSpeed sends those of this job"),
        (sft(deepspeed={"zero_optimization": {"stage": 2}}), {"grad_compress": "bf16"}, "DeepSpeed sends"),
        (sft(fsdp="full_shard auto_wrap"), {"grad_compress": "fp16"}, "FSDP sends"),
        (
            SCRIPT,
            {"grad_compress": "fp16", "engine": Engine(name="accelerate", accelerate={"distributed_type": "FSDP"})},
            "accelerate with FSDP sends",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_a_way_out(job: Job, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        plan(job, **options)
    assert str(refused.value).startswith(f"--grad-compress {options['grad_compress']}")
    assert "\n" not in str(refused.value)
    assert refused.value.hint


def test_a_configuration_of_accelerate_that_makes_ddp_is_no_reason_to_refuse() -> None:
    engine = Engine(name="accelerate", accelerate={"distributed_type": "MULTI_GPU", "mixed_precision": "bf16"})
    assert plan(SCRIPT, engine=engine, grad_compress="bf16").grad_compress == "bf16"
