"""The screen of a table of cells: which is the fastest, a small table, and what was not measured or is in doubt.

In a terminal those columns stand that matter most, as many as fit. No figure is made here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from multinode.experiment.cell_sheet import (
    cell_columns,
    cells_sheet,
    lead,
    marks_sheet,
    missing_sheet,
    tell,
    unmeasured_sheet,
)
from multinode.experiment.cells import CellRow, CellTable
from multinode.experiment.columns import COLUMNS, CellColumn
from multinode.render.sheet import Sheet, plus_minus, sanitize
from multinode.render.table import Part, footer, labelled, paragraph, sheet_table

_LABEL = COLUMNS["label"]
_SHORT_WIDTH = 100
_MOST_SHORT_COLUMNS = 8
_MOST_SHORT_ROWS = 40
_MOST_NOTES = 4
# Between two columns: padding, and the box's own.
_GAP = 2
_LEAST_LABEL = 12
_LABEL_SHARE = 0.42
_WIDEST_WORDS = 24
# More nobody reads in a terminal; laying them out takes seconds.
_MOST_ROWS = 500

_Text = Callable[[CellColumn, CellRow], str]


def cell_parts(
    table: CellTable, width: int, first: str | None = None, *, details: bool = False, more: str = ""
) -> Iterator[Part]:
    """The screen.

    Args:
        table: the table.
        width: of the terminal, in characters.
        first: name of a value that a reader wants to see above all others.
        details: with every column that fits, every rule, and why figures are missing.
        more: the command that shows the details; empty where they are shown, or are not kept.
    """
    yield paragraph(lead(table), style="bold")
    if table.cheapest is not None:
        yield paragraph(table.cheapest.sentence)
    if details:
        yield from _details(table, width, first)
        return
    shown = _fitting(table.cells, min(width, _SHORT_WIDTH), first, _short, _MOST_SHORT_COLUMNS)
    if table.cells:
        yield ""
        yield _main(table, shown, _MOST_SHORT_ROWS, _short, min(width, _SHORT_WIDTH))
    yield ""
    left = len(table.cells) - _MOST_SHORT_ROWS
    relative = table.baseline is not None and any(column.name == "relative" for column in shown)
    yield labelled(
        [
            *_few("Not run", [f"{state}: {cells}: {why}" for state, cells, why in unmeasured_sheet(table).rows]),
            *_few("Marked", [f"{label}: {what}" for label, what in marks_sheet(table).rows]),
            *((("Left out", f"{left:,} more rows: --where, --details or --format csv"),) if left > 0 else ()),
            *((("Relative", f"samples/s relative to {table.baseline}"),) if relative else ()),
            # Of rows that are shown they are in the details.
            *(() if table.cells else _few("Notes", table.notes)),
        ]
    )
    if more:
        yield footer("Details", more)


def _few(label: str, texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    left = len(texts) - _MOST_NOTES if len(texts) > _MOST_NOTES + 1 else 0
    shown = [*texts[: len(texts) - left], *([f"and {left} more"] if left else [])]
    yield from (("" if number else label, text) for number, text in enumerate(shown))


def _details(table: CellTable, width: int, first: str | None) -> Iterator[Part]:
    columns = _fitting(table.cells, width, first, tell)
    sheet = cells_sheet(table, columns)
    if table.cells:
        yield ""
        yield _main(table, columns, _MOST_ROWS, tell, width)
    yield ""
    yield from (paragraph(note) for note in (*sheet.notes, *_left_out(table.cells, columns)))
    for below in (unmeasured_sheet(table), marks_sheet(table), missing_sheet(table)):
        if below.rows:
            yield ""
            yield sheet_table(below)


def _main(table: CellTable, columns: Sequence[CellColumn], most: int, text: _Text, width: int) -> Table:
    whole = cells_sheet(table, columns)
    rows = tuple(tuple(text(column, row) for column in columns) for row in table.cells[:most])
    drawn = sheet_table(Sheet(title=whole.title, columns=whole.columns, rows=rows))
    for one, column in zip(drawn.columns, columns, strict=True):
        one.max_width = _most(column, width) if column.is_words else None
        # A key of the job is no markup.
        one.header = Text(str(one.header))
    return drawn


def _short(column: CellColumn, row: CellRow) -> str:
    """As `tell` has it, and samples/s with its interval where it was repeated."""
    speed = row.samples_per_s
    if column.name == "samples_per_s" and speed is not None and speed.repeats > 1:
        return plus_minus(speed)
    return tell(column, row)


def _fitting(
    rows: Sequence[CellRow], width: int, first: str | None, text: _Text, most: int | None = None
) -> tuple[CellColumn, ...]:
    # Without the details an interval stands beside its figure.
    columns = [one for one in cell_columns(rows) if most is None or one.name != "samples_per_s_range"]
    left = width - _width(_LABEL, rows, width, text)
    kept = {_LABEL.name}
    for column in sorted(columns[1:], key=lambda column: (column.name != first, column.rank)):
        needed = _width(column, rows, width, text) + _GAP
        if needed <= left and (most is None or len(kept) < most):
            kept.add(column.name)
            left -= needed
    return tuple(column for column in columns if column.name in kept)


def _width(column: CellColumn, rows: Sequence[CellRow], width: int, text: _Text) -> int:
    head = max(len(column.title), len(column.unit) + 2 if column.unit else 0)
    cells = max((cell_len(sanitize(text(column, row))) for row in rows), default=0)
    return max(head, min(cells, _most(column, width)) if column.is_words else cells)


def _most(column: CellColumn, width: int) -> int:
    return max(_LEAST_LABEL, int(_LABEL_SHARE * width)) if column is _LABEL else _WIDEST_WORDS


def _left_out(rows: Sequence[CellRow], shown: Sequence[CellColumn]) -> Iterator[str]:
    if len(rows) > _MOST_ROWS:
        yield f"The first {_MOST_ROWS} of {len(rows):,} rows: use --where for others, --format csv for all."
    names = {column.name for column in shown}
    missing = [column for column in cell_columns(rows) if column.name not in names]
    if missing:
        told = (f"{column.title} ({column.unit})" if column.unit else column.title for column in missing)
        yield f"columns hidden (terminal too narrow): {'; '.join(told)}"
