"""Series: the due runs of cells, in turns, each an ordinary run. Nothing is measured twice. Prints nothing.

Its state is stored before and after each run, so that the same command resumes it after a crash.
"""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from multinode.check.gpus import check_gpus_free
from multinode.check.probe import probe
from multinode.check.rule import CheckFinding, Inspection
from multinode.cluster.cluster import Cluster
from multinode.cluster.facts import Gpu, NodeFacts
from multinode.errors import Interrupted, MultinodeError, NodeError, NodeFailed, UsageError
from multinode.findings.finding import message_of
from multinode.job.engines.engine import choose_engine
from multinode.launch.attach import find_recorded, nodes_of, stop
from multinode.launch.context import Launch, Launched, RunContext
from multinode.launch.launch import create_parent
from multinode.launch.node_runs import cleanup_nodes
from multinode.profile.summary import summarise_run
from multinode.profile.throughput import trained_s
from multinode.records.benchmark import Benchmark
from multinode.records.plan import LaunchPlan
from multinode.records.run import Failure, NodeRun, Run
from multinode.records.run_directory import RunDirectory
from multinode.records.samples import parse_samples
from multinode.runs.stored_run import StoredRun
from multinode.series.grid import (
    BY_ANOTHER,
    CUT_OFF,
    CellOutcome,
    CellRecord,
    GridRecord,
    Turn,
    begin,
    cell_line,
    end_line,
    give_up,
    is_due,
    judge_run,
    left_s,
    retry_failed,
    settle,
    skip_larger,
    state_line,
    without_runs,
)
from multinode.stats.estimate import value_of
from multinode.stats.unknown import or_empty, reason_of
from multinode.units import format_duration

GRID_FILE = "grid.json"
# What people call the series of a kind of runs; others are called like their kind.
_NOUNS = {"tune": "tuning"}
_GOES_ON = "run the same command to resume"
# After this many consecutive cells with unreachable or busy nodes, the rest would fare no better.
_MOST_BLOCKED = 2


class Resume(msgspec.Struct, frozen=True, kw_only=True):
    """How to treat an earlier series of the same command."""

    anew: bool = False  # ignore it, and measure everything again
    retry_failed: bool = False  # measure its failed cells again, but not those out of memory


def find_series(root: Path, wanted: str) -> tuple[RunDirectory, GridRecord] | None:
    """The newest series with this fingerprint, if any."""
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


def take_up(
    launch: Launch, record: GridRecord, context: RunContext, resume: Resume, *, workers: int = 0
) -> RunDirectory:
    """The directory of the unfinished series of the same command, or of a new one.

    Args:
        launch: the launch on all nodes of the series.
        record: the series before its first run.
        context: is told what is resumed.
        resume: how to treat the earlier one.
        workers: of its largest cell, if known.

    Raises:
        UsageError: another process is at it.
    """
    series = None if resume.anew else find_series(context.runs, record.fingerprint)
    noun = _NOUNS.get(launch.execute.kind, launch.execute.kind)
    if series is not None and not series[1].is_over:
        directory, stored = series
        if directory.is_locked:
            raise UsageError(
                f"this {noun} is already running: {directory.run_id}",
                hint="wait until it ends; running a second one (--fresh) would disturb both",
            )
        context.say(f"resuming {noun} {directory.run_id} ({state_line(stored)}); use --fresh to start over")
        return directory
    directory = create_parent(context.runs, launch)
    engine = None if isinstance(launch.job, Benchmark) else launch.engine or choose_engine(launch.job)
    run = Run(
        run_id=directory.run_id,
        job=record.command,
        engine="torchrun" if engine is None else engine.name,
        status="running",
        started_s=time.time(),
        world_size=workers,
        nodes=tuple(NodeRun(name=node.name, node_rank=rank) for rank, node in enumerate(launch.cluster.nodes)),
        kind=launch.execute.kind,
        command=launch.command,
        has_parts=True,
    )
    directory.write("run.json", run)
    directory.write(GRID_FILE, record)
    context.say(f"{noun} {directory.run_id}: {state_line(record)}")
    return directory


def load_grid(directory: RunDirectory) -> GridRecord:
    """The state of a series; runs whose figures were removed from disk are due again.

    Raises:
        MultinodeError: it cannot be read.
    """
    record = directory.read(GRID_FILE, GridRecord)
    if record is None:
        raise MultinodeError(f"{directory.path} is not a sweep: it has no {GRID_FILE}")
    root = directory.path.parent
    made = [run_id for cell in record.cells for run_id in cell.run_ids]
    return without_runs(record, [run_id for run_id in made if not (root / run_id / "summary.json").is_file()])


