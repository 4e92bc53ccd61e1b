"""TuningRequest: what is to be tuned, with which budget and how often; what is known before any run; stored tunings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from multinode.errors import MultinodeError, UsageError
from multinode.job.job import Job, describe_job, set_options
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
from multinode.records.benchmark import Benchmark
from multinode.records.run_directory import RunDirectory, list_runs
from multinode.series.grid import CellRecord, GridRecord, due_turns, fingerprint
from multinode.series.series import Resume, find_series
from multinode.stats.estimate import exactly
from multinode.traffic.algorithms import Layout
from multinode.tune.judge import Tuning, plan
from multinode.tune.trial import (
    BASELINE,
    DEFAULT_SEED,
    ONE_NODE,
    Candidate,
    CandidateTrial,
    Judge,
    LeftOut,
    Losses,
    TrialRun,
    candidate_of,
    make_shortlist,
    read_losses,
    spent_s,
    time_needed_s,
)

_UNFIT = re.compile(r"[^a-z0-9]+")
_LONGEST_LABEL = 40


def trial_of(root: Path, candidate: Candidate, cell: CellRecord | None, judge: Judge) -> CandidateTrial:
    """A candidate with its measured runs, by loss with their losses; without a cell it was not started."""
    if cell is None:
        return CandidateTrial(candidate=candidate, state="waiting")
    runs = (_trial_run(RunDirectory(root / run_id), number, judge) for number, run_id in enumerate(cell.run_ids))
    return CandidateTrial(
        candidate=candidate,
        state=cell.state,
        why=cell.why,
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


def run_s(directory: RunDirectory) -> float | None:
    """Wall time of a stored run; None if unknown."""
    run = directory.read_run()
    return run.ended_s - run.started_s if run is not None and run.ended_s is not None else None


def _is_alike(ours: JobSettings, theirs: JobSettings) -> bool:
    # The settings of a job's files, which do not tell of levers.
    names = (name for name in JobSettings.__struct_fields__ if name != "levers")
    pairs = ((getattr(ours, name), getattr(theirs, name)) for name in names)
    return all(value == other or None in {value, other} for value, other in pairs)


def _trial_run(directory: RunDirectory, number: int, judge: Judge) -> TrialRun | None:
    record = read_record(directory)
    if record is None or not record.samples_per_s:
        return None
    # A script has no seed of ours: its runs are told apart by their number.
    config = record.job.arguments if record.job is not None else {}
    seed, rate = config.get("seed"), config.get("learning_rate")
    losses, batch = Losses(), global_batch(record.settings, record.layout.workers)
    if judge == "loss":
        if batch is None:
            return None
        losses = read_losses(observe_run(directory, record.plan), batch)
    return TrialRun(
        run_id=directory.run_id,
        seed=seed if type(seed) is int else DEFAULT_SEED + number,
        learning_rate=rate if type(rate) is float else None,
        samples_per_s=record.samples_per_s,
        losses=losses,
    )


def _labels(names: Sequence[str]) -> Iterator[str]:
    taken: set[str] = set()
    for name in names:
        label = _UNFIT.sub("-", name.lower()).strip("-")[:_LONGEST_LABEL].strip("-")
        label = label if label not in taken else f"{label}-{len(taken)}"
        taken.add(label)
        yield label


TUNING_FILE = "tuning.json"
FIRST = 2
"""Candidates that come before those that are chosen by them."""


class TuningRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be tuned."""

    launch: Launch  # the unchanged job, on all nodes
    judge: Judge = "loss"
    sources: tuple[str, ...] = ()  # stored runs that changes are predicted from; empty measures the training first
    layout: Layout | None = None  # of the unchanged job in the sources; None without sources
    picks: tuple[str, ...] = ()  # parts of names; only changes with one of them are tried. Empty is all
    link_measured: float | None = None  # Gbit/s of the measured link, if the NICs did not report it
    steps: int  # of a run of the unchanged job
    seeds: int  # runs of each candidate
    budget_s: float  # for all runs, those of earlier calls included
    most: int  # candidates that are tried, beside the unchanged job and one node alone
    evaluation_samples: int = 64  # that are held out, by loss
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
        UsageError: a single node; by loss a script, or a job that does not say how many samples a step has.
    """
    if len(request.launch.cluster.nodes) == 1:
        raise UsageError(
            "tune compares several nodes with one, but there is only one node",
            hint="use a hostfile with two or more nodes",
        )
    if request.layout is not None and request.layout.nodes == 1:
        raise UsageError(
            f"{', '.join(request.sources)}: the measured training ran on one node",
            hint="name a run on several nodes, or leave out --from",
        )
    samples_of(request, Layout(nodes=1))


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


def _with_expected(
    candidate: Candidate, request: TuningRequest, samples: int | None, around_s: float | None
) -> Candidate:
    rate = candidate.predicted_samples_per_s
    if samples is None or around_s is None or rate is None:
        return candidate
    # By speed, all runs have as many steps.
    samples_of_run = samples * (candidate.step_ratio if request.judge == "speed" else candidate.samples_ratio)
    return msgspec.structs.replace(candidate, expected_s=around_s + samples_of_run / rate.value)


def with_seeds(record: GridRecord, request: TuningRequest) -> GridRecord:
    """The grid with as many repeats as are asked for now."""
    return msgspec.structs.replace(record, grid=msgspec.structs.replace(record.grid, repeats=request.runs_of_each))


def job_of(request: TuningRequest) -> Job:
    """The job.

    Raises:
        UsageError: it trains nothing, or is a script and judged by its loss.
    """
    job = request.launch.job
    if isinstance(job, Benchmark) or (request.judge == "loss" and job.training is None):
        raise UsageError(
            "tune sets the seed, steps and evaluations in a YAML job, but this job is a script",
            hint="judge a script by its speed: --judge speed",
        )
    return job


def samples_of(request: TuningRequest, layout: Layout) -> int | None:
    """Samples of a run of the unchanged job; None if a job judged by speed does not say.

    Raises:
        UsageError: a job judged by loss does not say, or is a script.
    """
    job = job_of(request)
    batch = global_batch(read_settings(job), layout.workers)
    if batch is None and request.judge == "loss":
        raise UsageError(
            "the number of samples per step is unknown", hint=set_options(job, per_device_train_batch_size=1) or None
        )
    # A script decides how many steps it makes.
    return request.steps * batch if batch is not None and job.training is not None else None


def list_candidates(
    request: TuningRequest, root: Path, names: Sequence[str], layout: Layout
) -> tuple[tuple[Candidate, ...], tuple[LeftOut, ...]]:
    """Predicted candidates, best first, and the changes left out.

    Args:
        request: how many there are and how they are judged.
        root: directory of all runs.
        names: of the unchanged job, and of one node if it could be measured.
        layout: of the unchanged job.

    Raises:
        UsageError: none of the changes that are asked for can be tried.
    """
    shortlist = make_shortlist(
        rank_options(training_today(root, names, link_measured=request.link_measured)),
        steps=request.steps,
        most=request.most,
        judge=request.judge,
        picks=request.picks,
    )
    labels = _labels([option.advice.name for option in shortlist.chosen])
    samples, around_s = samples_of(request, layout), _around_s(root, names[0])
    chosen = map(candidate_of, shortlist.chosen, labels)
    return tuple(_with_expected(candidate, request, samples, around_s) for candidate in chosen), shortlist.left_out


def _around_s(root: Path, name: str) -> float | None:
    """What a run takes beside its samples: start-up, checks, and what it leaves; None if unknown."""
    directory = RunDirectory.open(root, name)
    record, took_s = read_record(directory), run_s(directory)
    if record is None or record.summary is None or took_s is None or not record.samples_per_s:
        return None
    batch = global_batch(record.settings, record.layout.workers)
    return None if batch is None else max(0.0, took_s - record.summary.steps * batch / record.samples_per_s)


def fingerprint_of(request: TuningRequest) -> str:
    """Of all that decides the figures: more seeds or a larger budget go on with what there is."""
    measured: dict[str, Any] = {"tuning": request.judge, "steps": request.steps, "most": request.most}
    measured |= {"sources": request.sources, "picks": request.picks, "link": request.link_measured or 0}
    if request.judge == "loss":
        measured["held_out"] = request.evaluation_samples
    if request.learning_rates:
        measured["learning_rates"] = request.learning_rates
    measured["workers"] = request.launch.workers_per_node or 0
    return fingerprint({BASELINE: job_of(request)}, request.launch.cluster.nodes, request.launch, measured)


def plan_tuning(request: TuningRequest, runs: Path, resume: Resume) -> Tuning:
    """What would be tried, as far as stored runs tell: of this very tuning, or of the same training.

    Raises:
        UsageError: it cannot be tuned, or the unchanged job cannot be planned.
    """
    require_tunable(request)
    plan_offline(request.launch)
    cluster = request.launch.cluster
    layout = request.layout or Layout.of(workers_of_nodes(cluster, {}, request.launch.workers_per_node))
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


def new_tuning(request: TuningRequest, run_id: str, layout: Layout) -> Tuning:
    """A tuning without candidates."""
    return Tuning(
        run_id=run_id,
        job=describe_job(job_of(request)),
        judged_by=request.judge,
        sources=request.sources,
        samples=samples_of(request, layout) if request.judge == "loss" else None,
        steps=request.steps,
        seeds=request.seeds,
        learning_rates=request.learning_rates,
    )


def _plan_from_others(request: TuningRequest, runs: Path, layout: Layout) -> Tuning:
    candidates = first_two(layout)
    planned = msgspec.structs.replace(new_tuning(request, "", layout), budget_s=request.budget_s)
    alike = find_runs_alike(runs, job_of(request), layout)
    names = request.sources or tuple(record.run_id for _, record in sorted(alike.items(), reverse=True))
    if not request.sources and layout.nodes not in alike:
        return plan(planned, candidates)
    changes, left_out = list_candidates(request, runs, names, layout)
    samples, around_s = samples_of(request, layout), _around_s(runs, names[0])
    first = []
    for candidate in candidates:
        record = alike.get(candidate.nodes)
        rate = exactly(record.samples_per_s) if record is not None else None
        known = msgspec.structs.replace(
            candidate, predicted_samples_per_s=rate, step_ratio=layout.on(candidate.nodes).workers / layout.workers
        )
        first.append(_with_expected(known, request, samples, around_s))
    listed = (*first, *changes)
    needed = [candidate.expected_s for candidate in listed]
    planned = msgspec.structs.replace(
        planned,
        left_out=left_out,
        needed_s=None
        if None in needed
        else request.runs_of_each * sum(seconds for seconds in needed if seconds is not None),
        waiting=request.runs_of_each * len(listed),
        sources=names,
    )
    return plan(planned, listed)
