"""How all our tables look on a terminal: narrow enough for 80 columns, plain enough for a log."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from multinode.report.render.escaping import sanitize
from multinode.report.render.sheet import Sheet

__all__ = ["make_table", "sheet_table"]


def make_table(title: str | None = None, *, caption: str | None = None, header: bool = True) -> Table:
    """An empty table; title and caption are plain text."""
    return Table(
        title=Text(title, no_wrap=True) if title else None,
        caption=Text(caption) if caption else None,
        title_justify="left",
        caption_justify="left",
        show_header=header,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )


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