def status_of(error: BaseException) -> str:
    """How a series ended with this error, as in Run."""
    return "stopped" if isinstance(error, Interrupted) else "failed"


def keep_status(
    directory: RunDirectory, status: str, run: Run | None = None, error: BaseException | None = None
) -> None:
    """Store the status, `running` or how it ended, which makes it the newest in the list of runs.

    The failure of a part is the failure of the whole: afterwards the error names the whole.

    Args:
        directory: of the series.
        status: as in Run.
        run: has the number of workers, and the nodes as they ended; None leaves them.
        error: what ended it, if anything did.
    """
    stored = directory.read_run()
    if stored is not None:
        stored = msgspec.structs.replace(stored, first_failure=_failure_of_part(directory, error))
        if stored.first_failure is not None and isinstance(error, MultinodeError):
            error.of_run(directory.run_id)
        if run is not None:
            stored = msgspec.structs.replace(stored, world_size=run.world_size, nodes=run.nodes, engine=run.engine)
        ended_s = None if status == "running" else time.time()
        directory.write("run.json", msgspec.structs.replace(stored, status=status, ended_s=ended_s))


def _failure_of_part(directory: RunDirectory, error: BaseException | None) -> Failure | None:
    if not isinstance(error, MultinodeError) or error.run_id is None:
        return None
    part = RunDirectory(directory.path.parent / error.run_id).read_run()
    if part is None or part.failure is None:
        return None
    return msgspec.structs.replace(part.failure, run_id=part.run_id)


def free_run_id(root: Path, wanted: str) -> str:
    """The name, with a number if it is taken: run names are never reused."""
    name, number = wanted, 1
    while (root / name).exists():
        number += 1
        name = f"{wanted}-try{number}"
    return name


