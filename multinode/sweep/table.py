"""CellTable made of rows or of several tables; relative to a baseline, sorted and filtered. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from multinode.cluster.prices import Prices
from multinode.errors import UsageError
from multinode.findings.finding import Finding
from multinode.model.workload import FullRun
from multinode.profile.summary import Summary
from multinode.profile.throughput import SAMPLES_PER_S
from multinode.runs.stored_run import StoredRun
from multinode.series.grid import CellRecord
from multinode.stats.unknown import or_none
from multinode.sweep.cheapest import cheapest
from multinode.sweep.figures import RELATIVE, CellRow, CellTable, has_speed
from multinode.sweep.frame import cell_frame
from multinode.sweep.notes import NO_ROW, own_notes, with_notes
from multinode.sweep.prices import with_price_notes, with_prices
from multinode.sweep.rows import fill_rows, make_row, with_full_run


def table_of_sweep(
    run_id: str,
    job: str,
    cells: Sequence[tuple[CellRecord, Sequence[StoredRun]]],
    *,
    worker_batch: int | None = None,
    most_workers: int | None = None,
) -> CellTable:
    """The table of what a sweep has measured so far: a row a cell, whatever became of it.

    Args:
        run_id: of the sweep.
        job: the command, for people.
        cells: in the order of the grid, each with its runs that ended well, in the order in which they were measured;
            none for a cell that has no figures.
        worker_batch: as GridRecord has it.
        most_workers: of the largest cell, whether that is measured or not; None is not known.
    """
    rows = fill_rows([make_row(record, runs) for record, runs in cells])
    all_runs = [run for _, runs in cells for run in runs]
    whole = FullRun.first_of(run.workload.whole for run in all_runs if run.workload is not None)
    rows, trains = with_full_run(rows, whole, worker_batch, most_workers)
    table = CellTable(
        run_id=run_id,
        job=job,
        rule=_rule([run.summary for run in all_runs if run.summary is not None]),
        cells=rows,
        notes=trains,
    )
    return relative_to(table)


def combine(tables: Sequence[CellTable]) -> CellTable:
    """Several tables below each other in one, with the notes that all of its rows give occasion to.

    A label that two of them have gets its run's id.
    """
    tables = [msgspec.structs.replace(table, notes=own_notes(table)) for table in tables]
    if len(tables) == 1:
        return with_notes(tables[0])
    labels = Counter(row.label for table in tables for row in table.cells)
    rows = [
        row if labels[row.label] == 1 else msgspec.structs.replace(row, label=f"{row.label} ({table.run_id})")
        for table in tables
        for row in table.cells
    ]
    whole = CellTable(
        run_id=",".join(table.run_id for table in tables),
        job=", ".join(dict.fromkeys(table.job for table in tables)),
        rule="; ".join(dict.fromkeys(table.rule for table in tables if table.rule)),
        cells=tuple(rows),
        notes=tuple(note for table in tables for note in _named_notes(table, tables)),
    )
    return with_notes(relative_to(whole))


def relative_to(table: CellTable, label: str | None = None) -> CellTable:
    """The table with every row's speed over that of the baseline.

    Args:
        table: the table.
        label: of the baseline; None takes the first row that has a speed.
    """
    baseline = _find(table.cells, label) if label is not None else next(filter(has_speed, table.cells), None)
    frame = cell_frame([row for row in table.cells if has_speed(row)])
    base = next((row for row in frame.rows if row.item is baseline), None)
    relative = {id(row.item): or_none(row[RELATIVE]) for row in frame.over(base, SAMPLES_PER_S, RELATIVE).rows}
    rows = tuple(msgspec.structs.replace(row, relative=relative.get(id(row))) for row in table.cells)
    return msgspec.structs.replace(table, baseline=baseline.label if baseline is not None else None, cells=rows)


def _find(rows: Sequence[CellRow], label: str) -> CellRow:
    row = next((row for row in rows if row.label == label), None)
    if row is None:
        raise UsageError(
            f"the table has no row {label!r}", hint=f"its rows are: {', '.join(row.label for row in rows)}"
        )
    if not has_speed(row):
        fast = ", ".join(row.label for row in rows if has_speed(row)) or "none"
        raise UsageError(
            f"row {label!r} has no samples/s for comparison (state: {row.state})", hint=f"rows with samples/s: {fast}"
        )
    return row


def _named_notes(table: CellTable, tables: Sequence[CellTable]) -> Iterator[Finding]:
    for note in table.notes:
        is_shared = all(note in other.notes for other in tables)
        yield note if is_shared else msgspec.structs.replace(note, message=f"{table.run_id}: {note.message}")


def _rule(summaries: Sequence[Summary]) -> str:
    rules = dict.fromkeys(summary.rule for summary in summaries if summary.rule)
    if len(rules) <= 1:
        return next(iter(rules), "")
    dropped, made = (
        _span(summary.steps - summary.steady_steps for summary in summaries),
        _span(summary.steps for summary in summaries),
    )
    return f"the first {dropped} of the {made} steps of each run are excluded as warm-up"


def _span(counts: Iterable[int]) -> str:
    ordered = sorted(counts)
    least, most = ordered[0], ordered[-1]
    return str(least) if least == most else f"{least} to {most}"


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """How a table is asked for."""

    # label of the row that the others are relative to; None takes the first that is shown and has a speed
    baseline: str | None = None
    sort: str | None = None  # name of a value to sort by, the least first; with `-` before it the greatest
    where: tuple[str, ...] = ()  # conditions such as `method=lora` and `nodes>=2`; rows that meet all of them are shown
    prices: Prices | None = None  # of devices and nodes; None takes those that the rows have
    deadline_s: float | None = None  # by when the full run has to end, for the cheapest cell; None does not ask


def look_at(table: CellTable, look: Look) -> CellTable:
    """The table as it was asked for, with the notes on what is left of it."""
    chosen = _chosen(with_prices(table, look.prices), look)
    shown = with_notes(with_price_notes(chosen, table, look.prices))
    if look.deadline_s is None or not shown.cells:
        return shown
    return msgspec.structs.replace(shown, cheapest=cheapest(shown, look.deadline_s))


def _chosen(table: CellTable, look: Look) -> CellTable:
    if look.baseline is not None:
        table = relative_to(table, look.baseline)
    frame = cell_frame(table.cells).where(*look.where)
    if look.sort is not None:
        frame = frame.sort(look.sort)
    rows = [row.item for row in frame.rows]
    if not rows and table.cells and look.where:
        none = NO_ROW.found(None, rows=len(table.cells), conditions=" and ".join(look.where))
        return msgspec.structs.replace(table, cells=(), baseline=None, rule="", notes=(none,))
    shown = msgspec.structs.replace(table, cells=tuple(rows))
    if look.baseline is not None or any(row.label == table.baseline for row in rows):
        return shown
    return relative_to(shown)
