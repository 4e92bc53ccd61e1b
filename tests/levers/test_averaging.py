"""Averaging between nodes: what the options ask for, what is refused, and what the workers are told."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from multinode.cluster.cluster import Node
from multinode.job.engines.engine import Engine
from multinode.job.job import Job, ScriptJob, TrainingJob
from multinode.job.launch_options import LaunchOptions
from multinode.job.planning import plan_launch
from multinode.levers.averaging import Averaging, parse_average
from multinode.levers.former import respell_average
from multinode.levers.levers import NONE, Levers
from multinode.records.plan import LaunchPlan, Observation
from tests import make
from tests.golden import Golden, error_of
from tests.levers.compressed import compressed

VARIABLE = "MULTINODE_SYNC"
CLUSTER = make.cluster(Node(name="a", addr="192.0.2.1", slots=2), Node(name="b", addr="192.0.2.2", slots=2))
SCRIPT = ScriptJob(argv=("train.py",))
SFT = TrainingJob(config_path="sft.yaml", text="", config={"model_name_or_path": "m", "stage": "sft"})
EVERY = Averaging(every=16)


def plan(job: Job, nodes: int = 2, **options: Any) -> LaunchPlan:
    return plan_launch(CLUSTER.first(nodes), job, {}, "r", LaunchOptions(**options))


def sft(**config: Any) -> TrainingJob:
    return msgspec.structs.replace(SFT, config=SFT.config | config)


@pytest.mark.parametrize(
    ("text", "expected", "written"),
    [
        ("local:16", Averaging(every=16), "local:16"),
        ("local:1:fp16", Averaging(every=1, dtype="fp16"), "local:1:fp16"),
        ("diloco:64", Averaging(every=64, outer_lr=0.7, momentum=0.9), "diloco:64:0.7:0.9"),
        ("diloco:64:1", Averaging(every=64, outer_lr=1.0, momentum=0.9), "diloco:64:1:0.9"),
        (
            "diloco:64:bf16",
            Averaging(every=64, outer_lr=0.7, momentum=0.9, dtype="bf16"),
            "diloco:64:0.7:0.9:bf16",
        ),
        (
            "diloco:1000000:0.12345678:0:bf16",
            Averaging(every=1_000_000, outer_lr=0.12345678, momentum=0.0, dtype="bf16"),
            "diloco:1000000:0.12345678:0:bf16",
        ),
        ("diloco:64:.5:1e-1", Averaging(every=64, outer_lr=0.5, momentum=0.1), "diloco:64:0.5:0.1"),
        ("diloco:64:1e-4:0.5", Averaging(every=64, outer_lr=1e-4, momentum=0.5), "diloco:64:0.0001:0.5"),
    ],
)
def test_an_average_is_read_and_written_again(text: str, expected: Averaging, written: str) -> None:
    assert parse_average(text) == expected
    assert expected.given == {"average": written}
    assert parse_average(written) == expected


def test_what_is_no_average_is_refused_with_an_example(golden: Golden) -> None:
    words = ("", "16", "local", "local:", "local:x", "local:-1", "local:16:fp8", "local:16:0.7", "Local:4")
    outer = ("64:", "64:nan", "64:inf", "64:0.7:-1", "64:1:0:1", "64:fp16:0.7", "0", "1000001:0.7", "64:0", "64:0.7:1")
    wrong = (*words, "local:16:fp16:", "local:0", "local:1000001", *(f"diloco:{text}" for text in outer))
    golden.check_errors("refused_words", {text: error_of(parse_average, text) for text in wrong})


@pytest.mark.parametrize(
    ("given", "spelled"),
    [
        ({"sync-every": "16"}, "local:16"),
        ({"sync-every": "16", "sync-dtype": "fp16"}, "local:16:fp16"),
        ({"diloco": "64:0.5:0.8", "sync-dtype": "bf16"}, "diloco:64:0.5:0.8:bf16"),
        ({"sync_dtype": "fp16", "nodes": 2}, "local:H:fp16"),
        ({"nodes": 2}, None),
        (
            {"sync-every": "none,4", "diloco": "64", "sync-dtype": "none,fp16"},
            "none,local:4,local:4:fp16,diloco:64,diloco:64:fp16",
        ),
    ],
)
def test_the_options_of_before_are_spelled_as_one(given: dict[str, object], spelled: str | None) -> None:
    assert respell_average(given) == spelled


def test_workers_of_several_nodes_are_told_and_those_of_one_are_not() -> None:
    averaging = Averaging(every=64, dtype="fp16", outer_lr=0.7, momentum=0.9)
    planned = plan(SCRIPT, levers=Levers(averaging=averaging))
    assert planned.levers.averaging == averaging
    told = [json.loads(node.command.env[VARIABLE]) for node in planned.nodes]
    fields = {"every": 64, "dtype": "fp16", "outer_lr": 0.7, "momentum": 0.9, "workers": [2, 2]}
    assert told == [fields | {"option": "--average diloco:64:0.7:0.9:fp16"}] * 2
    alone = plan(SCRIPT, nodes=1, levers=Levers(averaging=averaging))
    assert alone.levers.averaging is None
    assert VARIABLE not in alone.nodes[0].command.env
    assert alone.notes[-1].message.startswith("--average diloco:64:0.7:0.9:fp16 has no effect if the job")
    assert VARIABLE not in plan(SCRIPT).nodes[0].command.env


def test_jobs_that_cannot_be_averaged_are_refused_by_their_files(golden: Golden) -> None:
    def engine(**accelerate: str) -> dict[str, Engine]:
        return {"engine": Engine(name="accelerate", accelerate=accelerate)}

    cases: dict[str, tuple[Job, dict[str, Any]]] = {
        "no instrumentation": (SCRIPT, {"observation": Observation(profile=False)}),
        "--grad-compress": (SCRIPT, {"levers": compressed("fp16")}),
        "deepspeed": (sft(deepspeed="configs/ds_z2.json"), {}),
        "fsdp": (sft(fsdp="full_shard auto_wrap"), {}),
        "accelerate with fsdp": (SCRIPT, engine(distributed_type="FSDP")),
        "accelerate in fp16": (SCRIPT, engine(mixed_precision="fp16")),
        "fp16": (sft(fp16=True), {}),
        "optim: adalomo": (sft(optim="adalomo"), {}),
        "optim: galore_adamw_layerwise": (sft(optim="galore_adamw_layerwise"), {}),
        "galore_layerwise": (sft(use_galore=True, galore_layerwise=True), {}),
        "use_badam": (sft(use_badam=True), {}),
    }
    golden.check_errors(
        "refused_average",
        {
            case: error_of(
                plan, job, **options | {"levers": Levers(averaging=EVERY).joined(options.get("levers", NONE))}
            )
            for case, (job, options) in cases.items()
        },
    )


def test_a_llamafactory_job_under_ddp_is_not() -> None:
    for job in (SFT, sft(bf16=True, optim="adamw_torch", finetuning_type="lora")):
        assert plan(job, levers=Levers(averaging=EVERY)).levers == Levers(averaging=EVERY)