class Series(abc.ABC):
    """The runs of a series, one after another.

    Args:
        context: the nodes.
        directory: held by this process, so nothing else changes its files.
    """

    def __init__(self, context: RunContext, directory: RunDirectory) -> None:
        self.record = load_grid(directory)
        self.context = context.with_part_of(directory.run_id)
        self.directory = directory

    @abc.abstractmethod
    def measure(self, turn: Turn, run_id: str) -> CellOutcome:
        """Make a run. An error ends the series, and the run is due again."""

    def name(self, cell: CellRecord) -> str:
        """What to call a cell."""
        return cell.cell.label

    def title(self, cell: CellRecord) -> str:
        """What is said before a run of a cell; empty says nothing."""
        return self.name(cell)

    def has_changed(self) -> None:  # noqa: B027 - nothing to do for most
        """Is called before and after each run."""

    def report(self, cell: CellRecord, outcome: CellOutcome) -> None:
        """Say what a run found."""
        self.context.say(end_line(self.name(cell), cell, outcome.value))

    def end(self, status: str, run: Run | None = None, error: BaseException | None = None) -> None:
        """Store how it ended; after a success, the same command measures anew.

        Args:
            status: as in Run.
            run: has the number of workers, and the nodes as they ended; None takes the last run on the most nodes.
            error: what ended it, if anything did.
        """
        # With a full disk nothing can be stored, but the reason of an error is still reported.
        with contextlib.suppress(*(() if status == "succeeded" else (MultinodeError,))):
            if status == "succeeded":
                self.keep(msgspec.structs.replace(self.record, is_over=True))
            keep_status(self.directory, status, run, error)

    def end_cut_off(self, run_id: str) -> CellOutcome:
        """The outcome of a run whose controller was killed."""
        return end_cut_off(run_id, self.context, self.record.limit_s)

    def run(self, turns: Sequence[Turn], may_begin: Callable[[Turn], bool] = lambda _: True) -> None:
        """Make those runs that are due.

        Args:
            turns: the runs in their order.
            may_begin: whether to make a due run now, or leave it for later.

        Raises:
            UsageError: no cell can be laid out.
            NodeError: a node is unreachable; results are kept.
            Interrupted: the user stopped it; results are kept.
        """
        keep_status(self.directory, "running")
        self._settle_cut_off()
        blocked: list[int] = []
        for number, turn in enumerate(turns, 1):
            if not (is_due(self.record, turn) and may_begin(turn)):
                continue
            self.require_going_on()
            cell = self.record.cells[turn.cell]
            due = sum(is_due(self.record, other) for other in turns)
            self.has_changed()
            title = self.title(cell)
            if title:
                self.context.say(cell_line(number, len(turns), title, left_s(self.record, due)))
            outcome = self._measure(turn)
            self.has_changed()
            blocked = [*blocked, turn.cell] if outcome.unreachable or outcome.held else []
            if len(blocked) == _MOST_BLOCKED:
                run_id = self.record.cells[turn.cell].last_run
                # They are tried again on resume, as the cells themselves are fine.
                self.keep(retry_failed(self.record, blocked))
                if outcome.held:
                    raise NodeFailed(message_of(outcome.why), hint=f"once it is free, {_GOES_ON}").of_run(run_id)
                raise NodeError(message_of(outcome.why), hint=f"once the node is reachable, {_GOES_ON}").of_run(run_id)
        self.require_going_on()

    def keep(self, record: GridRecord) -> None:
        """Continue with this state, after storing it."""
        self.record = record
        self.directory.write(GRID_FILE, record)

    def require_going_on(self) -> None:
        """Raise Interrupted if the user stopped it."""
        if self.context.stop.count:
            raise self._interrupted()

    def _interrupted(self) -> Interrupted:
        return Interrupted(
            f"interrupted; {state_line(self.record)}",
            hint=f"{_GOES_ON}; results so far: multinode show {self.directory.run_id}",
        )

    def _measure(self, turn: Turn) -> CellOutcome:
        cell = self.record.cells[turn.cell].cell
        ending = f"-{turn.number}" if self.record.grid.repeats > 1 else ""
        run_id = free_run_id(self.context.runs, f"{self.directory.run_id}-{cell.label}{ending}")
        self.keep(begin(self.record, turn.cell, run_id))
        began = time.monotonic()
        try:
            outcome = self.measure(turn, run_id)
        except MultinodeError as error:
            self.keep(give_up(self.record, turn.cell))
            self.require_going_on()
            if isinstance(error, Interrupted):
                raise self._interrupted() from error
            raise
        if outcome.state != "measured" and self.context.stop.count:
            self.keep(give_up(self.record, turn.cell))
            self.require_going_on()
        if outcome.state == "stopped":
            outcome = CellOutcome(state="failed", why=BY_ANOTHER.found(None))
        self._settle(turn.cell, outcome, time.monotonic() - began)
        return outcome

    def _settle(self, index: int, outcome: CellOutcome, took_s: float) -> None:
        record = settle(self.record, index, outcome, took_s=took_s)
        skipped: tuple[str, ...] = ()
        if record.cells[index].state == "out_of_memory":
            record, skipped = skip_larger(record, index)
        self.keep(record)
        cell = record.cells[index]
        # An earlier repeat's failure does not affect this one.
        self.report(msgspec.structs.replace(cell, why=None) if outcome.state == "measured" else cell, outcome)
        if skipped:
            self.context.say(f"skipped because they need more memory: {', '.join(skipped)}")

    def _settle_cut_off(self) -> None:
        for index, cell in enumerate(self.record.cells):
            if cell.state == "running":
                outcome = CellOutcome(state="stopped") if cell.current is None else self.end_cut_off(cell.current)
                record = settle(self.record, index, outcome)
                out = record.cells[index].state == "out_of_memory"
                self.keep(skip_larger(record, index)[0] if out else record)


_GRACE_S = 10.0


_STOPPED = CellOutcome(state="stopped", why=CUT_OFF.found(None))


# How a node ends a job that would have continued.
_FROM_OUTSIDE = frozenset({"stopped", "lease_expired"})


def end_cut_off(run_id: str, context: RunContext, limit_s: float | None = None) -> CellOutcome:
    """Make sure that an interrupted run has ended, and use its figures if it was complete.

    A run with a time limit is complete once its steps fill that time, whether its controller or its lease stopped it.
    Otherwise it is repeated, and the reason is reported.

    Args:
        run_id: the run.
        context: its nodes.
        limit_s: its training time; None if it had to train its steps.
    """
    directory = RunDirectory(context.runs / run_id)
    run = directory.read_run()
    if run is None:
        # It was being prepared, and nothing had been started.
        return _STOPPED
    recorded = find_recorded(context.runs, run_id)
    launched = _end(recorded, context)
    outcome = judge_run(launched.run, in_time=False, lacks=figures_lack(launched))
    if run.status == "running" and outcome.state != "measured":
        # An end without its controller says nothing about the cell, unless it succeeded.
        outcome = _STOPPED
    if limit_s is not None and outcome.state == "stopped":
        outcome = _judge_by_time(launched, limit_s, context)
    cleanup_nodes(launched, nodes_of(recorded), context)
    if outcome.unreachable:
        return _STOPPED
    return msgspec.structs.replace(outcome, value=value_of(launched.summary.samples_per_s))


