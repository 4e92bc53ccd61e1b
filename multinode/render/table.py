"""How all our tables look on a terminal: narrow enough for 80 columns, plain enough for a log."""

from __future__ import annotations

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table
from rich.text import Text

from multinode.render.escaping import sanitize
from multinode.render.sheet import Sheet

_GAP = 2


class _FittingTable(Table):
    """A table whose figures stand on one line each; where that is too wide, those with a blank wrap there."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        needed = [_needed_width(column, wraps=not column.no_wrap) for column in self.columns]
        if sum(needed) + _GAP * (len(needed) - 1) > options.max_width:
            for column, width in zip(self.columns, needed, strict=True):
                column.no_wrap = column.no_wrap and _needed_width(column, wraps=True) == width
        return super().__rich_console__(console, options)


def _needed_width(column: Column, *, wraps: bool) -> int:
    """What a column cannot do without: its longest word where it wraps, else its longest line."""
    texts = [str(column.header), *map(str, column.cells)]
    parts = (part for text in texts for part in (text.split() if wraps else text.splitlines()))
    return max(map(cell_len, parts), default=0)


def make_table(title: str | None = None, *, caption: str | None = None, header: bool = True) -> Table:
    """An empty table; title and caption are plain text."""
    return _FittingTable(
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
