"""CellTable made of rows, of several tables, relative to a baseline; sorted and filtered as a view asks. Pure."""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from multinode.cluster.accelerators import device_key
from multinode.cluster.prices import Prices
from multinode.errors import UsageError
from multinode.experiment.cell_prices import cheapest, with_prices
from multinode.experiment.cell_rows import MeasuredCell, fill_rows, make_row, with_full_run
from multinode.experiment.cells import (
    CellRow,
    CellTable,
    has_speed,
    require_name,
    value_of,
)
from multinode.job.workload import FullRun
from multinode.profile.summary import Summary
from multinode.stats.estimate import Estimate, ratio


class SweptCells(msgspec.Struct, frozen=True, kw_only=True):
    """What a sweep has measured so far."""

    run_id: str
    job: str
    cells: tuple[MeasuredCell, ...]  # in the order of its grid
    worker_batch: int | None = None  # as GridRecord has it
    most_workers: int | None = None  # of its largest cell, whether that is measured or not; None is not known


def table_of_sweep(sweep: SweptCells) -> CellTable:
    """The table of a sweep: a row a cell, whatever became of it; what its full run trains is a note."""
    rows = fill_rows([make_row(cell) for cell in sweep.cells])
    whole = FullRun.first_of(cell.whole for cell in sweep.cells)
    rows, trains = with_full_run(rows, whole, sweep.worker_batch, sweep.most_workers)
    table = CellTable(
        run_id=sweep.run_id,
        job=sweep.job,
        rule=_rule([run.summary for cell in sweep.cells for run in cell.runs]),
        cells=rows,
        notes=(trains,) if trains else (),
    )
    return relative_to(table)


def combine(tables: Sequence[CellTable]) -> CellTable:
    """Several tables below each other in one; a label that two of them have gets its run's id."""
    if len(tables) == 1:
        return tables[0]
    labels = Counter(row.label for table in tables for row in table.cells)
    rows = [
        row if labels[row.label] == 1 else msgspec.structs.replace(row, label=f"{row.label} ({table.run_id})")
        for table in tables
        for row in table.cells
    ]
    return relative_to(
        CellTable(
            run_id=",".join(table.run_id for table in tables),
            job=", ".join(dict.fromkeys(table.job for table in tables)),
            rule="; ".join(dict.fromkeys(table.rule for table in tables if table.rule)),
            cells=tuple(rows),
            notes=tuple(note for table in tables for note in _own_notes(table, tables)),
        )
    )


def relative_to(table: CellTable, label: str | None = None) -> CellTable:
    """The table with every row's speed over that of the baseline.

    Args:
        table: the table.
        label: of the baseline; None takes the first row that has a speed.
    """
    baseline = _find(table.cells, label) if label is not None else next(filter(has_speed, table.cells), None)
    rows = tuple(msgspec.structs.replace(row, relative=_relative(row, baseline)) for row in table.cells)
    return msgspec.structs.replace(table, baseline=baseline.label if baseline is not None else None, cells=rows)


def _find(rows: Sequence[CellRow], label: str) -> CellRow:
    row = next((row for row in rows if row.label == label), None)
    if row is None:
        raise UsageError(
            f"the table has no row {label!r}", hint=f"its rows are: {', '.join(row.label for row in rows)}"
        )
    if not has_speed(row):
        fast = ", ".join(row.label for row in rows if has_speed(row)) or "none of its rows"
        raise UsageError(f"row {label!r} has no samples/s for comparison: {row.state}", hint=f"these have: {fast}")
    return row


def _relative(row: CellRow, baseline: CellRow | None) -> Estimate | None:
    if baseline is None or row.samples_per_s is None or baseline.samples_per_s is None or not has_speed(row):
        return None
    if row is baseline:
        # Over itself it is 1, however much its repeats scatter.
        return Estimate(value=1.0, low=1.0, high=1.0, repeats=row.samples_per_s.repeats)
    return ratio(row.samples_per_s, baseline.samples_per_s)


def _own_notes(table: CellTable, tables: Sequence[CellTable]) -> Iterator[str]:
    for note in table.notes:
        yield note if all(note in other.notes for other in tables) else f"{table.run_id}: {note}"


def _rule(summaries: Sequence[Summary]) -> str:
    rules = dict.fromkeys(one.rule for one in summaries if one.rule)
    if len(rules) <= 1:
        return next(iter(rules), "")
    dropped, made = _span(one.steps - one.steady_steps for one in summaries), _span(one.steps for one in summaries)
    return f"the first steps of each run are warm-up, excluded: {dropped} of {made}"


