"""Series: the due runs of a grid, each an ordinary run; the directory that the same command finds again."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from multinode.errors import Interrupted, MultinodeError, NodeError, NodeFailed, UsageError
from multinode.experiment.grid import Cell, CellRecord, GridRecord, fingerprint
from multinode.experiment.grid_plan import (
    Turn,
    begin,
    cell_line,
    end_line,
    give_up,
    is_due,
    left_s,
    measuring_order,
    retry_failed,
    settle,
    skip_larger,
    state_line,
    without_runs,
)
from multinode.experiment.sweep_cell import (
    AskedGrid,
    CellRun,
    Outcome,
    end_cut_off,
    figures_lack,
    judge_run,
    measure_cell,
)
from multinode.job.engine_commands import choose_engine
from multinode.job.job import Job, LlamaFactoryJob, describe_job
from multinode.launch.context import Launch, RunContext
from multinode.launch.launch import create_parent
from multinode.records.run import NodeRun, Run
from multinode.records.run_directory import RunDirectory

GRID_FILE = "grid.json"


def find_sweep(root: Path, wanted: str) -> tuple[RunDirectory, GridRecord] | None:
    """The newest sweep with this fingerprint, if any."""
    written: list[tuple[int, Path]] = []
    for path in root.glob(f"*/{GRID_FILE}"):
        # One that is removed meanwhile is not sought either.
        with contextlib.suppress(OSError):
            written.append((path.stat().st_mtime_ns, path.parent))
    for _, place in sorted(written, reverse=True):
        directory = RunDirectory(place)
        try:
            record = load_grid(directory)
        except MultinodeError:
            # Written by another release, or truncated by a full disk.
            continue
        if record.fingerprint == wanted:
            return directory, record
    return None


def new_record(asked: AskedGrid) -> GridRecord:
    """The grid before its first run."""
    nodes = asked.launch.cluster.nodes[: max(asked.grid.nodes)]
    training = asked.training
    return GridRecord(
        fingerprint=fingerprint(
            asked.jobs,
            nodes,
            asked.launch.options,
            {"grid": asked.grid, "training": training, "scripts": _digest_scripts(asked.job)},
        ),
        command=describe_job(asked.job),
        grid=asked.grid,
        cells=tuple(CellRecord(cell=cell) for cell in asked.cells),
        worker_batch=_worker_batch(asked.job),
        steps=training.steps,
        minutes=training.minutes,
        synthetic=training.synthetic,
    )


def create_sweep(root: Path, asked: AskedGrid, record: GridRecord, workers: int) -> RunDirectory:
    """A directory for a new sweep; `workers` are those of its largest cell on all nodes."""
    cluster = asked.launch.cluster.first(max(asked.grid.nodes))
    what = msgspec.structs.replace(asked.launch, cluster=cluster)
    return create_grid(root, what, record, workers, _engine(asked))


def create_grid(root: Path, what: Launch, record: GridRecord, workers: int, engine: str) -> RunDirectory:
    """A directory for new runs of a grid, on all nodes of the launch."""
    directory = create_parent(root, what)
    run = Run(
        run_id=directory.run_id,
        job=record.command,
        engine=engine,
        status="running",
        started_s=time.time(),
        world_size=workers,
        nodes=tuple(NodeRun(name=node.name, node_rank=rank) for rank, node in enumerate(what.cluster.nodes)),
        kind=what.execute.kind,
    )
    directory.write("run.json", run)
    keep_grid(directory, record)
    return directory


def load_grid(directory: RunDirectory) -> GridRecord:
    """The state of a sweep; runs whose figures were removed from disk are due again.

    Raises:
        MultinodeError: it cannot be read.
    """
    record = directory.read(GRID_FILE, GridRecord)
    if record is None:
        raise MultinodeError(f"{directory.path} is not a sweep: it has no {GRID_FILE}")
    root = directory.path.parent
    made = [run_id for cell in record.cells for run_id in cell.run_ids]
    return without_runs(record, [run_id for run_id in made if not (root / run_id / "summary.json").is_file()])


def keep_grid(directory: RunDirectory, record: GridRecord) -> None:
    """Store the state."""
    directory.write(GRID_FILE, record)


def keep_status(directory: RunDirectory, status: str) -> None:
    """Store the status, `running` or how it ended, which makes it the newest in the list of runs."""
    run = directory.read("run.json", Run)
    if run is not None:
        ended_s = None if status == "running" else time.time()
        directory.write("run.json", msgspec.structs.replace(run, status=status, ended_s=ended_s))


def free_run_id(root: Path, wanted: str) -> str:
    """The name, with a number if it is taken: run names are never reused."""
    name, number = wanted, 1
    while (root / name).exists():
        number += 1
        name = f"{wanted}-try{number}"
    return name


def _engine(asked: AskedGrid) -> str:
    return (asked.launch.options.engine or choose_engine(asked.job)).name


def _digest_scripts(job: Job) -> dict[str, str]:
    """A changed script is another training."""
    if isinstance(job, LlamaFactoryJob):
        return {}
    paths = [Path(word) for word in job.argv if word.endswith((".py", ".sh"))]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()}


def _worker_batch(job: Job) -> int | None:
    if not isinstance(job, LlamaFactoryJob):
        return None
    batch, accumulation = job.settings.per_device_train_batch_size, job.settings.gradient_accumulation_steps
    return batch * accumulation if batch is not None and accumulation is not None else None


_GOES_ON = "run the same command to resume"
# After this many consecutive cells with unreachable or busy nodes, the rest would fare no better.
_MOST_BLOCKED = 2
# Likewise for first cells refused for the same reason.
_MOST_REFUSED = 2

Measure = Callable[[Launch, RunContext, float | None], CellRun]
LaunchOf = Callable[[Cell, int], Launch]
MayBegin = Callable[[GridRecord, Turn], bool]


class Series:
    """The runs of a grid, one after another; its state is stored before and after each.

    Args:
        context: the nodes.
        directory: held by this process, so nothing else changes its files.
        launch_of: the launch that measures a cell, the first time, the second, and so on.
        measure: makes one run.
    """

    def __init__(
        self, context: RunContext, directory: RunDirectory, launch_of: LaunchOf, measure: Measure = measure_cell
    ) -> None:
        self.record = load_grid(directory)
        self._context = context
        self._directory = directory
        self._launch_of = launch_of
        self._measure_cell = measure
        # Whether a run has finished in this process.
        self._has_run = False
        # Cells refused before any run.
        self._refused: list[int] = []

    def run(self, may_begin: MayBegin = lambda *_: True) -> None:
        """Make all due runs.

        Args:
            may_begin: whether to make a run now, or leave it for later.

        Raises:
            UsageError: no cell can be laid out.
            NodeError: a node is unreachable; results are kept.
            Interrupted: the user stopped it; results are kept.
        """
        keep_status(self._directory, "running")
        self._settle_cut_off()
        turns = list(measuring_order(self.record.grid, [one.cell for one in self.record.cells]))
        blocked: list[int] = []
        for number, turn in enumerate(turns, 1):
            if not (is_due(self.record, turn) and may_begin(self.record, turn)):
                continue
            self._require_going_on()
            cell = self.record.cells[turn.cell].cell
            self._context.say(cell_line(number, len(turns), cell.label, left_s(self.record)))
            outcome = self._measure(turn)
            blocked = [*blocked, turn.cell] if outcome.unreachable or outcome.held else []
            if len(blocked) == _MOST_BLOCKED:
                # They are tried again on resume, as the cells themselves are fine.
                self.keep(retry_failed(self.record, blocked))
                if outcome.held:
                    raise NodeFailed(outcome.reason, hint=f"once it is free, {_GOES_ON}")
                raise NodeError(outcome.reason, hint=f"once it can be reached, {_GOES_ON}")
        self._require_going_on()

    def _measure(self, turn: Turn) -> Outcome:
        cell = self.record.cells[turn.cell].cell
        ending = f"-{turn.number}" if self.record.grid.repeats > 1 else ""
        run_id = free_run_id(self._context.runs, f"{self._directory.run_id}-{cell.label}{ending}")
        self.keep(begin(self.record, turn.cell, run_id))
        began = time.monotonic()
        rate = None
        try:
            what = msgspec.structs.replace(self._launch_of(cell, turn.number), run_id=run_id)
            run = self._measure_cell(what, self._context, self.record.minutes)
            self._has_run = True
            rate = run.launched.summary.samples_per_s
            outcome = judge_run(run.launched.run, in_time=run.in_time, lacks=figures_lack(run.launched))
        except (NodeError, NodeFailed, UsageError) as error:
            if self._hits_all(turn.cell, error):
                self.keep(retry_failed(give_up(self.record, turn.cell), self._refused))
                raise
            outcome = Outcome(state="failed", reason=str(error), unreachable=isinstance(error, NodeError))
        except MultinodeError:
            self.keep(give_up(self.record, turn.cell))
            self._require_going_on()
            raise
        if outcome.state != "measured" and self._context.stop.count:
            self.keep(give_up(self.record, turn.cell))
            self._require_going_on()
        if outcome.state == "stopped":
            outcome = Outcome(state="failed", reason="another multinode stopped it")
        self._settle(turn.cell, outcome, time.monotonic() - began, rate)
        return outcome

    def _hits_all(self, cell: int, error: MultinodeError) -> bool:
        if isinstance(error, NodeError) or self._has_run:
            return not self._has_run
        if any(one.run_ids for one in self.record.cells):
            return False
        alike = all(self.record.cells[other].reason == str(error) for other in self._refused)
        self._refused.append(cell)
        return alike and len(self._refused) == min(_MOST_REFUSED, len(self.record.cells))

    def _settle(self, index: int, outcome: Outcome, took_s: float, samples_per_s: float | None) -> None:
        record = settle(self.record, index, outcome, took_s=took_s)
        skipped: tuple[str, ...] = ()
        if record.cells[index].state == "out_of_memory":
            record, skipped = skip_larger(record, index)
        self.keep(record)
        cell = record.cells[index]
        # An earlier repeat's failure does not affect this one.
        told = msgspec.structs.replace(cell, reason="") if outcome.state == "measured" else cell
        self._context.say(end_line(told, samples_per_s))
        if skipped:
            self._context.say(f"skipped because they need more: {', '.join(skipped)}")

    def _settle_cut_off(self) -> None:
        for index, cell in enumerate(self.record.cells):
            if cell.state == "running":
                run_id = cell.current
                outcome = Outcome(state="stopped")
                if run_id is not None:
                    outcome = end_cut_off(run_id, self._context, self.record.limit_s)
                record = settle(self.record, index, outcome)
                out = record.cells[index].state == "out_of_memory"
                self.keep(skip_larger(record, index)[0] if out else record)

    def _require_going_on(self) -> None:
        if self._context.stop.count:
            raise Interrupted(f"interrupted; {state_line(self.record)}", hint=f"{_GOES_ON}: {self._directory.run_id}")

    def keep(self, record: GridRecord) -> None:
        """Continue with this state, after storing it."""
        self.record = record
        keep_grid(self._directory, record)
