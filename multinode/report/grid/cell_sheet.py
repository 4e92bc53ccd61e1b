"""A table of cells as sheets, for terminal, page and Markdown: figures, what was not measured, what is marked.

Which columns there are is `cell_columns`'; in a terminal those stand that matter most, as many as fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from multinode.analyse.grid.cell_values import has_figures, has_speed
from multinode.analyse.grid.cell_work import differing, listed, other_work, untold
from multinode.analyse.grid.cells import CellRow, CellTable
from multinode.analyse.stats.ranged import Ranged
from multinode.report.grid.cell_columns import LABEL, CellColumn, cell_columns, constants, state_word
from multinode.report.render.foreign_text import sanitize
from multinode.report.render.sheet import UNKNOWN, Column, Sheet, format_sig
from multinode.report.steps.summary_table import sheet_table

__all__ = [
    "cells_sheet",
    "cells_terminal",
    "constants_line",
    "lead",
    "marks_sheet",
    "missing_sheet",
    "unmeasured_sheet",
]

# Between two columns: padding, and the box's own.
_GAP = 2
_LEAST_LABEL = 12
_LABEL_SHARE = 0.35
_WIDEST_WORDS = 24
_MOST_LABELS = 6
_MOST_RIVALS = 3
# More nobody reads in a terminal; laying them out takes seconds.
_MOST_ROWS = 500
# In words, by the names of the columns.
_NAMES = {
    "dataset": "data set",
    "nodes": "nodes x workers",
    "sequence_length": "sequence length",
    "per_device_batch": "batch",
    "global_batch": "global batch",
    "lora_rank": "LoRA rank",
    "recompute": "recomputed",
    "grad_compress": "gradients sent as",
}
_COUNTED = {"out_of_memory": "out of memory", "skipped": "skipped", "failed": "failed", "waiting": "waiting"}


def lead(table: CellTable) -> str:
    """What a reader who reads one sentence should read."""
    if not table.cells:
        return "No rows."
    measured = [row for row in table.cells if has_figures(row)]
    states = Counter(row.state for row in table.cells)
    others = "".join(f", {states[state]} {words}" for state, words in _COUNTED.items() if states[state])
    counted = f"{len(measured)} of {len(table.cells)} cells measured{others}."
    fast = [row for row in measured if has_speed(row)]
    best = _best(table, fast) if fast else _most_tokens(measured)
    return f"{best}; {counted}" if best else counted


def _best(table: CellTable, fast: Sequence[CellRow]) -> str:
    """Who is the fastest, by tokens where samples differ in length alone."""
    if differing(fast) == ("sequence_length",) and not untold(fast):
        by_tokens = [(row.tokens_per_s.value, row.label) for row in fast if row.tokens_per_s is not None]
        if len(by_tokens) == len(fast):
            value, label = max(by_tokens)
            return f"Fastest is {label} with {format_sig(value)} tokens/s, of cells that differ in sequence length"
    best = max(fast, key=lambda row: row.samples_per_s.value if row.samples_per_s is not None else 0.0)
    speed = format_sig(best.samples_per_s.value) if best.samples_per_s is not None else UNKNOWN
    work = other_work(fast)
    though = f", though cells {work}" if work else _as_fast(best, fast)
    return f"Fastest is {best.label} with {speed} samples/s{_times(table, best)}{though}"


def _most_tokens(measured: Sequence[CellRow]) -> str:
    """Who is the fastest where no row tells samples/s; empty where none tells tokens/s either."""
    by_tokens = [(row.tokens_per_s.value, row) for row in measured if row.tokens_per_s is not None]
    if not by_tokens:
        return ""
    value, best = max(by_tokens, key=lambda one: one[0])
    work = other_work([row for _, row in by_tokens])
    return f"Fastest is {best.label} with {format_sig(value)} tokens/s" + (f", though cells {work}" if work else "")


def _as_fast(best: CellRow, fast: Sequence[CellRow]) -> str:
    """Whose speed cannot be told from the best one's, by the repeats of both."""
    alike = [row.label for row in fast if row is not best and _overlap(row.samples_per_s, best.samples_per_s)]
    if not alike:
        return ""
    named = (
        alike if len(alike) <= _MOST_RIVALS else [*alike[: _MOST_RIVALS - 1], f"{len(alike) - _MOST_RIVALS + 1} more"]
    )
    return f", though {listed(named)} {'is' if len(alike) == 1 else 'are'} as fast within the scatter"


def _overlap(one: Ranged | None, best: Ranged | None) -> bool:
    return one is not None and best is not None and one.high > best.low


def _times(table: CellTable, best: CellRow) -> str:
    """How fast it is beside the baseline, where the two do the same work."""
    baseline = next((row for row in table.cells if row.label == table.baseline), best)
    if best.relative is None or table.baseline in {None, best.label} or other_work([best, baseline]):
        return ""
    return f", {format_sig(best.relative.value)} times {table.baseline}"


def constants_line(table: CellTable) -> str:
    """What is the same on every row, and therefore no column; empty where nothing is."""
    told = []
    for name, text in constants(table.cells):
        if name == "nodes" and " x " not in text:
            told.append(text)
        elif name in {"packing", "recompute"}:
            told += [_NAMES.get(name, name)] if text == "yes" else []
        elif name != "source":
            told.append(f"{_NAMES.get(name, name)} {text}")
        elif text == "imported":
            told.append(text)
    return f"On every row: {', '.join(told)}." if told else ""


