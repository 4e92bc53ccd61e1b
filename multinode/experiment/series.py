"""Series: the due runs of a grid, each an ordinary run. Nothing is measured twice. Prints nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from multinode.errors import Interrupted, MultinodeError, NodeError, NodeFailed, UsageError
from multinode.experiment.cell_outcome import Outcome, judge_run
from multinode.experiment.grid import Cell, GridRecord
from multinode.experiment.grid_plan import Turn, measuring_order
from multinode.experiment.grid_progress import cell_line, end_line, left_s, state_line
from multinode.experiment.grid_state import begin, give_up, is_due, retry_failed, settle, skip_larger
from multinode.experiment.sweep_cell import CellRun, end_cut_off, figures_lack, measure_cell
from multinode.experiment.sweep_store import free_run_id, keep_grid, keep_status, load_grid
from multinode.launch.context import Launch, RunContext
from multinode.records.run_directory import RunDirectory

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
