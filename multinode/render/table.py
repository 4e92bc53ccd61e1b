"""The look of all tables on a terminal: narrow enough for 80 columns, plain enough for a log."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Column, Table
from rich.text import Text

from multinode.render.sheet import CommandLine, NextCommand, Sheet, Tone, is_marked, sanitize

GOOD, DOUBTFUL, BAD = "bold green", "bold yellow", "bold red"
"""Styles of a verdict or a state; without colour each is bold."""
TONES: dict[Tone, str] = {"": "bold", "good": GOOD, "doubtful": DOUBTFUL, "bad": BAD}
"""Styles of emphasised text."""


class _FittingTable(Table):
    """A table whose words stay whole: if it is too wide, text wraps between words first, then figures with a blank.

    A column whose cells are cut with an ellipsis gives way first. Only if the longest words do not fit beside each
    other, the widest column breaks them.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # Between two columns is one blank, and their padding.
        _, right, _, left = self.padding
        most = options.max_width - (1 + left + right) * (len(self.columns) - 1)
        widths = [_needed_width(column, wraps=False) for column in self.columns]
        if sum(widths) > most and self.show_header:
            words = [_needed_width(column, wraps=True) for column in self.columns]
            heads = [max(map(cell_len, _plain(column.header).split()), default=1) for column in self.columns]
            everything = range(len(widths))
            cut = [index for index in everything if any(map(_is_cut, self.columns[index].cells))]
            text = [index for index in everything if not self.columns[index].no_wrap]
            stages = ((cut, heads), (text, words), (everything, words), (text, heads), (everything, [1] * len(widths)))
            for columns, least in stages:
                _narrow(widths, columns, least, most)
            # The last one gets what is left: to a given width, rich would add a padding that it does not have.
            fitted = [*widths[:-1], None]
            table = copy.copy(self)
            # At another width, the table is laid out anew.
            table.columns = [
                dataclasses.replace(column, no_wrap=False, width=width)
                for column, width in zip(self.columns, fitted, strict=True)
            ]
            return Table.__rich_console__(table, console, options)
        return super().__rich_console__(console, options)


def _is_cut(cell: RenderableType) -> bool:
    return isinstance(cell, Text) and cell.overflow == "ellipsis"


def _narrow(widths: list[int], columns: Sequence[int], least: Sequence[int], most: int) -> None:
    """Take from the widest of these columns what all together are wider than `most`, and leave each its `least`."""
    while sum(widths) > most:
        able = [index for index in columns if widths[index] > least[index]]
        if not able:
            return
        widths[max(able, key=lambda index: widths[index])] -= 1


def _needed_width(column: Column, *, wraps: bool) -> int:
    texts = [_plain(cell) for cell in (column.header, *column.cells)]
    parts = (part for text in texts for part in (text.split() if wraps else text.splitlines()))
    return max(map(cell_len, parts), default=0)


def _plain(cell: RenderableType) -> str:
    return Text.from_markup(cell).plain if isinstance(cell, str) else str(cell)


def make_table(*, caption: str | None = None, header: bool = True) -> Table:
    """An empty table; the caption is plain text."""
    return _FittingTable(
        caption=Text(caption) if caption else None,
        caption_justify="left",
        show_header=header,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )


def sheet_table(sheet: Sheet, *, legend: bool = True) -> Table:
    """One sheet without its title; none of its text is interpreted as markup or moves the cursor."""
    notes = "\n".join(sanitize(note) for note in (*sheet.notes, *(sheet.legend if legend else ())))
    table = make_table(caption=notes or None, header=bool(sheet.columns))
    if sheet.dense:
        # The rule between the columns leaves a space already.
        table.padding = (0, 0)
    if not sheet.columns:
        table.add_column(no_wrap=True)
        table.add_column()
    # A row of units only if a column has one; text may wrap, figures never.
    units = any(column.unit for column in sheet.columns)
    for column in sheet.columns:
        title = sanitize(column.name) + (f"\n{f'({sanitize(column.unit)})' if column.unit else ''}" if units else "")
        # A key of the job, or a node's name, is no markup.
        head = Text(title)
        table.add_column(
            head,
            justify="center" if column.marks else "left" if column.words else "right",
            no_wrap=not column.words,
            overflow="fold",
            max_width=column.widest or None,
        )
    for row in sheet.rows:
        table.add_row(*(Text(sanitize(cell), style=_cell_style(sheet, cell)) for cell in row))
    return table


def _cell_style(sheet: Sheet, cell: str) -> str:
    if cell in sheet.tones:
        return TONES[sheet.tones[cell]]
    return BAD if is_marked(cell) else ""


WIDE = 200
"""Columns of a table in a file or a pipe."""
# Longer lines are hard to read.
_READABLE = 100
_LABEL_WIDTH = 11

Part = Table | str
"""A table, which fits the width; or one line, which never wraps, so that a command can be copied."""


def paragraph(text: str, style: str = "") -> Table:
    """Text that wraps at the width, and at most at a readable length."""
    grid = Table.grid()
    grid.add_column(max_width=_READABLE, overflow="fold")
    grid.add_row(Text(sanitize(text), style=style))
    return grid


def labelled(rows: Iterable[tuple[str, str]]) -> Table:
    """One row per label and text; the text wraps beside its label. A row without a label continues the previous one."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(min_width=_LABEL_WIDTH, no_wrap=True)
    grid.add_column(max_width=_READABLE - _LABEL_WIDTH - 1, overflow="fold")
    for label, text in rows:
        grid.add_row(Text(sanitize(label)), Text(sanitize(text)))
    return grid


def labelled_parts(rows: Iterable[tuple[str, str]]) -> Iterator[Part]:
    """Labelled rows, with commands among their texts."""
    for is_command, group in itertools.groupby(rows, lambda row: isinstance(row[1], CommandLine)):
        if is_command:
            yield from (footer(label, text) for label, text in group)
        else:
            yield labelled(group)


def footer(label: str, command: str) -> str:
    """The last lines of a screen, with commands: `Details`, `Next`."""
    return f"{label:<{_LABEL_WIDTH}} {command}"


def command_lines(command: NextCommand) -> Iterator[str]:
    """The command on a line that never wraps, and what it is for."""
    yield footer(command.label, command.command)
    if command.meaning:
        yield footer("", f"({command.meaning})")


def print_parts(console: Console, parts: Iterable[Part]) -> None:
    """Each below the other; an empty line is a part."""
    for part in parts:
        if isinstance(part, str):
            console.print(Text(sanitize(part)), soft_wrap=True)
        elif part.row_count:
            console.print(part)


def screen_text(parts: Iterable[Part], width: int = WIDE) -> str:
    """The parts as text, without color and trailing blanks."""
    console = Console(width=width, file=io.StringIO(), color_system=None)
    with console.capture() as captured:
        print_parts(console, parts)
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())