def cells_sheet(table: CellTable, columns: Sequence[CellColumn] | None = None) -> Sheet:
    """A row a cell; a row without figures says so in place of its speed.

    Args:
        table: the table.
        columns: some of `cell_columns`; None takes all.
    """
    shown = cell_columns(table.cells) if columns is None else columns
    relative = any(column.name == "relative" for column in shown) and table.baseline is not None
    notes = (
        constants_line(table),
        f"Relative: samples/s over those of {table.baseline}." if relative else "",
        table.rule,
        *table.notes,
    )
    return Sheet(
        title=table.job,
        columns=tuple(column.column for column in shown),
        rows=tuple(tuple(column.tell(row) for column in shown) for row in table.cells),
        notes=tuple(note for note in notes if note),
    )


def unmeasured_sheet(table: CellTable) -> Sheet:
    """Cells without figures, by state and reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in table.cells:
        if not has_figures(row):
            reason = row.reason or row.missing.get("samples_per_s", "")
            found.setdefault((state_word(row), reason), []).append(row.label)
    return Sheet(
        title="not measured",
        columns=(Column("state", words=True), Column("cells", words=True), Column("why", words=True)),
        rows=tuple((state, _listed(labels), reason or UNKNOWN) for (state, reason), labels in found.items()),
    )


def marks_sheet(table: CellTable) -> Sheet:
    """What disturbed a row, which of its repeats failed, and what of an imported one does not fit together."""
    return Sheet(
        title="marked",
        columns=(Column("cell", words=True), Column("what", words=True)),
        rows=tuple((row.label, mark) for row in table.cells for mark in _marks(row)),
    )


def _marks(row: CellRow) -> tuple[str, ...]:
    failed = (row.reason,) if row.reason and has_figures(row) else ()
    return (*failed, *row.contradictions, *row.disturbances)


def missing_sheet(table: CellTable) -> Sheet:
    """Figures of measured rows that are not known, and why."""
    measured = [row for row in table.cells if has_figures(row)]
    lacking: dict[tuple[str, str], list[str]] = {}
    for row in measured:
        for name, reason in row.missing.items():
            lacking.setdefault((reason, row.label), []).append(name)
    alike: dict[tuple[str, str], list[str]] = {}
    for (reason, label), names in lacking.items():
        alike.setdefault((", ".join(names), reason), []).append(label)
    return Sheet(
        title="missing",
        columns=(Column("figures", words=True), Column("of", words=True), Column("why", words=True)),
        rows=tuple(
            (names, "all" if len(labels) == len(measured) else _listed(labels), reason)
            for (names, reason), labels in alike.items()
        ),
    )


def _listed(labels: Sequence[str]) -> str:
    """Labels may have commas in them; of many the first few."""
    more = [f"and {len(labels) - _MOST_LABELS} more"] if len(labels) > _MOST_LABELS + 1 else []
    shown = [*labels[:_MOST_LABELS], *more] if more else labels
    return ("; " if any("," in one for one in shown) else ", ").join(shown)


def cells_terminal(table: CellTable, width: int, first: str | None = None) -> Table:
    """The table in a terminal of so many columns, with what stands around it.

    Args:
        table: the table.
        width: in characters.
        first: name of a value that a reader wants to see above all others.
    """
    columns = _fitting(table.cells, width, first)
    sheet = cells_sheet(table, columns)
    main = sheet_table(Sheet(title=sheet.title, columns=sheet.columns, rows=sheet.rows[:_MOST_ROWS]))
    for drawn, column in zip(main.columns, columns, strict=True):
        drawn.max_width = _most(column, width) if column.is_words else None
        # A key of the job is no markup.
        drawn.header = Text(str(drawn.header))
    grid = Table.grid()
    grid.add_row(Text(sanitize(lead(table))))
    if table.cheapest is not None:
        grid.add_row(Text(sanitize(table.cheapest.sentence)))
    grid.add_row("")
    if table.cells:
        grid.add_row(main)
    for note in (*sheet.notes, *_left_out(table.cells, columns)):
        grid.add_row(Text(sanitize(note), style="dim"))
    for below in (unmeasured_sheet(table), marks_sheet(table)):
        if below.rows:
            grid.add_row("")
            grid.add_row(sheet_table(below))
    return grid


def _fitting(rows: Sequence[CellRow], width: int, first: str | None) -> tuple[CellColumn, ...]:
    """The columns that matter most, as many as fit, in the order in which they stand; the label always."""
    columns = cell_columns(rows)
    left = width - _width(LABEL, rows, width)
    kept = {LABEL.name}
    for column in sorted(columns[1:], key=lambda column: (column.name != first, column.rank)):
        needed = _width(column, rows, width) + _GAP
        if needed <= left:
            kept.add(column.name)
            left -= needed
    return tuple(column for column in columns if column.name in kept)


def _width(column: CellColumn, rows: Sequence[CellRow], width: int) -> int:
    head = max(len(column.title), len(column.unit) + 2 if column.unit else 0)
    cells = max((cell_len(sanitize(column.tell(row))) for row in rows), default=0)
    return max(head, min(cells, _most(column, width)) if column.is_words else cells)


def _most(column: CellColumn, width: int) -> int:
    """What a column of words may take; longer words are folded."""
    return max(_LEAST_LABEL, int(_LABEL_SHARE * width)) if column is LABEL else _WIDEST_WORDS


def _left_out(rows: Sequence[CellRow], shown: Sequence[CellColumn]) -> Iterator[str]:
    """What a wider terminal, a page or a CSV file has besides."""
    if len(rows) > _MOST_ROWS:
        yield f"The first {_MOST_ROWS} of {len(rows):,} rows: --where shows others, --format csv all of them."
    names = {column.name for column in shown}
    missing = [column for column in cell_columns(rows) if column.name not in names]
    if missing:
        told = (f"{column.title} ({column.unit})" if column.unit else column.title for column in missing)
        yield f"For want of room not shown: {'; '.join(told)}."
