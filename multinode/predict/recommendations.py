"""Recommendations from stored runs. Reads disk; prints nothing.

`measured_job` is the job of these runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from multinode.cluster.cluster import Node
from multinode.errors import UsageError
from multinode.job.deepspeed import DeepSpeedConfig, parse_deepspeed
from multinode.job.job import TrainingJob, named_paths
from multinode.model.workload import JobSettings
from multinode.predict.advice import Recommendations, advice_notes, rank_options
from multinode.predict.evidence import Evidence
from multinode.predict.forecast import back_tested, trusted
from multinode.predict.request import command_of, evidence_of, read_record, runs_of
from multinode.predict.training_state import GpuMemoryBudget, TrainingState
from multinode.profile.summary import Summary
from multinode.records.run_directory import RunDirectory, list_runs
from multinode.runs.stored_run import StoredRun
from multinode.stats.unknown import or_none


def advise_runs(
    root: Path, names: Sequence[str], *, link_gbit_per_s: float | None = None, link_measured: float | None = None
) -> Recommendations:
    """Changes of the measured training, best first.

    Args:
        root: directory of all runs.
        names: ids, their beginnings, or `last`; a contrast or tuning stands for its runs.
        link_gbit_per_s: assumed link rate; None uses the measured one.
        link_measured: actual link rate, if the NICs did not report it.
    """
    names = stored_sources(root, names)
    evidence = evidence_of(root, names, link_measured)
    tested = back_tested(evidence)
    directories = [RunDirectory.open(root, name) for name in names]
    today = training_state(trusted(evidence, tested), directories, link_gbit_per_s=link_gbit_per_s)
    now = today.outlook()
    advice = tuple(ranked.advice for ranked in rank_options(today))
    return Recommendations(
        runs=names,
        sources=evidence.sources,
        settings=today.settings,
        today=now,
        measured_samples_per_s=today.measured_samples_per_s,
        advice=advice,
        notes=(*evidence.notes, *advice_notes(today, now)),
        back_test=tested,
        command=command_of(root, names, evidence.subject.job),
    )


def measured_job(root: Path, names: Sequence[str], settings: JobSettings) -> TrainingJob:
    """The job with these settings as it went to the nodes, with its overrides and its shortened steps.

    Args:
        root: directory of all runs.
        names: ids of the runs that measured it.
        settings: of the job.

    Raises:
        UsageError: it was a script, or its files are not stored.
        MultinodeError: a file of a run cannot be read.
    """
    for name in names:
        directory = RunDirectory.open(root, name)
        record = read_record(directory)
        job = record.job if record is not None else None
        if record is not None and job is not None and record.settings == settings:
            facts = StoredRun(directory).facts.values()
            looked_at = {kept.path for node in facts for kept in node.paths}
            local = tuple(path for path in named_paths(job) if path in looked_at)
            return msgspec.structs.replace(job, local_paths=local)
    raise UsageError(
        "the measured job is a script, or not stored with its runs",
        hint="name it: multinode tune --judge speed --from RUN train.yaml, or the script after --",
    )


def training_today(root: Path, names: Sequence[str], *, link_measured: float | None = None) -> TrainingState:
    """The current training from these runs only, as far as the model is reliable.

    Args:
        root: directory of all runs.
        names: ids of the runs.
        link_measured: Gbit/s of the link, if the NICs did not report it.
    """
    evidence = evidence_of(root, names, link_measured)
    return training_state(trusted(evidence, back_tested(evidence)), [RunDirectory.open(root, name) for name in names])


def stored_sources(root: Path, names: Sequence[str]) -> tuple[str, ...]:
    """Ids of the runs that these names stand for, each once."""
    directories = (run for name in names for run in runs_of(RunDirectory.open(root, name)))
    return tuple(dict.fromkeys(directory.run_id for directory in directories))


def training_state(
    evidence: Evidence,
    directories: Sequence[RunDirectory],
    alike: Sequence[Summary] | None = None,
    *,
    link_gbit_per_s: float | None = None,
) -> TrainingState:
    """The current training.

    Args:
        evidence: from its runs.
        directories: of its runs.
        alike: summaries of runs with exactly its settings, the newest last; None uses the stored ones.
        link_gbit_per_s: assumed link rate; None uses the measured one.
    """
    scenario, measured = evidence.today, evidence.today_samples_per_s
    if link_gbit_per_s is not None and link_gbit_per_s != scenario.link.gbit_per_s:
        link = msgspec.structs.replace(scenario.link, gbit_per_s=link_gbit_per_s)
        scenario, measured = msgspec.structs.replace(scenario, link=link), None
    alike = list(_as_today(evidence, directories)) if alike is None else alike
    return TrainingState(
        calibration=evidence.calibration,
        scenario=scenario,
        settings=evidence.subject.settings,
        subject=evidence.subject,
        deepspeed=_deepspeed(evidence),
        gpu_memory=_gpu_memory(alike) or _unmeasured_gpu_memory(directories),
        slots=_slots(directories),
        measured_samples_per_s=measured,
        single_samples_per_s=evidence.single_samples_per_s,
        single_gain=evidence.single_gain,
        stragglers=alike[-1].stragglers if alike else (),
        dataset_samples=or_none(alike[-1].dataset_samples) if alike else None,
        balance=alike[-1].balance if alike else None,
    )


def _as_today(evidence: Evidence, directories: Sequence[RunDirectory]) -> Iterator[Summary]:
    stored = {path.name: place for place, path in enumerate(list_runs(directories[0].path.parent))}
    for directory in sorted(directories, key=lambda record: stored.get(record.run_id, -1)):
        record = read_record(directory)
        if record is None or record.summary is None or record.layout != evidence.today.layout:
            continue
        if record.settings == evidence.subject.settings:
            yield record.summary


def _deepspeed(evidence: Evidence) -> DeepSpeedConfig | None:
    job = evidence.subject.job
    return parse_deepspeed(job.deepspeed_text) if job is not None else None


def _gpu_memory(summaries: Sequence[Summary]) -> GpuMemoryBudget | None:
    nodes = [node for summary in summaries for node in summary.nodes if node.gpus]
    totals = [gpu.memory_total_gib for node in nodes for gpu in node.gpus if gpu.memory_total_gib is not None]
    if not totals:
        return None
    peaks = [peak for node in nodes for peak in node.peak_worker_memory_gib.values()]
    return GpuMemoryBudget(total_gib=min(totals), peak_gib=max(peaks, default=None))


def _unmeasured_gpu_memory(directories: Sequence[RunDirectory]) -> GpuMemoryBudget | None:
    summaries = [summary for directory in directories if (summary := StoredRun(directory).summary) is not None]
    memory = _gpu_memory(summaries)
    return msgspec.structs.replace(memory, peak_gib=None) if memory is not None else None


def _slots(directories: Sequence[RunDirectory]) -> tuple[int | None, ...]:
    clusters = [cluster for directory in directories if (cluster := StoredRun(directory).cluster) is not None]
    nodes: tuple[Node, ...] = max((cluster.nodes for cluster in reversed(clusters)), key=len, default=())
    return tuple(len(node.gpus) if node.slots is None and node.gpus is not None else node.slots for node in nodes)
