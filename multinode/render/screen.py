"""Screen: what a verb prints, part by part, for a terminal of any width, a pipe or a file."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from multinode.render.escaping import sanitize

WIDE = 200
"""Columns of a table in a file or a pipe, which is not cut to the width of a terminal that is not there."""
# Longer lines are hard to read.
_READABLE = 100
_LABEL_WIDTH = 11

Part = Table | str
"""A table, which fits the width; or one line, which stands as it is: a command is copied whole."""


def paragraph(text: str, style: str = "") -> Table:
    """Text that wraps at the width, and nowhere beyond what is easily read."""
    grid = Table.grid()
    grid.add_column(max_width=_READABLE, overflow="fold")
    grid.add_row(Text(sanitize(text), style=style))
    return grid


def labelled(rows: Iterable[tuple[str, str]]) -> Table:
    """A label and its text a row; the text wraps beside it. A row without a label belongs to the one above it."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(min_width=_LABEL_WIDTH, no_wrap=True)
    grid.add_column(max_width=_READABLE - _LABEL_WIDTH - 1, overflow="fold")
    for label, text in rows:
        grid.add_row(Text(sanitize(label)), Text(sanitize(text)))
    return grid


class Command(str):
    """Text of a labelled row that is copied whole: a line of its own, never wrapped."""

    __slots__ = ()


def labelled_parts(rows: Iterable[tuple[str, str]]) -> Iterator[Part]:
    """The same with commands among the texts."""
    for is_command, group in itertools.groupby(rows, lambda row: isinstance(row[1], Command)):
        if is_command:
            yield from (f"{label:<{_LABEL_WIDTH}} {text}" for label, text in group)
        else:
            yield labelled(group)


def print_parts(console: Console, parts: Iterable[Part]) -> None:
    """Each below the other; an empty line is a part of its own."""
    for part in parts:
        if isinstance(part, str):
            console.print(Text(sanitize(part)), soft_wrap=True)
        elif part.row_count:
            console.print(part)


def screen_text(parts: Iterable[Part], width: int = WIDE) -> str:
    """The same as text without colour, and without the blanks that fill a terminal's lines."""
    console = Console(width=width, file=io.StringIO(), color_system=None)
    with console.capture() as captured:
        print_parts(console, parts)
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())
