"""One cell of a sweep: its launch, one run of it, and how that ended. Stores no grid."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from multinode.check.rule import CheckFinding
from multinode.cluster.facts import NodeFacts
from multinode.contrast.measure import cut_job
from multinode.errors import Interrupted, MultinodeError, NodeError, NodeFailed, UsageError
from multinode.job.deepspeed import fit_batch
from multinode.job.job import Job, LlamaFactoryJob, limit_steps
from multinode.job.planning import with_workers, workers_of_nodes
from multinode.job.synthetic import with_synthetic
from multinode.launch.context import Launch, Launched, Prepared, RunContext
from multinode.launch.grid import CellOutcome, Grid, GridCell, Turn, judge_run, retry_failed
from multinode.launch.launch import PATIENCE_S, benchmark_mode, prepare, run_prepared, wait_for_gpus
from multinode.launch.node_runs import cleanup_nodes
from multinode.launch.request import StopRequest
from multinode.launch.series import Series, figures_lack
from multinode.profile.summary import Summary
from multinode.records.progress import RunProgress, TrainingTime
from multinode.records.run import Failure, new_run
from multinode.records.run_directory import RunDirectory

_S_PER_MINUTE = 60


class CellTraining(msgspec.Struct, frozen=True, kw_only=True):
    """How each cell is trained."""

    steps: int | None = None  # measured steps per run, after the warm-up; None uses 30, or all of the job
    minutes: float | None = None  # training time per run instead, including the warm-up
    synthetic: bool = False  # whether to use synthetic data


class AskedGrid(msgspec.Struct, frozen=True, kw_only=True):
    """The grid to measure."""

    launch: Launch  # all nodes of the hostfile, and the layout of each cell; its job is replaced by the cell's
    job: Job  # the user's, without the settings of the grid
    grid: Grid
    cells: tuple[GridCell, ...]  # of the grid, in its order
    jobs: dict[str, Job]  # the user's job with the settings of each cell, by label
    training: CellTraining = CellTraining()  # duration and data


class CellRun(msgspec.Struct, frozen=True, kw_only=True):
    """A finished run of a cell."""

    launched: Launched
    in_time: bool = False  # whether it was stopped at its time limit


def cell_workers(asked: AskedGrid, cell: GridCell, facts: Mapping[str, NodeFacts]) -> tuple[int, ...]:
    """Workers of each node of a cell; `facts` may be empty where the hostfile says it."""
    return workers_of_nodes(asked.launch.cluster.first(cell.nodes), facts, cell.workers_per_node)


def cell_launch(asked: AskedGrid, cell: GridCell, workers: Sequence[int]) -> Launch:
    """The launch that measures a cell, for its figures alone."""
    what = asked.launch
    job = _cut(asked.jobs[cell.label], asked.training)
    if isinstance(job, LlamaFactoryJob):
        job = fit_batch(job, sum(workers))
    if asked.training.synthetic:
        job = with_synthetic(job)
    cluster, options = with_workers(what.cluster.first(cell.nodes), what.options, workers)
    return benchmark_mode(msgspec.structs.replace(what, cluster=cluster, job=job, options=options))


def measure_cell(
    what: Launch, context: RunContext, minutes: float | None = None, *, patience_s: float = PATIENCE_S
) -> CellRun:
    """One run on free GPUs, removed from the nodes afterwards; a failed run is a result.

    Args:
        what: the launch.
        context: the nodes.
        minutes: training time before it is stopped; None trains its steps.
        patience_s: maximum wait for busy GPUs.

    Raises:
        UsageError, NodeError, NodeFailed: it could not be prepared.
        Interrupted: the user stopped it before it started.
    """
    prepared = prepare(what, context)
    held = wait_for_gpus(prepared, context, patience_s=patience_s)
    if context.stop.count:
        raise Interrupted("interrupted")
    if held is not None:
        return CellRun(launched=_refuse(prepared, held))
    limited, timed = (context, None) if minutes is None else with_time_limit(context, minutes * _S_PER_MINUTE)
    with context.stop.heard():
        launched = run_prepared(prepared, limited)
    cleanup_nodes(launched, what.cluster, context)
    return CellRun(launched=launched, in_time=timed is not None and timed.is_over)


def _cut(job: Job, training: CellTraining) -> Job:
    if training.minutes is None:
        return cut_job(job, training.steps)
    # It must not end before its time.
    return limit_steps(job, STEPS_WITHOUT_END) if isinstance(job, LlamaFactoryJob) else job


def _refuse(prepared: Prepared, held: CheckFinding) -> Launched:
    plan, now_s = prepared.plan, time.time()
    run = new_run(plan, now_s)
    nodes = tuple(msgspec.structs.replace(node, state="ended", cause="not_started") for node in run.nodes)
    where = next((node for node in nodes if node.name == held.node), nodes[0])
    run = msgspec.structs.replace(
        run,
        status="failed",
        ended_s=now_s,
        nodes=nodes,
        first_failure=Failure(
            node=where.name, node_rank=where.node_rank, message=held.message, hint=held.hint, kind="gpu_held"
        ),
        kind=prepared.what.execute.kind,
    )
    prepared.directory.write("run.json", run)
    nothing = Summary(run_id=plan.run_id, steps=0, steady_steps=0, rule="")
    return Launched(run=run, summary=nothing, plan=plan, directory=prepared.directory)


STEPS_WITHOUT_END = 1_000_000
"""Steps of a training that ends only by its time limit."""


class TimedStop:
    """Watches the progress of one run, and stops it at its time limit.

    The time starts with the first step of any node, after loading and the first compilation.

    Args:
        user: the user's stop request, which is passed on.
        limit_s: of training.
        clock: monotonic seconds.
    """

    def __init__(self, user: StopRequest, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.stop = StopRequest()
        self._user = user
        self._limit_s = limit_s
        self._clock = clock
        self._passed_on = 0
        self._began: float | None = None
        # Whether the run was stopped at its limit; a user's stop afterwards does not change that.
        self.is_over = False

    def look(self, progress: RunProgress) -> None:
        """Update the progress, and stop the run if its time is up."""
        while self._passed_on < self._user.count:
            self._passed_on += 1
            self.stop.ask(self._user.reason)
        if self._began is None and any(node.step for node in progress.nodes):
            self._began = self._clock()
        if self._trained_s >= self._limit_s and self._began is not None and not self.stop.count:
            self.is_over = True
            self.stop.ask("its time is up")

    def show(self, progress: RunProgress) -> RunProgress:
        """The progress by time, without the nominal number of steps."""
        nodes = tuple(
            msgspec.structs.replace(node, total_steps=None) if node.total_steps == STEPS_WITHOUT_END else node
            for node in progress.nodes
        )
        training = TrainingTime(limit_s=self._limit_s, trained_s=self._trained_s)
        return msgspec.structs.replace(progress, nodes=nodes, training=training)

    @property
    def _trained_s(self) -> float:
        return 0.0 if self._began is None else self._clock() - self._began


def with_time_limit(context: RunContext, limit_s: float) -> tuple[RunContext, TimedStop]:
    """The run context with a time limit, and its stop."""
    timed = TimedStop(context.stop, limit_s)
    limited = context.with_stop(timed.stop)

    def observe(progress: RunProgress) -> None:
        timed.look(progress)
        context.observe(timed.show(progress))

    limited.observe = observe
    return limited, timed


Measure = Callable[[Launch, RunContext, float | None], CellRun]
LaunchOf = Callable[[GridCell, int], Launch]
# After this many first cells refused for the same reason, the rest would fare no better.
_MOST_REFUSED = 2


class CellSeries(Series):
    """The runs of a grid, whose failures are results.

    Args:
        context: the nodes.
        directory: held by this process.
        launch_of: the launch that measures a cell, the first time, the second, and so on.
        measure: makes one run.
    """

    def __init__(
        self, context: RunContext, directory: RunDirectory, launch_of: LaunchOf, measure: Measure = measure_cell
    ) -> None:
        super().__init__(context, directory)
        self._launch_of = launch_of
        self._measure_cell = measure
        # Whether a run has finished in this process.
        self._has_run = False
        # Cells refused before any run.
        self._refused: list[int] = []

    def measure(self, turn: Turn, run_id: str) -> CellOutcome:
        """Make a run."""
        try:
            what = self._launch_of(self.record.cells[turn.cell].cell, turn.number)
            run = self._measure_cell(msgspec.structs.replace(what, run_id=run_id), self.context, self.record.minutes)
        except (NodeError, NodeFailed, UsageError) as error:
            if self._hits_all(turn.cell, error):
                self.keep(retry_failed(self.record, self._refused))
                raise
            return CellOutcome(state="failed", reason=str(error), unreachable=isinstance(error, NodeError))
        self._has_run = True
        outcome = judge_run(run.launched.run, in_time=run.in_time, lacks=figures_lack(run.launched))
        return msgspec.structs.replace(outcome, value=run.launched.summary.samples_per_s)

    def _hits_all(self, cell: int, error: MultinodeError) -> bool:
        if isinstance(error, NodeError) or self._has_run:
            return not self._has_run
        if any(other.run_ids for other in self.record.cells):
            return False
        alike = all(self.record.cells[other].reason == str(error) for other in self._refused)
        self._refused.append(cell)
        return alike and len(self._refused) == min(_MOST_REFUSED, len(self.record.cells))