def _span(counts: Iterable[int]) -> str:
    ordered = sorted(counts)
    least, most = ordered[0], ordered[-1]
    return str(least) if least == most else f"{least} to {most}"


_Condition = Callable[[CellRow], bool]

_CONDITION = re.compile(r"(?P<name>[^=!<>]+)(?P<sign>!=|<=|>=|=|<|>)(?P<value>.*)", re.DOTALL)
_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
}
_TRUTHS = {"yes": True, "true": True, "no": False, "false": False}
_EXAMPLES = "for example method=lora, nodes>=2, state!=failed"


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """How a table is asked for."""

    # label of the row that the others are relative to; None takes the first that is shown and has a speed
    baseline: str | None = None
    sort: str | None = None  # name of a value to sort by, the least first; with `-` before it the greatest
    where: tuple[str, ...] = ()  # conditions such as `method=lora` and `nodes>=2`; rows that meet all of them are shown
    prices: Prices | None = None  # of devices and nodes; None takes those that the rows have
    deadline_s: float | None = None  # by when the full run has to end, for the cheapest cell; None does not ask


def look_at(table: CellTable, look: Look) -> CellTable:
    """The table as it was asked for."""
    # Once for what is sorted and chosen by price, and once more for notes on prices of the rows that are left.
    shown = with_prices(_chosen(with_prices(table, look.prices), look), look.prices)
    if look.deadline_s is None or not shown.cells:
        return shown
    return msgspec.structs.replace(shown, cheapest=cheapest(shown, look.deadline_s))


def _chosen(table: CellTable, look: Look) -> CellTable:
    if look.baseline is not None:
        table = relative_to(table, look.baseline)
    conditions = [_condition(table.cells, text) for text in look.where]
    rows = [row for row in table.cells if all(meets(row) for meets in conditions)]
    if look.sort is not None:
        require_name(table.cells, look.sort.removeprefix("-"))
        rows = _sorted(rows, look.sort.removeprefix("-"), descending=look.sort.startswith("-"))
    if not rows and table.cells and conditions:
        none = f"No row of {len(table.cells):,} matches {' and '.join(look.where)}."
        return msgspec.structs.replace(table, cells=(), baseline=None, rule="", notes=(none,))
    shown = msgspec.structs.replace(table, cells=tuple(rows))
    if look.baseline is not None or any(row.label == table.baseline for row in rows):
        return shown
    return relative_to(shown)


def _sorted(rows: Sequence[CellRow], name: str, *, descending: bool) -> list[CellRow]:
    known = [(value, row) for row in rows if (value := value_of(row, name)) is not None]
    if any(not isinstance(value, (int, float)) for value, _ in known):
        known = [(str(value).casefold(), row) for value, row in known]
    known.sort(key=lambda one: one[0], reverse=descending)
    return [row for _, row in known] + [row for row in rows if value_of(row, name) is None]


def _condition(all_rows: Sequence[CellRow], text: str) -> _Condition:
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is not a condition", hint=_EXAMPLES)
    name, sign, wanted = match["name"].strip(), match["sign"], match["value"].strip()
    require_name(all_rows, name)
    if not wanted:
        raise UsageError(f"{text!r} has no value to compare with", hint=_EXAMPLES)
    if sign in {"=", "!="}:
        return lambda row: _is(value_of(row, name), wanted) == (sign == "=")
    bound = _number(wanted)
    if bound is None:
        raise UsageError(f"{text!r}: {wanted!r} is not a number, but {sign} compares numbers", hint=_EXAMPLES)
    return lambda row: isinstance(value := value_of(row, name), (int, float)) and _ORDER[sign](value, bound)


def _is(value: object, wanted: str) -> bool:
    """Whether it is what a person wrote: numbers as numbers, words in either case, devices by any of their names.

    What a row does not have is nothing in particular, and equals nothing.
    """
    if value is None:
        return False
    if isinstance(value, bool):
        return value is _TRUTHS.get(wanted.casefold())
    if isinstance(value, (int, float)):
        number = _number(wanted)
        return number is not None and math.isclose(value, number, rel_tol=1e-9)
    text = str(value)
    return text.casefold() == wanted.casefold() or device_key(text) == device_key(wanted)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
