"""The sweep: cells of a grid, each an ordinary run, and its table. Nothing is measured twice."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from multinode.check.rule import CheckFinding
from multinode.cluster.cluster import Cluster
from multinode.cluster.facts import NodeFacts
from multinode.contrast.measure import cut_job
from multinode.contrast.side import CONTRAST_FILE, StoredSchema
from multinode.errors import Interrupted, MultinodeError, NodeError, NodeFailed, UsageError
from multinode.findings.finding import Finding
from multinode.job.deepspeed import fit_batch
from multinode.job.job import Job, describe_job, limit_steps
from multinode.job.planning import with_workers, workers_of_nodes
from multinode.job.synthetic import with_synthetic
from multinode.launch.context import Launch, Launched, RunContext, StopRequest
from multinode.launch.launch import (
    benchmark_mode,
    prepare,
    probe_nodes,
    run_prepared,
    same_threads,
)
from multinode.launch.node_runs import cleanup_nodes
from multinode.launch.offline import plan_offline
from multinode.profile.summary import Summary
from multinode.records.progress import RunProgress, TrainingTime
from multinode.records.run import Failure, new_run
from multinode.records.run_directory import RunDirectory, list_runs, runs_root
from multinode.records.status import Status
from multinode.runs.stored_run import StoredRun
from multinode.series.grid import (
    REFUSED,
    CellOutcome,
    CellRecord,
    Grid,
    GridCell,
    GridRecord,
    Turn,
    fingerprint,
    is_finished,
    judge_run,
    measuring_order,
    retry_failed,
)
from multinode.series.series import (
    GRID_FILE,
    PATIENCE_S,
    Resume,
    Series,
    figures_lack,
    find_series,
    keep_status,
    status_of,
    take_up,
    wait_for_gpus,
)
from multinode.stats.estimate import value_of
from multinode.sweep.figures import MEASURED, CellTable
from multinode.sweep.table import Look, combine, look_at, table_of_sweep

_S_PER_MINUTE = 60


class CellTraining(msgspec.Struct, frozen=True, kw_only=True):
    """How each cell is trained."""

    steps: int | None = None  # measured steps per run, after the warm-up; None uses 30, or all of the job
    minutes: float | None = None  # training time per run instead, including the warm-up
    synthetic: bool = False  # whether to use synthetic data


class GridRequest(msgspec.Struct, frozen=True, kw_only=True):
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


def cell_workers(request: GridRequest, cell: GridCell, facts: Mapping[str, NodeFacts]) -> tuple[int, ...]:
    """Workers of each node of a cell; `facts` may be empty where the hostfile says it."""
    return workers_of_nodes(request.launch.cluster.first(cell.nodes), facts, cell.workers_per_node)


def cell_launch(request: GridRequest, cell: GridCell, workers: Sequence[int]) -> Launch:
    """The launch that measures a cell, for its figures alone."""
    launch = request.launch
    job = fit_batch(_cut(request.jobs[cell.label], request.training), sum(workers))
    if request.training.synthetic:
        job = with_synthetic(job)
    cluster, launch = with_workers(launch.cluster.first(cell.nodes), launch, workers)
    return benchmark_mode(msgspec.structs.replace(launch, cluster=cluster, job=job))


def measure_cell(
    launch: Launch, context: RunContext, minutes: float | None = None, *, patience_s: float = PATIENCE_S
) -> CellRun:
    """One run on free GPUs, removed from the nodes afterwards; a failed run is a result.

    Args:
        launch: the launch.
        context: the nodes.
        minutes: training time before it is stopped; None trains its steps.
        patience_s: maximum wait for busy GPUs.

    Raises:
        UsageError, NodeError, NodeFailed: it could not be prepared.
        Interrupted: the user stopped it before it started.
    """
    prepared = prepare(launch, context)
    held = wait_for_gpus(prepared, launch.cluster, context, patience_s=patience_s)
    if context.stop.count:
        raise Interrupted("interrupted")
    if held is not None:
        return CellRun(launched=_refuse(prepared, held, launch.execute.kind, context.part_of))
    limited, timed = (context, None) if minutes is None else with_time_limit(context, minutes * _S_PER_MINUTE)
    with context.stop.heard():
        launched = run_prepared(launch, prepared, limited)
    cleanup_nodes(launched, launch.cluster, context)
    return CellRun(launched=launched, in_time=timed is not None and timed.is_over)


def _cut(job: Job, training: CellTraining) -> Job:
    if training.minutes is None:
        return cut_job(job, training.steps)
    # It must not end before its time.
    return limit_steps(job, STEPS_WITHOUT_END)


def _refuse(prepared: StoredRun, held: CheckFinding, kind: str, part_of: str | None) -> Launched:
    plan, now_s = prepared.require_plan(), time.time()
    run = new_run(plan, now_s, part_of)
    not_started = Status(cause="not_started")
    nodes = tuple(msgspec.structs.replace(node, state="ended", status=not_started) for node in run.nodes)
    where = next((node for node in nodes if node.name == held.node), nodes[0])
    run = msgspec.structs.replace(
        run,
        status="failed",
        ended_s=now_s,
        nodes=nodes,
        first_failure=Failure(
            node=where.name, node_rank=where.node_rank, message=held.message, hint=held.hint, kind="gpu_held"
        ),
        kind=kind,
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
            turn_launch = self._launch_of(self.record.cells[turn.cell].cell, turn.number)
            run = self._measure_cell(
                msgspec.structs.replace(turn_launch, run_id=run_id), self.context, self.record.minutes
            )
        except (NodeError, NodeFailed, UsageError) as error:
            if self._hits_all(turn.cell, error):
                self.keep(retry_failed(self.record, self._refused))
                raise
            return CellOutcome(state="failed", why=_refused(error), unreachable=isinstance(error, NodeError))
        self._has_run = True
        outcome = judge_run(run.launched.run, in_time=run.in_time, lacks=figures_lack(run.launched))
        return msgspec.structs.replace(outcome, value=value_of(run.launched.summary.samples_per_s))

    def _hits_all(self, cell: int, error: MultinodeError) -> bool:
        if isinstance(error, NodeError) or self._has_run:
            return not self._has_run
        if any(other.run_ids for other in self.record.cells):
            return False
        alike = all(self.record.cells[other].why == _refused(error) for other in self._refused)
        self._refused.append(cell)
        return alike and len(self._refused) == min(_MOST_REFUSED, len(self.record.cells))


def _refused(error: MultinodeError) -> Finding:
    return REFUSED.found(None, error=str(error))


Conclude = Callable[[RunDirectory, Path], object]


class Swept(msgspec.Struct, frozen=True, kw_only=True):
    """A finished sweep."""

    record: GridRecord
    directory: Path  # its directory; its runs are in the same root


def find_finished(request: GridRequest, runs: Path, resume: Resume) -> Swept | None:
    """The newest sweep of the same command that is complete; contacts no node."""
    series = None if resume.anew else find_series(runs, new_record(request).fingerprint)
    if series is None:
        return None
    directory, record = series
    record = retry_failed(record) if resume.retry_failed else record
    return Swept(record=record, directory=directory.path) if is_finished(record) else None


def sweep(
    request: GridRequest, context: RunContext, resume: Resume, conclude: Conclude, measure: Measure = measure_cell
) -> Swept:
    """Measure every unmeasured cell, in an order that finds out-of-memory early.

    Args:
        request: the grid and its job.
        context: the nodes.
        resume: how to treat an earlier sweep of the same command.
        conclude: makes the table of all results, whenever the sweep ends.
        measure: makes one run.
    """
    finished = find_finished(request, context.runs, resume)
    if finished is not None:
        return finished
    launches, most = _launches(request, context)
    launch = msgspec.structs.replace(request.launch, cluster=request.launch.cluster.first(max(request.grid.nodes)))
    directory = take_up(launch, new_record(request), context, resume, workers=most)
    with directory.lock():
        series = CellSeries(context, directory, lambda cell, _: launches[cell.label], measure)
        try:
            if resume.retry_failed:
                series.keep(retry_failed(series.record))
            series.run(list(measuring_order(request.grid, request.cells)))
        except BaseException as error:
            _end(context, directory, status_of(error), conclude, error)
            raise
        _end(context, directory, "succeeded", conclude)
    return Swept(record=series.record, directory=directory.path)


def measure_swept(
    request: GridRequest,
    resume: Resume,
    connected: Callable[[Cluster], AbstractContextManager[RunContext]],
    note: Callable[[str], None],
) -> Swept:
    """Run `sweep` and its table; connects to the nodes only if there is something to measure.

    Args:
        request: the grid and its job.
        resume: how to treat an earlier sweep of the same command.
        connected: connects to nodes.
        note: is told if all was measured before.
    """
    finished = find_finished(request, runs_root(), resume)
    if finished is not None:
        run = RunDirectory(finished.directory).read_run()
        ended_s = run.ended_s if run is not None else None
        until = "" if ended_s is None else time.strftime(", until %Y-%m-%d %H:%M", time.localtime(ended_s))
        note(
            f"sweep {finished.directory.name} has already measured this{until}; use --fresh to measure again, such "
            "as after a network change, or --retry-failed for failed cells"
        )
        build_table(RunDirectory(finished.directory), finished.directory.parent)
        return finished
    with connected(request.launch.cluster.first(max(request.grid.nodes))) as context:
        return sweep(request, context, resume, build_table)


def require_plannable(request: GridRequest) -> None:
    """Refuse what `sweep` refuses before a node is asked, from the hostfile only.

    Raises:
        UsageError: a cell cannot be laid out, or the first cells cannot be planned, all for the same reason.
    """
    launches = {cell.label: cell_launch(request, cell, cell_workers(request, cell, {})) for cell in request.cells}
    order = dict.fromkeys(turn.cell for turn in measuring_order(request.grid, request.cells))
    errors: list[UsageError] = []
    for index in list(order)[:_MOST_REFUSED]:
        try:
            plan_offline(launches[request.cells[index].label])
        except UsageError as error:
            errors.append(error)
        else:
            return
    if len({str(error) for error in errors}) == 1:
        raise errors[0]


def _launches(request: GridRequest, context: RunContext) -> tuple[dict[str, Launch], int]:
    """The launch of every cell by its label, so that what cannot be laid out is said before anything is measured.

    And the most workers that one of them has.
    """
    nodes = request.launch.cluster.nodes[: max(request.grid.nodes)]
    has_counts = None not in request.grid.workers_per_node or all(node.slots or node.gpus for node in nodes)
    cluster = request.launch.cluster.first(len(nodes))
    facts = {} if has_counts else probe_nodes(msgspec.structs.replace(request.launch, cluster=cluster), context.agent)
    workers = {cell.label: cell_workers(request, cell, facts) for cell in request.cells}
    threaded = same_threads(request.launch, list(map(max, workers.values())), context, "in every cell")
    request = msgspec.structs.replace(request, launch=threaded)
    launches = {cell.label: cell_launch(request, cell, workers[cell.label]) for cell in request.cells}
    return launches, max(map(sum, workers.values()))


def _end(
    context: RunContext,
    directory: RunDirectory,
    status: str,
    conclude: Conclude,
    error: BaseException | None = None,
) -> None:
    try:
        conclude(directory, context.runs)
    except MultinodeError as why:
        context.say(f"the table cannot be created yet: {why}")
    # With a full disk nothing can be stored, but the reason is still reported.
    with contextlib.suppress(MultinodeError):
        keep_status(directory, status, error=error)


TABLE_FILE = "sweep.json"
# Kinds of runs whose parts are trainings, each a row.
_KINDS = frozenset({"sweep", "tuning"})
_SCHEMA = "multinode.sweep/3"


def build_table(directory: RunDirectory, root: Path) -> CellTable:
    """Build the table of a sweep from its results so far, and store it in the sweep's directory.

    Args:
        directory: of the sweep.
        root: of all runs, including the cells'.
    """
    table = _make_table(directory, root)
    directory.write(TABLE_FILE, table)
    return table


def load_table(directory: RunDirectory) -> CellTable | None:
    """The stored table of a sweep or import; None for any other run.

    The table of an unfinished series of trainings is built from its results so far.

    Raises:
        MultinodeError: it is from another release, or damaged.
    """
    if _is_unfinished(directory):
        return _make_table(directory, directory.path.parent)
    marked = directory.read(TABLE_FILE, StoredSchema)
    if marked is None:
        return None
    if marked.schema != _SCHEMA:
        raise MultinodeError(
            f"the table of run {directory.run_id} is from another release ({marked.schema or 'no schema'})",
            hint="measure or import it again",
        )
    return directory.read(TABLE_FILE, CellTable)


def load_tables(root: Path, names: Sequence[str], look: Look | None = None) -> CellTable:
    """Stored tables combined into one, as requested.

    Args:
        root: of all runs.
        names: of sweeps and imports: ids, their beginnings, or `last`; duplicates count once.
        look: how to show them.

    Raises:
        UsageError: a run does not exist, has no table, or `look` names something that the table lacks.
        MultinodeError: a table cannot be read.
    """
    directories = {(run := _open(root, name)).run_id: run for name in names}
    tables = []
    for run_id, directory in directories.items():
        table = load_table(directory)
        if table is None:
            raise UsageError(
                f"run {run_id} has no table",
                hint="create one with multinode sweep or multinode import; to compare other runs: multinode compare",
            )
        tables.append(table)
    return look_at(combine(tables), look or Look())


def _open(root: Path, name: str) -> RunDirectory:
    # `last` means the newest run that has a table.
    able = (path.name for path in reversed(list_runs(root)) if _has_table(RunDirectory(path)))
    return RunDirectory.open(root, next(able, name) if name == "last" else name)


def _has_table(directory: RunDirectory) -> bool:
    return (directory.path / TABLE_FILE).is_file() or _is_unfinished(directory)


def _is_unfinished(directory: RunDirectory) -> bool:
    if not (directory.path / GRID_FILE).is_file() or (directory.path / CONTRAST_FILE).is_file():
        return False
    run = directory.read_run()
    if run is not None and run.kind not in _KINDS:
        return False
    return run is None or run.status == "running" or not (directory.path / TABLE_FILE).is_file()


def _make_table(directory: RunDirectory, root: Path) -> CellTable:
    record = directory.read(GRID_FILE, GridRecord)
    if record is None:
        raise UsageError(
            f"run {directory.run_id} is not a sweep: it has no {GRID_FILE}", hint="list sweeps: multinode runs"
        )
    run = directory.read_run()
    table = table_of_sweep(
        directory.run_id,
        record.command,
        [(cell, _runs_of(cell, root)) for cell in record.cells],
        worker_batch=record.worker_batch,
        most_workers=run.world_size if run is not None else None,
    )
    return look_at(table, Look())


def _runs_of(record: CellRecord, root: Path) -> tuple[StoredRun, ...]:
    if record.state != MEASURED:
        return ()
    directories = [run for run_id in record.run_ids if (run := RunDirectory(root / run_id)).path.is_dir()]
    return tuple(map(StoredRun, directories))


def new_record(request: GridRequest) -> GridRecord:
    """The grid before its first run."""
    nodes = request.launch.cluster.nodes[: max(request.grid.nodes)]
    training = request.training
    return GridRecord(
        fingerprint=fingerprint(
            request.jobs,
            nodes,
            request.launch,
            {"grid": request.grid, "training": training},
        ),
        command=describe_job(request.job),
        grid=request.grid,
        cells=tuple(CellRecord(cell=cell) for cell in request.cells),
        worker_batch=_worker_batch(request.job),
        steps=training.steps,
        minutes=training.minutes,
        synthetic=training.synthetic,
    )


def _worker_batch(job: Job) -> int | None:
    batch, accumulation = job.settings.per_device_train_batch_size, job.settings.gradient_accumulation_steps
    return batch * accumulation if batch is not None and accumulation is not None else None