def figures_lack(launched: Launched) -> str | None:
    """Why a run has no usable speed; None if it has."""
    summary = launched.summary
    return reason_of(summary.step_time_ms) or reason_of(summary.samples_per_s) or None


def _end(stored: StoredRun, context: RunContext) -> Launched:
    if stored.run.status == "running":
        context.say(f"run {stored.run_id} was interrupted; checking that none of its processes are left")
        return stop(stored, context, _GRACE_S)
    plan, directory = stored.require_plan(), stored.directory
    summary = stored.summary or summarise_run(directory, plan)
    return Launched(run=stored.run, summary=summary, plan=plan, directory=directory)


def _judge_by_time(launched: Launched, limit_s: float, context: RunContext) -> CellOutcome:
    """The outcome of a run that was to be stopped after `limit_s`, and was stopped."""
    short = _short_of(launched, limit_s)
    if short is not None:
        context.say(f"repeating run {launched.run.run_id}: {short}")
        return _STOPPED
    context.say(f"run {launched.run.run_id} trained for the full {format_duration(limit_s)} and is valid")
    return judge_run(launched.run, in_time=True, lacks=figures_lack(launched))


def _short_of(launched: Launched, limit_s: float) -> str | None:
    run = launched.run
    if run.status != "stopped":
        return f"it lost contact with the controller and ended with status {run.status}"
    for node in run.nodes:
        if node.status.cause not in _FROM_OUTSIDE:
            return f"it was not stopped on {node.name} ({(node.status.cause or node.state).replace('_', ' ')})"
        time_s = trained_s(parse_samples(launched.directory.sample_lines(node.node_rank)))
        if time_s is None:
            return f"too few steps of {node.name} are stored to know how long it trained"
        if time_s < limit_s:
            return f"{node.name} trained for only {format_duration(time_s)} of {format_duration(limit_s)}"
    return None


# A process that has just ended needs seconds to free its memory; another training does not end for us.
PATIENCE_S = 60.0
_EVERY_S = 2.0


def wait_for_gpus(
    prepared: StoredRun,
    cluster: Cluster,
    context: RunContext,
    *,
    patience_s: float = PATIENCE_S,
    every_s: float = _EVERY_S,
) -> CheckFinding | None:
    """Wait until the GPUs are free, or the user asks to stop; returns the process that still holds one.

    The facts of the launch are used first, so that free GPUs, and nodes without any, need no further probe.
    """
    plan = prepared.require_plan()
    held = find_holder(cluster, plan, prepared.facts)
    if held is not None:
        context.say(f"waiting up to {patience_s:.0f} s: {held.node}: {held.message}")
    end = time.monotonic() + patience_s
    while held is not None and time.monotonic() < end and not context.stop.count:
        time.sleep(every_s)
        facts = probe(context.agent, cluster, packages=False).require()
        held = find_holder(cluster, plan, facts)
    return held


def find_holder(cluster: Cluster, plan: LaunchPlan, facts: dict[str, NodeFacts]) -> CheckFinding | None:
    """The first GPU of the plan held by another process; None if all are free, or without GPUs."""
    planned = {node.place.node: node.gpus for node in plan.nodes}
    nodes = tuple(
        msgspec.structs.replace(node, gpus=planned.get(node.name) or (), slots=None) for node in cluster.nodes
    )
    strangers = {
        name: msgspec.structs.replace(node_facts, gpus=tuple(map(_of_strangers, or_empty(node_facts.gpus))))
        for name, node_facts in facts.items()
    }
    cluster = msgspec.structs.replace(cluster, nodes=nodes)
    inspection = Inspection(cluster=cluster, facts=strangers, master_port=plan.rendezvous.port)
    return next(check_gpus_free(inspection), None)


def _of_strangers(gpu: Gpu) -> Gpu:
    processes = tuple(msgspec.structs.replace(process, run_id=None) for process in or_empty(gpu.processes))
    return msgspec.structs.replace(gpu, processes=processes)
