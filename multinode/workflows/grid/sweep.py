"""sweep: the cells of a grid, each an ordinary run; what was measured is never measured again. Prints nothing.

One cell, and the run that a killed controller left of it, is `sweep_cell`'s; the table is `sweep_table`'s.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from multinode.core.grid.cell_outcome import Outcome, judge_run
from multinode.core.grid.grid import GridRecord
from multinode.core.grid.grid_plan import Turn, measuring_order
from multinode.core.grid.grid_state import (
    begin,
    give_up,
    is_due,
    is_finished,
    retry_failed,
    settle,
    skip_larger,
)
from multinode.errors import Interrupted, MultinodeError, NodeError, NodeFailed, UsageError
from multinode.report.grid.grid_progress import cell_line, end_line, left_s, state_line
from multinode.store.run_directory import RunDirectory
from multinode.workflows.grid.sweep_cell import (
    AskedGrid,
    CellRun,
    cell_launch,
    cell_workers,
    end_cut_off,
    figures_lack,
    measure_cell,
)
from multinode.workflows.grid.sweep_store import (
    create_sweep,
    find_sweep,
    free_run_id,
    keep_grid,
    keep_status,
    load_grid,
    new_record,
)
from multinode.workflows.run.context import Launch, RunContext
from multinode.workflows.run.launch import probe_nodes, same_threads

__all__ = ["Resume", "Swept", "find_finished", "require_plannable", "sweep"]

_GOES_ON = "the same command resumes where it stopped"
# So many cells in a row whose nodes cannot be reached or are in use, and the rest would not fare better.
_MOST_BLOCKED = 2
# So many of the first cells that are refused for the same reason, likewise.
_MOST_REFUSED = 2

Measure = Callable[[Launch, RunContext, float | None], CellRun]
Conclude = Callable[[RunDirectory, Path], object]


class Resume(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of an earlier sweep of the same command.

    Attributes:
        anew: it is left alone, and all is measured again.
        retry_failed: its cells that failed are measured again; those that ran out of memory are not.
    """

    anew: bool = False
    retry_failed: bool = False


