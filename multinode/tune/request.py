"""TuningRequest: what is to be tuned, with which budget and how often; what is known before any run; stored tunings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from multinode.errors import MultinodeError, UsageError
from multinode.job.job import Job, LlamaFactoryJob, describe_job
from multinode.job.job_files import Change
from multinode.job.planning import workers_of_nodes
from multinode.launch.context import Launch
from multinode.launch.offline import plan_offline
from multinode.model.workload import JobSettings, global_batch, read_settings
from multinode.predict.advice import rank_options
from multinode.predict.recommendations import training_today
from multinode.predict.request import read_record
from multinode.predict.run_selection import Record
from multinode.profile.observed import observe_run
from multinode.records.run_directory import RunDirectory, list_runs
from multinode.series.grid import CellRecord, GridRecord, due_turns, fingerprint
from multinode.series.series import Resume, find_series
from multinode.stats.estimate import exactly
from multinode.traffic.algorithms import Layout
from multinode.tune.judge import Tuning, plan
from multinode.tune.trial import (
    DEFAULT_SEED,
    Candidate,
    CandidateTrial,
    LeftOut,
    TrialRun,
    candidate_of,
    make_shortlist,
    read_losses,
    spent_s,
    time_needed_s,
)

_UNFIT = re.compile(r"[^a-z0-9]+")
_LONGEST_LABEL = 40


def list_candidates(
    root: Path, names: Sequence[str], *, steps: int, most: int
) -> tuple[tuple[Candidate, ...], tuple[LeftOut, ...]]:
    """Predicted candidates, best first, and the changes left out.

    Args:
        root: directory of all runs.
        names: of the unchanged training, and of one node if it could be measured.
        steps: of a run of the unchanged training.
        most: maximum number of candidates.
    """
    shortlist = make_shortlist(rank_options(training_today(root, names)), steps=steps, most=most)
    labels = _labels([option.advice.name for option in shortlist.chosen])
    chosen = tuple(map(candidate_of, shortlist.chosen, labels))
    return chosen, shortlist.left_out


def trial_of(root: Path, candidate: Candidate, cell: CellRecord | None) -> CandidateTrial:
    """A candidate with its measured runs; without a cell it was not started."""
    if cell is None:
        return CandidateTrial(candidate=candidate, state="waiting")
    runs = (_trial_run(RunDirectory(root / run_id)) for run_id in cell.run_ids)
    return CandidateTrial(
        candidate=candidate,
        state=cell.state,
        reason=cell.reason,
        runs=tuple(run for run in runs if run is not None),
    )


def find_runs_alike(root: Path, job: Job, layout: Layout) -> dict[int, Record]:
    """The newest stored runs of this very training, by their number of nodes: one, and all of these."""
    records: dict[int, Record] = {}
    settings = read_settings(job)
    for path in reversed(list_runs(root)):
        try:
            record = read_record(RunDirectory(path))
        except MultinodeError:
            # From another release; use another run.
            continue
        if record is None or not record.is_training or not _is_alike(record.settings, settings):
            continue
        if record.layout in {layout, layout.on(1)}:
            records.setdefault(record.layout.nodes, record)
    return records


def run_s(root: Path, run_id: str) -> float | None:
    """Wall time of a stored run; None if unknown."""
    run = RunDirectory(root / run_id).read_run()
    return run.ended_s - run.started_s if run is not None and run.ended_s is not None else None


def _is_alike(ours: JobSettings, theirs: JobSettings) -> bool:
    # The settings of a job's files, which do not tell of levers.
    names = (name for name in JobSettings.__struct_fields__ if name != "levers")
    pairs = ((getattr(ours, name), getattr(theirs, name)) for name in names)
    return all(value == other or None in {value, other} for value, other in pairs)


def _trial_run(directory: RunDirectory) -> TrialRun | None:
    record = read_record(directory)
    if record is None or record.job is None or not record.samples_per_s:
        return None
    config = record.job.config
    batch, seed, rate = (
        global_batch(record.settings, record.layout.workers),
        config.get("seed"),
        config.get("learning_rate"),
    )
    if batch is None:
        return None
    return TrialRun(
        run_id=directory.run_id,
        seed=seed if type(seed) is int else DEFAULT_SEED,
        learning_rate=rate if type(rate) is float else None,
        samples_per_s=record.samples_per_s,
        losses=read_losses(observe_run(directory, record.plan), batch),
    )


def _labels(names: Sequence[str]) -> Iterator[str]:
    taken: set[str] = set()
    for name in names:
        label = _UNFIT.sub("-", name.lower()).strip("-")[:_LONGEST_LABEL].strip("-")
        label = label if label not in taken else f"{label}-{len(taken)}"
        taken.add(label)
        yield label


TUNING_FILE = "tuning.json"
BASELINE, ONE_NODE = "baseline", "one-node"
FIRST = 2
"""Candidates that come before those that are chosen by them."""


class TuningRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be tuned."""

    launch: Launch  # the unchanged job, on all nodes
    steps: int  # of a run of the unchanged training; the others train on as many samples
    seeds: int  # runs of each candidate
    budget_s: float  # for all runs, those of earlier calls included
    most: int  # candidates that are tried, beside the unchanged training and one node alone
    evaluation_samples: int  # that are held out
    # that each candidate's first seed is trained with, ascending; the other seeds have the best of them. Empty leaves
    # all with the job's own.
    learning_rates: tuple[float, ...] = ()
    output: Path | None = None  # where the winner is written; None is the tuning's directory

    @property
    def runs_of_each(self) -> int:
        """Of each candidate: the first seed at every learning rate, and the other seeds."""
        return max(1, len(self.learning_rates)) + self.seeds - 1


