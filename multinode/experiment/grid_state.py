"""Transitions of a GridRecord: due runs, the effect of a run, cells that become unnecessary. Pure.

Running out of memory is a result; every other error is a failure.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from multinode.experiment.cell_outcome import Outcome
from multinode.experiment.grid import Cell, CellRecord, GridRecord
from multinode.experiment.grid_plan import Turn, batch_group, batch_of, measuring_order

_MEMORY = {"gpu": "GPU memory", "node": "the node's memory"}


def is_due(record: GridRecord, turn: Turn) -> bool:
    """Whether this run is still to be made."""
    cell = record.cells[turn.cell]
    if cell.state not in {"waiting", "measured"} or cell.out_of is not None:
        return False
    return len(cell.run_ids) + cell.failed_runs < turn.number


def due_turns(record: GridRecord) -> tuple[Turn, ...]:
    """The runs still to be made, in order."""
    cells = [one.cell for one in record.cells]
    return tuple(turn for turn in measuring_order(record.grid, cells) if is_due(record, turn))


def is_finished(record: GridRecord) -> bool:
    """Whether nothing is left to measure."""
    return all(cell.state != "running" for cell in record.cells) and not due_turns(record)


def begin(record: GridRecord, index: int, run_id: str) -> GridRecord:
    """The record with a run of this cell in progress."""
    return _change(record, index, state="running", current=run_id, attempts=record.cells[index].attempts + 1)


def give_up(record: GridRecord, index: int) -> GridRecord:
    """The record without the run in progress, which says nothing about the cell and is repeated."""
    return _change(record, index, state=_resting(record.cells[index]), current=None)


def settle(record: GridRecord, index: int, outcome: Outcome, *, took_s: float | None = None) -> GridRecord:
    """The record after the run in progress has ended.

    Args:
        record: the grid.
        index: of the cell.
        outcome: of the run.
        took_s: its wall time; None excludes it from the estimate of the time left.
    """
    if outcome.state == "stopped":
        return give_up(record, index)
    took = () if took_s is None else (took_s,)
    return _change(record, index, **_settled(record.cells[index], outcome, took))


def skip_larger(record: GridRecord, index: int) -> tuple[GridRecord, tuple[str, ...]]:
    """Skip cells that equal one out of memory except for a larger batch.

    A cell that was measured earlier keeps its figures.

    Returns:
        The record, and the labels of the skipped cells.
    """
    small = record.cells[index]
    reason = f"{small.cell.label} already ran out of {_MEMORY.get(small.out_of or '', 'memory')}"
    cells = enumerate(record.cells)
    larger = [other for other, cell in cells if cell.state == "waiting" and _needs_more(cell.cell, small.cell)]
    for other in larger:
        record = _change(record, other, state="skipped", reason=reason)
    return record, tuple(record.cells[other].cell.label for other in larger)


def without_runs(record: GridRecord, gone: Collection[str]) -> GridRecord:
    """The record without these runs, which are no longer stored and are repeated."""
    for index, cell in enumerate(record.cells):
        kept = tuple(run_id for run_id in cell.run_ids if run_id not in gone)
        if kept != cell.run_ids:
            record = _change(record, index, run_ids=kept)
            if cell.state != "running":
                record = _change(record, index, state=_resting(record.cells[index]))
    return record


def retry_failed(record: GridRecord, indices: Collection[int] | None = None) -> GridRecord:
    """The record with failed cells due again, of these or of all; not those out of memory."""
    for index, cell in enumerate(record.cells):
        asked = indices is None or index in indices
        if asked and cell.failed_runs and cell.state in {"failed", "measured"}:
            record = _change(record, index, state=_resting(cell), failed_runs=0, reason="", failure=None)
    return record


def _settled(cell: CellRecord, outcome: Outcome, took_s: tuple[float, ...]) -> dict[str, Any]:
    changes: dict[str, Any] = {"state": outcome.state, "current": None, "took_s": cell.took_s + took_s}
    if outcome.state == "measured" and cell.current is not None:
        return changes | {"run_ids": (*cell.run_ids, cell.current)}
    is_oom = outcome.state == "out_of_memory"
    changes |= {"reason": outcome.reason, "failure": outcome.failure, "out_of": outcome.out_of}
    if not is_oom:
        changes["failed_runs"] = cell.failed_runs + 1
    if cell.run_ids:
        # The end of one repeat does not affect those already measured.
        how = "ran out of memory" if is_oom else "failed"
        changes |= {"state": "measured", "reason": f"a repeat {how}: {outcome.reason}"}
    return changes


def _needs_more(cell: Cell, small: Cell) -> bool:
    ours, theirs = batch_of(cell), batch_of(small)
    return ours is not None and theirs is not None and ours > theirs and batch_group(cell) == batch_group(small)


def _resting(cell: CellRecord) -> str:
    return "measured" if cell.run_ids else "waiting"


def _change(record: GridRecord, index: int, **changes: Any) -> GridRecord:
    cells = list(record.cells)
    cells[index] = msgspec.structs.replace(cells[index], **changes)
    return msgspec.structs.replace(record, cells=tuple(cells))
