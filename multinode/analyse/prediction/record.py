"""Record: one stored run as predictions read it, and what it trained in which settings. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from multinode.analyse.collectives.traffic import Layout, Strategy
from multinode.analyse.job.workload import Settings, Workload, read_settings
from multinode.analyse.nccl_test.size_scan import ScanReport
from multinode.analyse.steps.summary import Summary
from multinode.core.job.job import LlamaFactoryJob, parse_llamafactory
from multinode.core.run.plan import LaunchPlan
from multinode.errors import JobError

__all__ = ["Record", "difference", "is_alike", "is_rate", "job_of", "settings_of", "settled", "strategy_of"]

_SLOWEST_GBIT_PER_S, _FASTEST_GBIT_PER_S = 1e-4, 1e5
_NOT_COMPRESSED = "gradients were NOT compressed"
# What two runs of one training have in common, however they are laid out.
_SAME = (
    "model",
    "dataset",
    "method",
    "lora_rank",
    "stage",
    "sequence_length",
    "packing",
    "precision",
    "recompute",
    "command",
)


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What a stored run has; None where it has none.

    Attributes:
        sweep: of an nccl-test.
        model: the config.json of its model.
    """

    plan: LaunchPlan
    summary: Summary | None = None
    workload: Workload | None = None
    sweep: ScanReport | None = None
    model: dict[str, Any] | None = None

    @property
    def run_id(self) -> str:
        """Of the run."""
        return self.plan.run_id

    @property
    def layout(self) -> Layout:
        """Its workers."""
        return Layout(nodes=max(1, len(self.plan.nodes)), workers_per_node=max(1, self.plan.nproc_per_node))

    @property
    def node_names(self) -> tuple[str, ...]:
        """In node-rank order."""
        return tuple(node.node for node in self.plan.nodes)

    @property
    def link_gbit_per_s(self) -> float | None:
        """Of the slowest card; None where one does not tell, or there is one node."""
        rates = [node.link_gbit_per_s for node in self.plan.nodes]
        known = [rate for rate in rates if rate is not None and is_rate(rate)]
        return min(known) if len(known) == len(rates) > 1 else None

    @property
    def samples_per_s(self) -> float:
        """Of all workers; 0 where it tells none."""
        return (self.summary.samples_per_s if self.summary is not None else None) or 0.0

    @property
    def is_training(self) -> bool:
        """Whether it tells how fast a training was."""
        return self.sweep is None and self.summary is not None and self.summary.samples_per_s is not None


def settled(record: Record) -> Record:
    """The same with its settings beside it, so that they are read from its job's file once."""
    if record.workload is not None:
        return record
    return msgspec.structs.replace(record, workload=Workload(settings=settings_of(record)))


def settings_of(record: Record) -> Settings:
    """By its workload; of an older run by the job's own file. A hook that stepped aside has compressed nothing."""
    settings = _asked_settings(record)
    if settings.grad_compress is not None and _stepped_aside(record.summary):
        return msgspec.structs.replace(settings, grad_compress=None)
    return settings


def _asked_settings(record: Record) -> Settings:
    if record.workload is not None:
        return record.workload.settings
    job = job_of(record)
    return read_settings(job) if job is not None else Settings(method="script", command=record.plan.job)


def _stepped_aside(summary: Summary | None) -> bool:
    """Whether a worker said so, as multinode_compress does where the training has a hook of its own."""
    return summary is not None and any(_NOT_COMPRESSED in said for said in summary.missing.values())


def strategy_of(record: Record) -> Strategy | None:
    """As it was configured; else as its calls were recognised; None is neither."""
    recognised = record.summary.strategy if record.summary is not None else None
    told = settings_of(record).strategy or recognised
    return next((one for one in Strategy if one.value == told), None)


def job_of(record: Record) -> LlamaFactoryJob | None:
    """The LLaMA-Factory job as it went to the nodes; None of a script."""
    files = {file.path: file.text for node in record.plan.nodes[:1] for file in node.files}
    text = next((text for path, text in files.items() if path.endswith((".yaml", ".yml"))), None)
    if text is None or record.plan.engine != "llamafactory":
        return None
    try:
        job = parse_llamafactory(text, record.plan.job.split(" ", maxsplit=1)[0])
    except JobError:
        return None
    deepspeed = next((text for path, text in files.items() if path.endswith(".json")), None)
    return msgspec.structs.replace(job, deepspeed_text=deepspeed)


def is_rate(gbit_per_s: float) -> bool:
    """Whether a link can be that fast: from 100 kbit/s to 100 Tbit/s."""
    return _SLOWEST_GBIT_PER_S <= gbit_per_s <= _FASTEST_GBIT_PER_S


def is_alike(one: Record, other: Record) -> bool:
    """Whether they are of one training, however it is laid out and shared out."""
    return not difference(one, other)


def difference(one: Record, other: Record) -> str:
    """The first setting that differs though one training has one of it; what is not known differs in nothing."""
    ours, theirs = settings_of(one), settings_of(other)
    for name in _SAME:
        values = getattr(ours, name), getattr(theirs, name)
        if None not in values and values[0] != values[1]:
            return f"{name} {values[0]} and {values[1]}"
    return ""
