from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from multinode.check.check import check_all
from multinode.check.memory import DOES_NOT_FIT, check_memory
from multinode.check.rule import CheckFinding, Inspection
from multinode.cluster.facts import Gpu
from multinode.job.job import TrainingJob
from multinode.job.launch_options import LaunchOptions
from multinode.model.workload import Workload, read_settings
from multinode.profile.machine_use import GpuUse, NodeUse
from multinode.stats.unknown import Entries
from tests import make
from tests.golden import Golden
from tests.model.trainings import FULL, LLAMA_3_8B, LORA, TINY, training_job

from .inspecting import but, check_cases, inspection, silent

HALF = {"bf16": True, "per_device_train_batch_size": 4}
CARD, LARGE = 24564, 81920


def inspected(
    config: dict[str, Any],
    memory_mib: float | None = CARD,
    *,
    model: dict[str, Any] | None = LLAMA_3_8B,
    stage: int | None = None,
    **facts: Any,
) -> Inspection:
    """Two nodes with one GPU each."""
    zero = {} if stage is None else {"stage": stage}
    found = inspection(job=training_job(config | HALF | config, **zero))
    gpus = (Gpu(index=0, name="NVIDIA GeForce RTX 4090", memory_total_mib=memory_mib),)
    model_facts = {} if model is None else {"model": Entries(model)}
    return but(found, "ab", **{"gpus": gpus, **model_facts, **facts})


def judge(*what: Any, **facts: Any) -> Iterator[CheckFinding]:
    return check_memory(inspected(*what, **facts))


GPTQ = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
UNCHECKPOINTED = LORA | {"disable_gradient_checkpointing": True, "per_device_train_batch_size": 1}
CASES = {
    "a batch of 4 on 24 GiB": judge(LORA),
    "samples of other lengths on 24 GiB": judge(LORA | {"per_device_train_batch_size": 1}),
    "without checkpointing": judge(UNCHECKPOINTED),
    "full fine-tuning under DDP": judge(FULL, LARGE),
    "full fine-tuning under ZeRO-2": judge(FULL, LARGE, stage=2),
    "full fine-tuning under ZeRO-3 on 16 GiB": judge(FULL, 16384, stage=3),
    "more than any change saves": judge(FULL, 2048),
    # A GPU that shares its node's memory reports none.
    "a checkpoint that is quantized itself": judge(LORA, 8192, model=LLAMA_3_8B | GPTQ),
    "unified memory": judge(LORA, None, memory_total_gib=24.0),
    "a smaller limit of unified memory": judge(LORA, None, memory_total_gib=120.0, memory_limit_gib=16.0),
}


def test_what_does_not_fit_is_a_warning_with_the_first_change_that_fits(golden: Golden) -> None:
    check_cases(golden, "memory", CASES)


def test_a_launch_warns_of_it_as_well() -> None:
    found = {(one.code, one.severity) for one in check_all(inspected(LORA), before_launch=True)}
    assert (DOES_NOT_FIT.code, "warning") in found


def test_what_fits_and_what_is_unknown_is_not_warned_of() -> None:
    silent(
        judge(FULL, model=TINY),
        judge(LORA | {"packing": True}, LARGE),
        judge(LORA, model=None),
        judge(LORA, None),
        judge(LORA, gpus=()),
        judge(LORA | {"use_unsloth": True}),
        judge(FULL | {"optim": "adafactor"}),
    )


def test_a_change_is_of_the_workers_that_are_asked_for() -> None:
    job = training_job(FULL | HALF, stage=3)
    gpus = tuple(Gpu(index=index, name="NVIDIA H100", memory_total_mib=LARGE) for index in range(8))
    found = but(inspection(job=job), "ab", gpus=gpus, model=Entries(LLAMA_3_8B))
    options = [LaunchOptions(workers_per_node=count) for count in (1, 8)]
    severities = [[each.severity for each in check_memory(replace(found, options=option))] for option in options]
    assert severities == [["warning"], ["note"]]


def test_the_peak_that_a_run_of_the_same_job_has_recorded_replaces_the_estimate(tmp_path: Path) -> None:
    job = training_job(LORA | HALF)
    found = but(
        replace(inspection(job=job), runs=tmp_path),
        "ab",
        gpus=(Gpu(index=0, name="NVIDIA GeForce RTX 4090", memory_total_mib=CARD),),
        model=Entries(LLAMA_3_8B),
    )
    for run_id, config, gib in (("of-another-batch", LORA, 20.0), ("of-this", LORA | HALF, 30.0)):
        record(tmp_path, run_id, training_job(config), gib)
    (finding,) = check_memory(found)
    assert "about 30.9 GiB of GPU memory per worker (30 allocated in run of-this)" in finding.message
    record(tmp_path, "newer", job, 18.0)
    assert list(check_memory(found)) == []


def record(root: Path, run_id: str, job: TrainingJob, gib: float) -> None:
    """A run of two nodes whose workers had so much allocated on their GPUs."""
    nodes = tuple(
        NodeUse(
            node=name,
            node_rank=rank,
            ranks=(rank,),
            gpus=(GpuUse(index=0),),
            peak_worker_memory_gib={rank: gib},
        )
        for rank, name in enumerate("ab")
    )
    plan = make.plan(make.node_plan("a"), make.node_plan("b", 1))
    workload = Workload(settings=read_settings(job))
    make.store(root, run_id, plan=plan, summary=make.summary(nodes=nodes), workload=workload, run=make.run("a", "b"))