def require_tunable(request: TuningRequest) -> None:
    """Refuse what cannot be tuned, before any node is asked.

    Raises:
        UsageError: a script, a single node, or a job that does not say how many samples a step has.
    """
    if len(request.launch.cluster.nodes) == 1:
        raise UsageError(
            "tune compares several nodes with one; there is only one", hint="use a hostfile with two nodes"
        )
    global_batch_of(request, Layout(nodes=1))


def read_tuning(directory: RunDirectory) -> Tuning | None:
    """The stored tuning of a run; None for any other."""
    return directory.read(TUNING_FILE, Tuning)


def load_tuning(directory: RunDirectory, record: GridRecord) -> Tuning | None:
    """The tuning of a grid; None where it lacks candidates of it, as after a crash between two files."""
    tuning = read_tuning(directory)
    if tuning is None or len(tuning.rows) < len(record.cells):
        return None
    return msgspec.structs.replace(tuning, rows=tuning.rows[: len(record.cells)])


def first_two(layout: Layout) -> tuple[Candidate, ...]:
    """The training as it stands, and on the first node alone with as many workers on it."""
    workers, one_node = None if layout.unequal else layout.workers_per_node, Change(nodes=1)
    name = f"unchanged, {layout.nodes} nodes"
    return (
        Candidate(label=BASELINE, name=name, nodes=layout.nodes, workers_per_node=workers),
        Candidate(
            label=ONE_NODE,
            name="one node alone",
            kind="nodes",
            change=one_node,
            nodes=1,
            workers_per_node=layout.on(1).workers,
        ),
    )


def with_expected(candidate: Candidate, samples: int, around_s: float | None) -> Candidate:
    """With what one run takes, as far as that is known."""
    rate = candidate.predicted_samples_per_s
    expected_s = None if around_s is None or rate is None else around_s + samples / rate.value
    return msgspec.structs.replace(candidate, expected_s=expected_s)


def with_seeds(record: GridRecord, request: TuningRequest) -> GridRecord:
    """The grid with as many repeats as are asked for now."""
    return msgspec.structs.replace(record, grid=msgspec.structs.replace(record.grid, repeats=request.runs_of_each))


def job_of(request: TuningRequest) -> LlamaFactoryJob:
    """The job.

    Raises:
        UsageError: it is a script.
    """
    if not isinstance(request.launch.job, LlamaFactoryJob):
        raise UsageError(
            "tune sets the seed, steps and evaluations of a LLaMA-Factory YAML; this is a script",
            hint="for a script: multinode tune --from last --candidates 3 -- train.py",
        )
    return request.launch.job


