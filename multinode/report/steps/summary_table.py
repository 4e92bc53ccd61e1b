"""Sheets as tables of a terminal. What stands in them is `summary_sheets`' business."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from multinode.analyse.steps.summary import Summary
from multinode.report.render.foreign_text import sanitize
from multinode.report.render.sheet import Sheet
from multinode.report.render.table import make_table
from multinode.report.steps.summary_sheets import summary_sheets

__all__ = ["sheet_table", "summary_tables"]


def summary_tables(summary: Summary) -> Iterator[Table]:
    """The whole summary, what matters most first."""
    return map(sheet_table, summary_sheets(summary))


def sheet_table(sheet: Sheet) -> Table:
    """One sheet; nothing in it is taken for markup, and no character of it moves the cursor."""
    notes = "\n".join(sanitize(note) for note in sheet.notes)
    table = make_table(sanitize(sheet.title), caption=notes or None, header=bool(sheet.columns))
    table.title_style = "bold"
    if not sheet.columns:
        table.add_column(no_wrap=True)
        table.add_column()
    # A row of units only where a column has one; words may wrap, figures never.
    units = any(column.unit for column in sheet.columns)
    for column in sheet.columns:
        title = f"{column.name}\n{f'({column.unit})' if column.unit else ''}" if units else column.name
        table.add_column(title, justify="left" if column.words else "right", no_wrap=not column.words, overflow="fold")
    for row in sheet.rows:
        table.add_row(*(Text(sanitize(cell)) for cell in row))
    return table
