"""Progress of a sweep in lines: the next cell, the time left, the outcome of a cell. Pure."""

from __future__ import annotations

import functools
import statistics
from collections import Counter

from multinode.cluster.quoting import quote_path
from multinode.experiment.grid import Cell, CellRecord, Grid, GridRecord
from multinode.experiment.grid_plan import cell_arguments, cell_overrides, measuring_order
from multinode.experiment.grid_state import due_turns, give_up
from multinode.units import format_count

_MINUTE_S, _HOUR_S = 60, 3600
_STATES = ("measured", "out_of_memory", "skipped", "failed", "waiting", "running")
_OUT_OF = {"gpu": "out of GPU memory", "node": "out of the node's memory"}


def left_s(record: GridRecord) -> float | None:
    """Estimated time of all due runs, from the mean of the finished ones; None before anything is known.

    With a time limit per run, only runs that reached it count; until one has, the limit itself is used.
    """
    took = [one_s for cell in record.cells for one_s in cell.took_s]
    limit_s = record.limit_s
    if limit_s is not None:
        took = [one_s for one_s in took if one_s >= limit_s] or [limit_s]
    return statistics.fmean(took) * len(due_turns(record)) if took else None


def about(seconds: float) -> str:
    """An estimate for people: `about 40 s`, `about 4 min`, `about 2 h 10 min`."""
    if seconds < 1.5 * _MINUTE_S:
        return f"about {max(10, round(seconds, -1)):.0f} s"
    minutes = round(seconds / _MINUTE_S)
    if seconds < 1.5 * _HOUR_S:
        return f"about {minutes} min"
    hours, rest = divmod(round(minutes, -1), _MINUTE_S)
    return f"about {hours} h {rest:02d} min" if rest else f"about {hours} h"


def cell_line(number: int, total: int, name: str, remaining_s: float | None) -> str:
    """The cell that is measured next: `[3/16] 2x1-lora-batch4, about 4 min left`."""
    left = "" if remaining_s is None else f", {about(remaining_s)} left"
    return f"[{number}/{total}] {name}{left}"


def end_line(cell: CellRecord, samples_per_s: float | None) -> str:
    """The outcome of a cell's run."""
    if cell.state == "measured" and not cell.reason:
        speed = f": {samples_per_s:.4g} samples/s" if samples_per_s is not None else ""
        return f"{cell.cell.label}: measured{speed}"
    state = _OUT_OF.get(cell.out_of or "", _words(cell.state))
    return f"{cell.cell.label}: {state}" + (f": {cell.reason}" if cell.reason else "")


def state_line(record: GridRecord) -> str:
    """Number of cells by state: `16 cells: 12 measured, 1 out of memory, 3 skipped`."""
    counts = Counter(cell.state for cell in record.cells)
    said = ", ".join(f"{counts[state]} {_words(state)}" for state in _STATES if counts[state])
    return f"{format_count(len(record.cells), 'cell')}: {said}"


def _describe(grid: Grid, cell: Cell) -> str:
    """What a cell sets, as the options of `launch`, or a script's arguments, would."""
    workers = [] if cell.workers_per_node is None else [f"--workers-per-node {cell.workers_per_node}"]
    settings = [f"--set {quote_path(text)}" for text in cell_overrides(cell)]
    arguments = ["--", *map(quote_path, cell_arguments(grid, cell))]
    return " ".join([f"--nodes {cell.nodes}", *workers, *(arguments if grid.arguments else settings)])


def plan_lines(record: GridRecord) -> list[str]:
    """The cells in order of measurement, and the number of runs."""
    cells = record.cells
    order = [turn.cell for turn in measuring_order(record.grid, [one.cell for one in cells]) if turn.number == 1]
    width = max(len(one.cell.label) for one in cells)
    lines = [
        f"{number:>{len(str(len(cells)))}}  {cells[index].cell.label:<{width}}  "
        + _describe(record.grid, cells[index].cell)
        + ("" if cells[index].state == "waiting" else f"  ({_words(cells[index].state)})")
        for number, index in enumerate(order, 1)
    ]
    repeats = record.grid.repeats
    times = "" if repeats == 1 else f", {repeats} times each"
    # A run in progress counts as not made: if it is interrupted, it is repeated.
    running = [index for index, one in enumerate(cells) if one.state == "running"]
    left = len(due_turns(functools.reduce(give_up, running, record)))
    return [*lines, f"{format_count(len(cells), 'cell')}{times}: {format_count(left, 'run')} to make"]


def _words(state: str) -> str:
    return state.replace("_", " ")
