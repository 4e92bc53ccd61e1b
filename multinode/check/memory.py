"""Whether the training fits the memory of the nodes' GPUs; the estimate itself is `model/memory.py`'s."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from multinode.check.rule import CheckFinding, CheckRules, Inspection, launch_check
from multinode.check.training import read_inspected
from multinode.errors import MultinodeError
from multinode.job.job import TrainingJob, own_overrides
from multinode.levers.levers import NONE
from multinode.records.run_directory import RunDirectory, list_runs
from multinode.stats.unknown import Unknown, or_none
from multinode.traffic.algorithms import Layout
from multinode.units import GIB, MIB, format_figure

if TYPE_CHECKING:
    from multinode.model.memory import PeakMemory, WorkerMemory
    from multinode.model.training import ShardedTraining

_MEMORY = CheckRules("training")
# Records of so many runs are looked at, the newest first.
_MOST_RUNS = 50

DOES_NOT_FIT = _MEMORY.warning(
    about="the job needs more memory than the smallest GPU has",
    message="the job needs about {needed} GiB of GPU memory per worker ({basis}), but the smallest GPU has {total} GiB",
    hint="{way!s}",
)
MAY_NOT_FIT = _MEMORY.note(
    about="samples of different lengths may fragment GPU memory until the smallest GPU runs out of memory",
    message="the job needs about {needed} GiB of GPU memory per worker ({basis}). With samples of different "
    "lengths, it may need up to {most} GiB, but the smallest GPU has {total} GiB",
    hint="use expandable segments: --env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
)


@launch_check
def check_memory(inspection: Inspection) -> Iterator[CheckFinding]:
    """A worker's share of the training fits its GPU."""
    budget_gib, training, workers = (
        _smallest_gpu_gib(inspection),
        read_inspected(inspection),
        inspection.workers_of_nodes(),
    )
    if budget_gib is None or training is None or workers is None or inspection.training is None:
        return
    from multinode.model.training import worker_memory

    models = [facts.model_config for _, facts in inspection.known if facts.model_config is not None]
    layout = Layout.of(workers)
    memory = worker_memory(inspection.training, training, models[0], layout) if models else None
    peak = memory.peak() if memory is not None and not isinstance(memory, Unknown) else None
    if memory is None or isinstance(memory, Unknown) or peak is None:
        return
    total = format_figure(budget_gib)
    recorded = _recorded_peak(inspection.training, layout, inspection.runs) if inspection.runs is not None else None
    if recorded is not None:
        # What it was measured to need, it needs.
        needed_gib = recorded.allocated_gib + peak.context_gib
        if needed_gib > budget_gib:
            way = _way(inspection.training, memory, training, budget_gib)
            basis = f"{format_figure(recorded.allocated_gib)} allocated in run {recorded.run_id}"
            yield DOES_NOT_FIT.found(None, needed=format_figure(needed_gib), basis=basis, total=total, way=way)
        return
    needed = peak.needed
    basis = f"{needed.text('range')} with samples of {memory.batch.tokens:,} tokens; {_parts(peak)}"
    values = {"needed": format_figure(needed.value), "basis": basis, "total": total}
    if needed.value > budget_gib:
        yield DOES_NOT_FIT.found(None, **values, way=_way(inspection.training, memory, training, budget_gib))
    elif peak.shown.high > budget_gib:
        yield MAY_NOT_FIT.found(None, **values, most=format_figure(peak.shown.high))


class _RecordedPeak(NamedTuple):
    run_id: str
    allocated_gib: float  # by the worker that needed most


def _recorded_peak(job: TrainingJob, layout: Layout, runs: Path) -> _RecordedPeak | None:
    """What the newest run of the same settings and workers has needed on GPUs; None if none is among the last."""
    from multinode.model.workload import read_settings
    from multinode.runs.stored_run import StoredRun

    wanted = read_settings(job)
    for path in list_runs(runs)[: -_MOST_RUNS - 1 : -1]:
        run = StoredRun(RunDirectory(path))
        try:
            if run.workload is None or run.plan is None or replace(run.workload.settings, levers=NONE) != wanted:
                continue
            nodes = run.summary.nodes if run.summary is not None else ()
            same = Layout.of(run.plan.workers) == layout
        except MultinodeError:
            # Of a run that cannot be read nothing is known.
            continue
        peaks = [gib for node in nodes if node.gpus for gib in node.peak_worker_memory_gib.values()]
        if same and peaks:
            return _RecordedPeak(run.directory.run_id, max(peaks))
    return None


def _smallest_gpu_gib(inspection: Inspection) -> float | None:
    """Memory of a worker on the node that has least for each; None without GPUs, or if it is unknown.

    A GPU that shares its node's memory does not report any; its workers have the node's.
    """
    found = []
    for _, facts in inspection.known:
        gpus = facts.visible_gpus
        if not gpus or any(gpu.mig for gpu in gpus):
            continue
        sizes = [gpu.memory_total_mib * MIB / GIB for gpu in gpus if gpu.memory_total_mib is not None]
        shared_gib = or_none(facts.memory_limit_gib) or or_none(facts.memory_total_gib)
        if len(sizes) == len(gpus):
            found.append(min(sizes))
        elif not sizes and shared_gib is not None:
            found.append(shared_gib / len(gpus))
    return min(found, default=None)


def _parts(peak: PeakMemory) -> str:
    return ", ".join(f"{name} {format_figure(gib, 2)}" for name, gib in peak.parts.items() if gib)


def _way(job: TrainingJob, memory: WorkerMemory, training: ShardedTraining, total_gib: float) -> str:
    from multinode.model.fitting import first_that_fits

    change = first_that_fits(memory, total_gib, accumulation=training.accumulation, small=training.small)
    if change is None:
        return (
            "use GPUs with more memory, more workers with ZeRO-3, or a smaller model: no change to the settings "
            "makes the job fit"
        )
    own = replace(change, overrides=own_overrides(job, change.overrides))
    return f"the first change that makes it fit: {own.options}"
