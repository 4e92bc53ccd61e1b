"""Stored runs of a tiny training, as predictions read them: one node, several nodes, and an nccl-test.

The training is made up: 120 ms of computing a micro-batch, 20 ms of optimizer, and what its gradients take on a link
that carries exactly its goodput.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from multinode.network.measure import load_scan
from multinode.network.scan_verdict import Verdict
from multinode.network.size_scan import ScanReport
from multinode.predict.run_selection import Record
from multinode.profile.step_split import StepSplit
from multinode.records.benchmark import CollectiveTest
from multinode.records.plan import LaunchPlan, PlanFile
from multinode.records.run_directory import RunDirectory
from multinode.stats.unknown import Unknown
from multinode.strict_yaml import dump_yaml
from multinode.traffic.step_calls import Strategy, fit_curve
from multinode.units import goodput_gb_per_s
from tests import make
from tests.model.trainings import TINY

__all__ = ["BYTES", "COMPUTE_MS", "JOB", "OPTIMIZER_MS", "comm_ms", "sweep_record", "training_record"]

COMPUTE_MS, OPTIMIZER_MS = 120.0, 20.0
# Of TINY's fp32 gradients.
BYTES = 14_767_104
JOB: dict[str, Any] = {
    "model_name_or_path": "tiny",
    "stage": "sft",
    "finetuning_type": "full",
    "dataset": "made_up",
    "per_device_train_batch_size": 2,
    "cutoff_len": 128,
    "max_steps": 30,
}


def comm_ms(link_gbit_per_s: float, size_bytes: float = BYTES) -> float:
    """What gradients take between two workers on two nodes, one on each."""
    return size_bytes / goodput_gb_per_s(link_gbit_per_s) / 1e6


def training_record(
    run_id: str,
    nodes: int,
    link: float | None = 1.0,
    *,
    exposed_ms: float | None = 0.0,
    job: dict[str, Any] | None = None,
    workers_per_node: int | tuple[int, ...] = 1,
    model: dict[str, Any] | None = TINY,
    deepspeed: str | None = None,
) -> Record:
    """A run whose step is its own work and what was exposed."""
    config = JOB | (job or {})
    accumulation = config.get("gradient_accumulation_steps", 1)
    own_ms = accumulation * COMPUTE_MS + OPTIMIZER_MS
    step_ms = own_ms + (exposed_ms or 0.0)
    counts = (workers_per_node,) * nodes if isinstance(workers_per_node, int) else workers_per_node
    workers = sum(counts)
    mean = make.split(
        step_ms,
        compute_ms=accumulation * COMPUTE_MS,
        exposed_ms=exposed_ms or 0.0,
        wait_ms=0.0,
        data_ms=0.0,
        optimizer_ms=OPTIMIZER_MS,
        host_ms=0.0,
    )
    summary = make.summary(
        workers * config["per_device_train_batch_size"] * accumulation / step_ms * 1000,
        step_ms,
        run_id=run_id,
        strategy="DDP",
        recognised=Strategy.DDP,
        world_size=workers,
        micro_steps=float(accumulation),
        tokens_per_sample=100.0,
        split=StepSplit(mean=mean) if exposed_ms is not None else StepSplit(mean=Unknown("nobody looked")),
    )
    files = [PlanFile(path="job.yaml", text=dump_yaml(config))]
    if deepspeed is not None:
        files.append(PlanFile(path="deepspeed.json", text=deepspeed))
    return made_record(run_id, plan=plan(run_id, counts, link, tuple(files)), summary=summary, model=model)


def sweep_record(run_id: str, link: float | None = 1.0, nodes: int = 2) -> Record:
    """An nccl-test of gloo whose calls take what their bytes take on the link, and nothing else."""
    rate = link or 1.0
    sizes = (1 << 16, 1 << 20, 1 << 22, 1 << 24)
    # Two workers of gloo gather in turns.
    passes = {"all_reduce": 1.0, "all_gather": 1.0}
    curves = {
        name: fit_curve([(size, part * size / goodput_gb_per_s(rate) / 1e3) for size in sizes])
        for name, part in passes.items()
    }
    report = ScanReport(
        run_id=run_id,
        backend="gloo",
        world_size=nodes,
        workers=(1,) * nodes,
        nodes=tuple(f"node{index}" for index in range(nodes)),
        test=CollectiveTest(messages=()),
        link_gbit_per_s=link,
        mtu=1500,
        rows=(),
        curves=curves,
        verdict=Verdict(message="as it should be"),
        directory=f"/runs/{run_id}",
    )
    return made_record(run_id, plan=plan(run_id, (1,) * nodes, link, ()), results={load_scan: report})


def made_record(run_id: str, **parts: Any) -> Record:
    """A run with these parts, which lies nowhere."""
    return Record(RunDirectory(Path("/nowhere") / run_id)).having(**parts)


def plan(run_id: str, workers: tuple[int, ...], link: float | None, files: tuple[PlanFile, ...]) -> LaunchPlan:
    """On node0, node1, ...; a NIC says its link's rate on one node as well."""
    return make.plan(
        *(f"node{index}" for index in range(len(workers))),
        workers=workers,
        link_gbit_per_s=link,
        each={"files": files},
        run_id=run_id,
        engine="llamafactory",
        job="sft.yaml (LLaMA-Factory sft full)",
    )


def renamed(record: Record, **changes: Any) -> Record:
    """The same record with other figures in its summary."""
    assert record.summary is not None
    return record.having(summary=msgspec.structs.replace(record.summary, **changes))


def on_four(planned: LaunchPlan) -> LaunchPlan:
    """The plan of one node, with four workers on it."""
    (node,) = planned.nodes
    place = msgspec.structs.replace(node.place, ranks=(0, 1, 2, 3))
    meeting = msgspec.structs.replace(planned.rendezvous, workers=(4,))
    return msgspec.structs.replace(planned, rendezvous=meeting, nodes=(msgspec.structs.replace(node, place=place),))
