"""Runs and sides that the tests of the contrast share; figures as the lab gives them."""

from __future__ import annotations

import math
from typing import Any

from multinode.contrast.figures import Side
from multinode.model.workload import FullRun, JobSettings, Workload
from multinode.profile.bottleneck import Bottleneck
from multinode.profile.figures import Straggler
from multinode.profile.machine_use import NodeUse
from multinode.profile.step_bytes import BytesPerStep
from multinode.profile.step_split import StepSplit, WorkerSplit
from multinode.profile.summary import Comm, StepTimes, Summary
from multinode.runs.stored_run import StoredRun
from multinode.stats.estimate import Estimate, Spread
from multinode.stats.unknown import Unknown
from tests import make
from tests.profile.observing import RUN

SETTINGS = JobSettings(
    model="tiny",
    method="full",
    stage="sft",
    dataset="made_up",
    strategy="DDP",
    per_device_batch=2,
    accumulation=1,
    sequence_length=128,
    precision="fp32",
)


def split_of(step_ms: float, exposed_ms: float = 0.0, *, wait_ms: float = 0.0, data_ms: float = 0.0) -> WorkerSplit:
    """A step whose rest is computing, but for 10 ms of the optimizer and 6 of the host."""
    return WorkerSplit(
        rank=-1,
        step_ms=step_ms,
        compute_ms=step_ms - exposed_ms - wait_ms - data_ms - 16,
        exposed_ms=exposed_ms,
        wait_ms=wait_ms,
        data_ms=data_ms,
        optimizer_ms=10.0,
        host_ms=6.0,
    )


def around(value: float, part: float = 0.01) -> Estimate:
    """A figure whose repeats lie within this part of it."""
    return Estimate(value=value, low=value * (1 - part), high=value * (1 + part), repeats=3)


def side_of(role: str, samples_per_s: float, nodes: int = 1, workers_per_node: int = 2, **known: Any) -> Side:
    """A side with two samples per worker per micro-batch; its step time follows unless it is among what is `known`."""
    settings = known.pop("settings", SETTINGS)
    world_size = nodes * workers_per_node
    batch = None if settings is None else settings.per_device_batch * settings.accumulation * world_size
    step_ms = known.pop("step_ms", (batch or 2 * world_size) / samples_per_s * 1000)
    spread = known.pop("spread", 0.01)
    facts = {
        "run_ids": (f"run-{role}",),
        "node_names": tuple(f"n{number}" for number in range(1, nodes + 1)),
        "samples_per_s": around(samples_per_s, spread),
        "step_time_ms": around(step_ms, spread),
        "step_spread": Spread(median=step_ms, p95=step_ms, cv=0.01),
        "steady_steps": 30,
        "global_batch": batch,
        "settings": settings,
        "bottleneck": Bottleneck(kind="compute", message=""),
        "exposed_ms": Unknown("it was not timed"),
        "late_ms": 0.0 if known.get("split") is not None else None,
    }
    told = {name: figure for name, figure in (facts | known).items() if figure is not None}
    return Side(role=role, nodes=nodes, workers_per_node=workers_per_node, world_size=world_size, **told)


def measured(value: float, cv: float = 0.1, steps: int = 25) -> Estimate:
    """The figure of so many independent steps."""
    factor = math.exp((1.96 + 2.4 / (steps - 1)) * cv / math.sqrt(steps))
    return Estimate(value=value, low=value / factor, high=value * factor)


def summary_of(rate: float = 24.1, step_ms: float = 166.0, **known: Any) -> Summary:
    """One run of thirty steady steps; plain figures vary by a tenth, where they need an interval."""
    known |= {name: measured(known[name]) for name in ("tokens_per_s", "tgs") if isinstance(known.get(name), float)}
    facts: dict[str, Any] = {
        "samples_per_s": measured(rate),
        "step_time_ms": StepTimes(median=measured(step_ms), p95=step_ms, cv=0.1),
    }
    return make.summary(**(facts | known))


def split_summary(exposed_ms: float, late: dict[str, float] | None = None, **known: Any) -> Summary:
    """A run whose steps were split, with nodes that are late by so many ms."""
    mean = split_of(known.get("step_ms", 166.0), exposed_ms)
    stragglers = tuple(
        Straggler(node=node, ranks=(0,), late_ms=late_ms, share=0.5, message="")
        for node, late_ms in (late or {}).items()
    )
    split = StepSplit(source="ddp", mean=mean)
    return summary_of(split=split, comm=Comm(exposed_ms=measured(exposed_ms)), stragglers=stragglers, **known)


def run_of(summary: Summary | None = None, *, nodes: int = 1, **known: Any) -> StoredRun:
    """A run on n1, n2, ... with two workers each."""
    names = tuple(f"n{number}" for number in range(1, nodes + 1))
    facts: dict[str, Any] = {
        "summary": summary or summary_of(),
        "plan": make.plan(*names, workers=2),
        "node_names": names,
        "workers": (2,) * nodes,
        "workload": Workload(settings=SETTINGS, whole=FullRun(steps=1000), versions={"torch": "2.13.0"}),
    }
    return make.stored_run(RUN, **(facts | known))


def node_use(name: str = "n1", **known: Any) -> NodeUse:
    """What a node with two workers did."""
    return NodeUse(node=name, node_rank=0, ranks=(0, 1), **known)


def traffic(nic: float) -> Comm:
    """So many bytes per step on the busiest NIC."""
    return Comm(bytes_per_step=BytesPerStep(nic=nic))
