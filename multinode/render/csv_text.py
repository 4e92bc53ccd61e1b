"""csv_text: every figure that an answer shows, one a line: `run, table, row, figure, unit, value`."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator

from multinode.render.sheet import Block, Labels, Sheet, Tiles, page_blocks, sanitize
from multinode.units import UNKNOWN

_COLUMNS = ("run", "table", "row", "figure", "unit", "value")
_FORMULA = ("=", "+", "-", "@")


def harmless(value: object) -> object:
    """A cell, marked as text if a spreadsheet would calculate it."""
    if not isinstance(value, str):
        return value
    text = sanitize(value)
    return f"'{text}" if text.lstrip().startswith(_FORMULA) else text


def blocks_csv(answers: Iterable[tuple[str, Iterable[Block]]]) -> str:
    """The tables and labelled rows of answers, each with the name of its run; values are as they are shown.

    Rows of a table are numbered from 1, so that the lines of one row can be brought together.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for run, blocks in answers:
        named: Counter[str] = Counter()
        for block in page_blocks(blocks, csv=True):
            name = _name(block)
            named[name] += 1
            table = name if named[name] == 1 else f"{name} {named[name]}"
            lines = (line for line in _lines(block) if line[-1] != UNKNOWN)
            writer.writerows([harmless(cell) for cell in (run, table, *line)] for line in lines)
    return text.getvalue()


def _name(block: Block) -> str:
    if isinstance(block, Tiles):
        return "key figures"
    return (block.title if isinstance(block, (Sheet, Labels)) else "") or "summary"


_Line = tuple[int, str, str, str]


def _lines(block: Block) -> Iterator[_Line]:
    if isinstance(block, Tiles):
        yield from ((number, name, "", value) for number, (name, value) in enumerate(block.figures, 1))
    elif isinstance(block, Labels):
        yield from _labelled(block.rows)
    elif isinstance(block, Sheet) and not block.columns:
        yield from _labelled(((name, " ".join(texts)) for name, *texts in block.rows))
    elif isinstance(block, Sheet):
        for number, row in enumerate(block.rows, 1):
            for column, cell in zip(block.columns, row, strict=True):
                yield number, column.name, column.unit, cell


def _labelled(rows: Iterable[tuple[str, str]]) -> Iterator[_Line]:
    last = ""
    for number, (label, text) in enumerate(rows, 1):
        last = label or last
        yield number, last, "", text
