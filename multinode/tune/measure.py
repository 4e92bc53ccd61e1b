"""Tune a training: the unchanged job, one node, and the best changes, in interleaved runs.

A tuning is a grid whose cells are changes, run and resumed like a sweep. The first two cells decide which changes are
worth a run. Prints nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from multinode.cluster.cluster import Cluster
from multinode.errors import MultinodeError, RunFailed
from multinode.findings.finding import message_of
from multinode.job.job import change_arguments, describe_job, override_text
from multinode.job.job_files import Change, change_text
from multinode.job.planning import workers_of_nodes
from multinode.launch.context import Launch, RunContext
from multinode.launch.launch import benchmark_mode, probe_workers, same_threads
from multinode.model.workload import global_batch, read_settings
from multinode.profile.observed import steps_to_run
from multinode.records.files import write_text
from multinode.records.run_directory import RunDirectory, runs_root
from multinode.series.grid import CellRecord, Grid, GridCell, GridRecord, Turn, due_turns, measuring_order, retry_failed
from multinode.series.series import Resume, find_series, keep_status, status_of, take_up
from multinode.sweep.measure import CellSeries, Measure, measure_cell
from multinode.traffic.algorithms import Layout
from multinode.tune.change import changed_launch
from multinode.tune.judge import TunedRow, Tuning, judge, plan
from multinode.tune.request import (
    FIRST,
    TUNING_FILE,
    TuningRequest,
    fingerprint_of,
    first_two,
    job_of,
    list_candidates,
    load_tuning,
    new_tuning,
    require_tunable,
    trial_of,
    with_seeds,
)
from multinode.tune.trial import (
    BASELINE,
    DEFAULT_SEED,
    Candidate,
    TrialTraining,
    at_best_rate,
    fits,
    spent_s,
    trial_job,
    trial_steps,
)

_WINNER = "tuned.yaml"


class Tuned(msgspec.Struct, frozen=True, kw_only=True):
    """A finished tuning run."""

    tuning: Tuning
    directory: Path  # its directory; its runs are in the same root

    def document(self) -> Tuning:
        """The document of `tune --json`."""
        return self.tuning


def find_tuned(request: TuningRequest, runs: Path, resume: Resume) -> Tuned | None:
    """The newest tuning of the same command that is complete or has used its budget; contacts no node."""
    series = None if resume.anew else find_series(runs, fingerprint_of(request))
    if series is None or series[0].is_locked:
        return None
    directory, record = series
    record = with_seeds(retry_failed(record) if resume.retry_failed else record, request)
    tuning = load_tuning(directory, record)
    if tuning is None or any(cell.state == "running" for cell in record.cells):
        return None
    expected, due = [row.candidate.expected_s for row in tuning.rows], due_turns(record)
    # Of the first two alone nobody knows whether what comes after them was chosen.
    is_chosen = len(record.cells) > FIRST or not due or due[0].number == 1
    if not is_chosen or any(fits(record, turn, expected, request.budget_s) for turn in due):
        return None
    return _conclude(request, directory, record, tuning)


def tune(request: TuningRequest, context: RunContext, resume: Resume, measure: Measure = measure_cell) -> Tuned:
    """Make the remaining runs, interleaved over the seeds, and judge them.

    Args:
        request: the job, and the settings of the tuning.
        context: the nodes.
        resume: how to treat an earlier tuning of the same command.
        measure: makes one run.

    Raises:
        UsageError: it cannot be tuned, or none of the changes that are asked for can be tried.
        RunFailed: the unchanged job has no figures.
        Interrupted: the user stopped it; what was measured is kept, as after any error.
    """
    require_tunable(request)
    finished = find_tuned(request, context.runs, resume)
    if finished is not None:
        return finished
    layout = request.layout or Layout.of(probe_workers(request.launch, context.agent))
    if request.sources:
        # What cannot be tried is refused before anything is stored.
        list_candidates(request, context.runs, request.sources, layout)
    directory = _take_up(request, context, resume, layout)
    with directory.lock():
        tuner = _Tuner(request, context, directory, layout, measure)
        try:
            tuner.run(retries_failed=resume.retry_failed)
        except BaseException as error:
            tuner.conclude(status_of(error), error)
            raise
        return tuner.conclude("succeeded")


def measure_tuned(
    request: TuningRequest,
    resume: Resume,
    connected: Callable[[Cluster], AbstractContextManager[RunContext]],
    note: Callable[[str], None],
) -> Tuned:
    """Run `tune`; connects to the nodes only if there is something to measure.

    Args:
        request: the job, and the settings of the tuning.
        resume: how to treat an earlier tuning of the same command.
        connected: connects to nodes.
        note: is told if all was measured before.

    Raises:
        UsageError: it cannot be tuned.
    """
    require_tunable(request)
    finished = find_tuned(request, runs_root(), resume)
    if finished is not None:
        note(f"tuning {finished.directory.name} has already measured this; use --fresh to measure again")
        return finished
    with connected(request.launch.cluster) as context:
        return tune(request, context, resume)


class _Tuner:
    """A tuning in progress; this process owns its directory."""

    def __init__(
        self, request: TuningRequest, context: RunContext, directory: RunDirectory, layout: Layout, measure: Measure
    ) -> None:
        self._request = request
        self._context = context
        self._directory = directory
        self._layout = layout
        self._series = CellSeries(context, directory, self._launch_of, measure)
        self._series.keep(with_seeds(self._series.record, request))
        stored = load_tuning(directory, self._series.record)
        self._tuning = stored if stored is not None else self._begin()
        if request.sources and len(self._candidates) == FIRST:
            self._list(request.sources)
        workers = [*layout.counts, *(candidate.workers_per_node or 1 for candidate in self._candidates)]
        self._launch = benchmark_mode(same_threads(request.launch, workers, context, "in every run"))
        self._job = job_of(msgspec.structs.replace(request, launch=self._launch))

    def run(self, *, retries_failed: bool) -> None:
        """Run the first two, then the chosen candidates, then all for every seed."""
        if retries_failed:
            self._series.keep(retry_failed(self._series.record))
        if len(self._candidates) == FIRST:
            self._run(lambda turn: turn.number == 1 and self._fits(turn))
            if any(turn.number == 1 for turn in due_turns(self._series.record)):
                # Without both, nothing can be predicted.
                return
            baseline, alone = self._series.record.cells
            self._require(baseline)
            self._list([baseline.run_ids[0], *alone.run_ids[:1]])
        self._run(self._fits)
        if not any(turn.cell == 0 for turn in due_turns(self._series.record)):
            self._require(self._series.record.cells[0])

    def conclude(self, status: str, error: BaseException | None = None) -> Tuned:
        """Judge and store the results; an error while storing does not invalidate them."""
        record = self._series.record
        tuned = Tuned(tuning=self._tuning, directory=self._directory.path)
        try:
            tuned = _conclude(self._request, self._directory, record, self._tuning)
        except MultinodeError as why:
            if status == "succeeded":
                raise
            self._context.say(f"the results cannot be evaluated yet: {why}")
        finally:
            with contextlib.suppress(MultinodeError):
                keep_status(self._directory, status, error=error)
        return tuned

    @property
    def _candidates(self) -> tuple[Candidate, ...]:
        return tuple(row.candidate for row in self._tuning.rows)

    def _begin(self) -> Tuning:
        request, first, record = self._request, first_two(self._layout), self._series.record
        # The choice is no longer stored and is made again.
        self._series.keep(msgspec.structs.replace(record, cells=record.cells[:FIRST]))
        tuning = plan(new_tuning(request, self._directory.run_id, self._layout), first)
        self._directory.write(TUNING_FILE, tuning)
        return tuning

    def _require(self, baseline: CellRecord) -> None:
        if not baseline.run_ids:
            reason = message_of(baseline.why) or "its run would have exceeded the budget"
            raise RunFailed(
                f"the unchanged job has no figures: {reason}",
                hint=f"all results are in {self._directory.path}",
            ).of_run(baseline.last_run)

    def _list(self, names: Sequence[str]) -> None:
        record = self._series.record
        listed, left_out = list_candidates(self._request, self._context.runs, names, self._layout)
        candidates = (*self._candidates, *listed)
        tuning = msgspec.structs.replace(self._tuning, left_out=left_out)
        self._tuning = plan(tuning, candidates)
        # In this order: a grid that is stored has its candidates.
        self._directory.write(TUNING_FILE, self._tuning)
        cells = tuple(CellRecord(cell=_cell(candidate)) for candidate in listed)
        self._series.keep(msgspec.structs.replace(record, cells=(*record.cells, *cells)))
        names_listed = ", ".join(candidate.name for candidate in listed) or "no change"
        self._context.say(f"changes to try, besides one node: {names_listed}")

    def _run(self, may_begin: Callable[[Turn], bool]) -> None:
        record = self._series.record
        self._series.run(list(measuring_order(record.grid, [row.cell for row in record.cells])), may_begin)

    def _fits(self, turn: Turn) -> bool:
        return fits(
            self._series.record, turn, [candidate.expected_s for candidate in self._candidates], self._request.budget_s
        )

    def _launch_of(self, cell: GridCell, number: int) -> Launch:
        candidate = next(listed for listed in self._candidates if listed.label == cell.label)
        rate, seed = self._rate_and_seed(cell, number)
        launch, job = self._launch, self._job
        if self._request.judge == "speed":
            # Before the change, which may need more steps.
            training = TrialTraining(steps=steps_to_run(self._request.steps), seed=seed)
            launch = msgspec.structs.replace(launch, job=trial_job(job, training))
            return changed_launch(launch, candidate.change, self._layout)
        changed = changed_launch(launch, candidate.change, self._layout)
        job = job_of(msgspec.structs.replace(self._request, launch=changed))
        workers = sum(workers_of_nodes(changed.cluster, {}, changed.workers_per_node))
        batch = global_batch(read_settings(job), workers)
        every = changed.levers.round_steps
        training = TrialTraining(
            steps=trial_steps((self._tuning.samples or 0) * candidate.samples_ratio, batch or 1, every),
            seed=seed,
            every=every,
            evaluation_samples=self._request.evaluation_samples,
        )
        if rate is not None:
            job = change_arguments(job, {"learning_rate": rate})
        return msgspec.structs.replace(changed, job=trial_job(job, training))

    def _rate_and_seed(self, cell: GridCell, number: int) -> tuple[float | None, int]:
        seed = self._job.arguments.get("seed")
        first = seed if type(seed) is int else DEFAULT_SEED
        record = next(recorded for recorded in self._series.record.cells if recorded.cell.label == cell.label)
        candidate = next(listed for listed in self._candidates if listed.label == cell.label)
        trial = trial_of(self._context.runs, candidate, record, self._request.judge)
        rates = self._request.learning_rates
        best = at_best_rate(trial).runs[0].learning_rate if rates and trial.runs else None
        wanted: list[tuple[float | None, int]] = [(rate, first) for rate in rates or (None,)]
        wanted += [(best, first + more) for more in range(1, self._request.seeds)]
        made = {(run.learning_rate if rates else None, run.seed) for run in trial.runs}
        return next((seed for seed in (wanted[number - 1], *wanted) if seed not in made), wanted[number - 1])


def _conclude(request: TuningRequest, directory: RunDirectory, record: GridRecord, tuning: Tuning) -> Tuned:
    cells = {cell_record.cell.label: cell_record for cell_record in record.cells}
    runs = directory.path.parent
    judged = judge(
        msgspec.structs.replace(
            tuning,
            seeds=request.seeds,
            budget_s=request.budget_s,
            spent_s=spent_s(record),
            waiting=len(due_turns(record)),
            file="",
        ),
        [trial_of(runs, row.candidate, cells.get(row.candidate.label), request.judge) for row in tuning.rows],
    )
    winner = judged.row(judged.recommended)
    if winner is not None and (winner.candidate.label != BASELINE or winner.rates):
        path = request.output or directory.path / _WINNER
        comment = (
            f"{winner.candidate.name}, from multinode tune {directory.run_id}. Use: multinode launch --with {path.name}"
        )
        write_text(path, change_text(_whole_change(winner), comment))
        judged = msgspec.structs.replace(judged, file=str(path))
    directory.write(TUNING_FILE, judged)
    return Tuned(tuning=judged, directory=directory.path)


def _whole_change(row: TunedRow) -> Change:
    candidate = row.candidate
    rate = (override_text("learning_rate", row.learning_rate),) if row.rates else ()
    return candidate.change.joined(
        Change(overrides=rate, nodes=candidate.nodes, workers_per_node=candidate.workers_per_node)
    )


def _take_up(request: TuningRequest, context: RunContext, resume: Resume, layout: Layout) -> RunDirectory:
    record = GridRecord(
        fingerprint=fingerprint_of(request),
        command=describe_job(job_of(request)),
        grid=Grid(nodes=(layout.nodes, 1), repeats=request.runs_of_each),
        cells=tuple(CellRecord(cell=_cell(candidate)) for candidate in first_two(layout)),
        steps=request.steps,
    )
    return take_up(request.launch, record, context, resume, workers=layout.workers)


def _cell(candidate: Candidate) -> GridCell:
    return GridCell(label=candidate.label, nodes=candidate.nodes, workers_per_node=candidate.workers_per_node)