def global_batch_of(request: TuningRequest, layout: Layout) -> int:
    """Samples of an optimizer step of all workers, as the job stands.

    Raises:
        UsageError: it does not say, or is a script.
    """
    batch = global_batch(read_settings(job_of(request)), layout.workers)
    if batch is None:
        raise UsageError("the number of samples per step is unknown", hint="--set per_device_train_batch_size=1")
    return batch


def samples_of(request: TuningRequest, layout: Layout) -> int:
    """That every run trains on."""
    return request.steps * global_batch_of(request, layout)


def fingerprint_of(request: TuningRequest) -> str:
    """Of all that decides the figures: more seeds or a larger budget go on with what there is."""
    measured: dict[str, Any] = {"tuning": True, "steps": request.steps, "most": request.most}
    measured["held_out"] = request.evaluation_samples
    if request.learning_rates:
        measured["learning_rates"] = request.learning_rates
    measured["workers"] = request.launch.workers_per_node or 0
    return fingerprint({BASELINE: job_of(request)}, request.launch.cluster.nodes, request.launch, measured)


def plan_tuning(request: TuningRequest, runs: Path, resume: Resume) -> Tuning:
    """What would be tried, as far as stored runs tell: of this very tuning, or of the same training.

    Raises:
        UsageError: it cannot be tuned, or the unchanged training cannot be planned.
    """
    require_tunable(request)
    plan_offline(request.launch)
    cluster = request.launch.cluster
    layout = Layout.of(workers_of_nodes(cluster, {}, request.launch.workers_per_node))
    series = None if resume.anew else find_series(runs, fingerprint_of(request))
    if series is not None:
        directory, record = series
        tuning = load_tuning(directory, record)
        if tuning is not None and len(record.cells) > FIRST:
            record = with_seeds(record, request)
            expected = [row.candidate.expected_s for row in tuning.rows]
            due = due_turns(record)
            return msgspec.structs.replace(
                plan(tuning, [row.candidate for row in tuning.rows]),
                seeds=request.seeds,
                budget_s=request.budget_s,
                spent_s=spent_s(record),
                needed_s=time_needed_s(record, due, expected),
                waiting=len(due),
            )
    return _plan_from_others(request, runs, layout)


def _plan_from_others(request: TuningRequest, runs: Path, layout: Layout) -> Tuning:
    samples, candidates = samples_of(request, layout), first_two(layout)
    planned = Tuning(
        run_id="",
        job=describe_job(job_of(request)),
        samples=samples,
        steps=request.steps,
        seeds=request.seeds,
        learning_rates=request.learning_rates,
        budget_s=request.budget_s,
    )
    alike = find_runs_alike(runs, job_of(request), layout)
    row = alike.get(layout.nodes)
    if row is None:
        return plan(planned, candidates)
    names = [record.run_id for record in alike.values()]
    changes, left_out = list_candidates(runs, names, steps=request.steps, most=request.most)
    took_s, steps = run_s(runs, row.run_id), row.summary.steps if row.summary is not None else 0
    # What a run takes beside its samples: start-up, checks, and what it leaves.
    around_s = (
        None if took_s is None else max(0.0, took_s - steps * global_batch_of(request, layout) / row.samples_per_s)
    )
    measured = {nodes: exactly(record.samples_per_s) for nodes, record in alike.items()}
    first = [
        msgspec.structs.replace(candidate, predicted_samples_per_s=measured.get(candidate.nodes))
        for candidate in candidates
    ]
    listed = [with_expected(candidate, samples, around_s) for candidate in (*first, *changes)]
    needed = [candidate.expected_s for candidate in listed]
    planned = msgspec.structs.replace(
        planned,
        left_out=left_out,
        needed_s=None
        if None in needed
        else request.runs_of_each * sum(seconds for seconds in needed if seconds is not None),
        waiting=request.runs_of_each * len(listed),
        notes=(f"from {', '.join(names)}",),
    )
    return plan(planned, listed)