class Swept(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep that has come to its end.

    Attributes:
        directory: where it lies; its runs lie beside it.
    """

    record: GridRecord
    directory: Path


def find_finished(asked: AskedGrid, runs: Path, resume: Resume) -> Swept | None:
    """The newest sweep of the same command, if nothing of it is left to measure; it needs no node."""
    found = None if resume.anew else find_sweep(runs, new_record(asked).fingerprint)
    if found is None:
        return None
    directory, record = found
    record = retry_failed(record) if resume.retry_failed else record
    return Swept(record=record, directory=directory.path) if is_finished(record) else None


def sweep(
    asked: AskedGrid, context: RunContext, resume: Resume, conclude: Conclude, measure: Measure = measure_cell
) -> Swept:
    """Measure every cell that has not been measured, in an order in which running out of memory is seen early.

    Args:
        asked: the grid and its job.
        context: the nodes.
        resume: what becomes of an earlier sweep of the same command.
        conclude: makes the table, of what there is, whenever the sweep ends.
        measure: makes one run.

    Raises:
        UsageError: a cell cannot be laid out, or another process makes this very sweep.
        NodeError: a node cannot be reached; what was measured is kept.
        Interrupted: the user stopped it; likewise.
    """
    finished = find_finished(asked, context.runs, resume)
    if finished is not None:
        return finished
    launches = _launches(asked, context)
    directory = _take_up(asked, context, resume, launches)
    with directory.lock():
        series = _Series(context, directory, launches, asked.training.minutes)
        try:
            series.run(measure, retries_failed=resume.retry_failed)
        except BaseException as error:
            _end(context, directory, "stopped" if isinstance(error, Interrupted) else "failed", conclude)
            raise
        _end(context, directory, "succeeded", conclude)
    return Swept(record=series.record, directory=directory.path)


def require_plannable(asked: AskedGrid) -> None:
    """See that every cell can be laid out, as far as the hostfile alone tells.

    Raises:
        UsageError: one cannot.
    """
    for cell in asked.cells:
        cell_launch(asked, cell, cell_workers(asked, cell, {}))


def _launches(asked: AskedGrid, context: RunContext) -> dict[str, Launch]:
    """The launch of every cell by its label, so that what cannot be laid out is said before anything is measured."""
    nodes = asked.launch.cluster.nodes[: max(asked.grid.nodes)]
    told = None not in asked.grid.workers_per_node or all(node.slots or node.gpus for node in nodes)
    cluster = asked.launch.cluster.first(len(nodes))
    facts = {} if told else probe_nodes(msgspec.structs.replace(asked.launch, cluster=cluster), context.agent)
    workers = {cell.label: cell_workers(asked, cell, facts) for cell in asked.cells}
    threaded = same_threads(asked.launch, list(workers.values()), context, "in every cell")
    asked = msgspec.structs.replace(asked, launch=threaded)
    return {cell.label: cell_launch(asked, cell, workers[cell.label]) for cell in asked.cells}


def _take_up(asked: AskedGrid, context: RunContext, resume: Resume, launches: dict[str, Launch]) -> RunDirectory:
    """The directory of the sweep that goes on, or of a new one."""
    record = new_record(asked)
    found = None if resume.anew else find_sweep(context.runs, record.fingerprint)
    if found is not None:
        directory, record = found
        if directory.is_locked:
            raise UsageError(
                f"this very sweep is under way already: {directory.run_id}",
                hint="wait for its end; --fresh begins another one, and each would disturb the other",
            )
        context.say(f"going on with sweep {directory.run_id} ({state_line(record)}); --fresh begins anew")
        return directory
    most = max(len(one.cluster.nodes) * (one.options.workers_per_node or 1) for one in launches.values())
    directory = create_sweep(context.runs, asked, record, most)
    context.say(f"sweep {directory.run_id}: {state_line(record)}")
    return directory


def _end(context: RunContext, directory: RunDirectory, status: str, conclude: Conclude) -> None:
    """Store the table of what there is; what keeps it from being made is no word against what was measured."""
    try:
        conclude(directory, context.runs)
    except MultinodeError as error:
        context.say(f"its table cannot be made yet: {error}")
    # With a full disk there is nothing that could be kept, and why the sweep ended is said all the same.
    with contextlib.suppress(MultinodeError):
        keep_status(directory, status)


class _Series:
    """The runs of a sweep one after the other; its state is stored before and after each of them."""

    def __init__(
        self,
        context: RunContext,
        directory: RunDirectory,
        launches: dict[str, Launch],
        minutes: float | None,
    ) -> None:
        self.record = load_grid(directory)
        self._context = context
        # This process holds it: nobody else changes what is stored there.
        self._directory = directory
        # Of each cell, by its label.
        self._launches = launches
        # Of training in each run; None has it train its steps.
        self._minutes = minutes
        # Whether a run came to an end since this process began.
        self._has_run = False
        # Cells that were refused before any had run.
        self._refused: list[int] = []

    def run(self, measure: Measure, *, retries_failed: bool) -> None:
        """Everything that is due, and what failed before if that is asked for.

        Raises:
            NodeError, Interrupted: see `sweep`.
        """
        keep_status(self._directory, "running")
        if retries_failed:
            self._keep(retry_failed(self.record))
        self._settle_cut_off()
        turns = list(measuring_order(self.record.grid, [one.cell for one in self.record.cells]))
        blocked: list[int] = []
        for number, turn in enumerate(turns, 1):
            if not is_due(self.record, turn):
                continue
            self._require_going_on()
            cell = self.record.cells[turn.cell].cell
            self._context.say(cell_line(number, len(turns), cell.label, left_s(self.record)))
            outcome = self._measure(turn, measure)
            blocked = [*blocked, turn.cell] if outcome.unreachable or outcome.held else []
            if len(blocked) == _MOST_BLOCKED:
                # They are tried again by whoever goes on: nothing is wrong with the cells themselves.
                self._keep(retry_failed(self.record, blocked))
                if outcome.held:
                    raise NodeFailed(outcome.reason, hint=f"once it is free, {_GOES_ON}")
                raise NodeError(outcome.reason, hint=f"once it can be reached, {_GOES_ON}")
        self._require_going_on()

    def _measure(self, turn: Turn, measure: Measure) -> Outcome:
        cell = self.record.cells[turn.cell].cell
        ending = f"-{turn.number}" if self.record.grid.repeats > 1 else ""
        run_id = free_run_id(self._context.runs, f"{self._directory.run_id}-{cell.label}{ending}")
        self._keep(begin(self.record, turn.cell, run_id))
        began = time.monotonic()
        rate = None
        try:
            what = msgspec.structs.replace(self._launches[cell.label], run_id=run_id)
            run = measure(what, self._context, self._minutes)
            self._has_run = True
            rate = run.launched.summary.samples_per_s
            outcome = judge_run(run.launched.run, in_time=run.in_time, lacks=figures_lack(run.launched))
        except (NodeError, NodeFailed, UsageError) as error:
            if self._hits_all(turn.cell, error):
                self._keep(retry_failed(give_up(self.record, turn.cell), self._refused))
                raise
            outcome = Outcome(state="failed", reason=str(error), unreachable=isinstance(error, NodeError))
        except MultinodeError:
            self._keep(give_up(self.record, turn.cell))
            self._require_going_on()
            raise
        if outcome.state != "measured" and self._context.stop.count:
            self._keep(give_up(self.record, turn.cell))
            self._require_going_on()
        if outcome.state == "stopped":
            outcome = Outcome(state="failed", reason="another multinode stopped it")
        self._settle(turn.cell, outcome, time.monotonic() - began, rate)
        return outcome

    def _hits_all(self, cell: int, error: MultinodeError) -> bool:
        """Whether no other cell would fare better: nothing has run, and the first ones were refused for one reason."""
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
        self._keep(record)
        cell = record.cells[index]
        # Why an earlier repeat failed is no word on this one.
        told = msgspec.structs.replace(cell, reason="") if outcome.state == "measured" else cell
        self._context.say(end_line(told, samples_per_s))
        if skipped:
            self._context.say(f"skipped, as they need more: {', '.join(skipped)}")

    def _settle_cut_off(self) -> None:
        """Judge what was under way when an earlier controller was killed."""
        for index, cell in enumerate(self.record.cells):
            if cell.state == "running":
                run_id = cell.current
                outcome = Outcome(state="stopped")
                if run_id is not None:
                    outcome = end_cut_off(run_id, self._context, self.record.limit_s)
                record = settle(self.record, index, outcome)
                out = record.cells[index].state == "out_of_memory"
                self._keep(skip_larger(record, index)[0] if out else record)

    def _require_going_on(self) -> None:
        if self._context.stop.count:
            raise Interrupted(
                f"interrupted; {state_line(self.record)}", hint=f"{_GOES_ON}: sweep {self._directory.run_id}"
            )

    def _keep(self, record: GridRecord) -> None:
        self.record = record
        keep_grid(self._directory, record)
