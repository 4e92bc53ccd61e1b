"""advise: stored runs -> Recommendations: which change pays, how much, and what it costs. Reads disk; prints nothing.

`measured_job` is the job that these runs trained; trying advice with it on the nodes is `try_advice`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from multinode.cluster.cluster import Cluster, Node
from multinode.errors import UsageError
from multinode.job.deepspeed import DeepSpeedConfig, parse_deepspeed
from multinode.job.job import LlamaFactoryJob, named_paths
from multinode.predict.advice import Recommendations, rank_options
from multinode.predict.advice_screen import advice_notes
from multinode.predict.evidence import Evidence
from multinode.predict.forecast import back_tested, trusted
from multinode.predict.request import evidence_of, hosts_of, read_record, runs_of
from multinode.predict.training_state import GpuMemoryBudget, TrainingState
from multinode.profile.summary import Summary
from multinode.records.run_directory import RunDirectory, list_runs


class _Path(msgspec.Struct, frozen=True):
    """What is read of a path on a node here."""

    path: str


class _Paths(msgspec.Struct, frozen=True):
    """What is read of a node's facts here."""

    paths: tuple[_Path, ...] = ()


def advise_runs(
    root: Path, names: Sequence[str], *, link_gbit_per_s: float | None = None, link_measured: float | None = None
) -> Recommendations:
    """What would change the training that was measured, best first.

    Args:
        root: directory of all runs.
        names: an id each, the beginning of one, or `last`; of runs that tried advice, those that it was made from.
        link_gbit_per_s: as if the nodes had this link; None takes the one that was measured.
        link_measured: rate of the link that they did have, where their NICs did not report it.

    Raises:
        UsageError: there is no such run, or they tell too little.
        MultinodeError: a file of one cannot be read.
    """
    names = list(dict.fromkeys(found for name in names for found in _sources(root, name)))
    evidence = evidence_of(root, names, link_measured)
    tested = back_tested(evidence)
    directories = [RunDirectory.open(root, name) for name in names]
    today = training_state(trusted(evidence, tested), directories, link_gbit_per_s=link_gbit_per_s)
    now = today.outlook()
    advice = tuple(one.advice for one in rank_options(today))
    notes = [*evidence.notes, *advice_notes(today, now), *([tested.sentence] if tested.tested else [])]
    return Recommendations(
        runs=tuple(names),
        sources=evidence.sources,
        settings=today.settings,
        today=now,
        measured_samples_per_s=today.measured_samples_per_s,
        advice=advice,
        notes=tuple(dict.fromkeys(notes)),
        back_test=tested,
        job=evidence.subject.job.config_path if evidence.subject.job is not None else "",
        hosts=hosts_of(root, names),
    )


def measured_job(root: Path, recommendations: Recommendations) -> LlamaFactoryJob:
    """The job that was measured as it stands, as it went to the nodes: with its overrides, and cut short as it was.

    Raises:
        UsageError: it was a script's, or its files are not stored.
        MultinodeError: a file of a run cannot be read.
    """
    for name in recommendations.runs:
        directory = RunDirectory.open(root, name)
        record = read_record(directory)
        job = record.job if record is not None else None
        if record is not None and job is not None and record.settings == recommendations.settings:
            looked_at = {one.path for node in directory.read("facts.json", list[_Paths]) or () for one in node.paths}
            local = tuple(path for path in named_paths(job) if path in looked_at)
            return msgspec.structs.replace(job, local_paths=local)
    raise UsageError(
        "the job that was measured is not stored with its runs, or is a script",
        hint="name it: multinode tune --from RUN train.yaml, or the script after --",
    )


def training_today(root: Path, names: Sequence[str]) -> TrainingState:
    """The training as it stands, by these runs alone and as far as the model is to be trusted.

    Raises:
        UsageError: there is no such run, or they tell too little.
        MultinodeError: a file of one cannot be read.
    """
    evidence = evidence_of(root, names)
    return training_state(trusted(evidence, back_tested(evidence)), [RunDirectory.open(root, name) for name in names])


def _sources(root: Path, name: str) -> tuple[str, ...]:
    """The run itself; of one that tried advice, the runs that this was made from; of a contrast, its sides'."""
    directory = RunDirectory.open(root, name)
    tried = directory.read("advice.json", Recommendations)
    return tried.runs if tried is not None else tuple(run.run_id for run in runs_of(directory))


def training_state(
    evidence: Evidence,
    directories: Sequence[RunDirectory],
    alike: Sequence[Summary] | None = None,
    *,
    link_gbit_per_s: float | None = None,
) -> TrainingState:
    """The training as it stands.

    Args:
        evidence: what its runs tell.
        directories: theirs.
        alike: summaries of runs in just its settings, the newest last; None are those that are stored.
        link_gbit_per_s: as if the nodes had this link; None takes the one that was measured.

    Raises:
        MultinodeError: a file of one cannot be read.
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
        stragglers=alike[-1].stragglers if alike else (),
    )


def _as_today(evidence: Evidence, directories: Sequence[RunDirectory]) -> Iterator[Summary]:
    """Of the runs in just the settings that advice starts from, in whichever order they were named, the newest last."""
    stored = {path.name: place for place, path in enumerate(list_runs(directories[0].path.parent))}
    for directory in sorted(directories, key=lambda one: stored.get(one.run_id, -1)):
        record = read_record(directory)
        if record is None or record.summary is None or record.layout != evidence.today.layout:
            continue
        if record.settings == evidence.subject.settings:
            yield record.summary


def _deepspeed(evidence: Evidence) -> DeepSpeedConfig | None:
    job = evidence.subject.job
    return parse_deepspeed(job.deepspeed_text) if job is not None else None


def _gpu_memory(summaries: Sequence[Summary]) -> GpuMemoryBudget | None:
    """The smallest of the GPUs, and the most that a worker took of one; None without GPUs."""
    nodes = [node for summary in summaries for node in summary.nodes if node.gpus]
    totals = [gpu.memory_total_gib for node in nodes for gpu in node.gpus if gpu.memory_total_gib is not None]
    if not totals:
        return None
    peaks = [peak for node in nodes for peak in node.peak_worker_memory_gib.values()]
    return GpuMemoryBudget(total_gib=min(totals), peak_gib=max(peaks, default=None))


def _unmeasured_gpu_memory(directories: Sequence[RunDirectory]) -> GpuMemoryBudget | None:
    """Of the same GPUs in other settings, whose peak says nothing of these."""
    found = [one for directory in directories if (one := directory.read("summary.json", Summary)) is not None]
    memory = _gpu_memory(found)
    return msgspec.structs.replace(memory, peak_gib=None) if memory is not None else None


def _slots(directories: Sequence[RunDirectory]) -> tuple[int | None, ...]:
    """Of the hostfile's nodes, as the run with the most of them has it: one node alone may have had other GPUs."""
    clusters = [one for directory in directories if (one := directory.read("cluster.json", Cluster)) is not None]
    nodes: tuple[Node, ...] = max((one.nodes for one in reversed(clusters)), key=len, default=())
    return tuple(len(node.gpus) if node.slots is None and node.gpus is not None else node.slots for node in nodes)
