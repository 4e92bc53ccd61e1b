"""parse_csv_table: a CSV of figures measured elsewhere -> ImportedTable. What its cells mean is imported_table's."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence

from multinode.core.grid.imported_table import Cell, Extras, ImportedTable, Line, TableError, check_titles, make_table
from multinode.errors import UsageError

__all__ = ["parse_csv_table"]

_BYTE_ORDER_MARK = "\ufeff"
# Spreadsheets of half of Europe write semicolons; titles have none of these in them.
_DELIMITERS = (",", ";", "\t")


def parse_csv_table(text: str, source: str, extras: Extras) -> ImportedTable:
    """The rows of a CSV: commas, semicolons or tabs between cells, titles in the first line that is not empty.

    Args:
        text: of the file.
        source: its path, for messages.
        extras: what holds for all rows.

    Raises:
        UsageError: `source:line:` and what is wrong.
    """
    try:
        return make_table(_lines(text.removeprefix(_BYTE_ORDER_MARK), extras), (), extras)
    except TableError as wrong:
        place = source if wrong.line is None else f"{source}:{wrong.line}"
        raise UsageError(f"{place}: {wrong}", hint=wrong.hint) from None


def _lines(text: str, extras: Extras) -> Iterator[Line]:
    first = next((line for line in text.splitlines() if line.strip()), "")
    delimiter = max(_DELIMITERS, key=first.count)
    titles: Sequence[str] = ()
    for number, cells in _records(text, delimiter):
        if not any(cell.strip() for cell in cells):
            continue
        if not titles:
            titles = [cell.strip() for cell in cells]
            check_titles(number, filter(None, titles), extras)
        elif len(cells) != len(titles):
            raise TableError(f"{len(cells)} cells stand under {len(titles)} titles", number)
        else:
            yield Line(number, list(_cells(number, titles, cells)))


def _cells(number: int, titles: Sequence[str], cells: Sequence[str]) -> Iterator[Cell]:
    for title, cell in zip(titles, cells, strict=True):
        if title:
            yield Cell(number, title, cell)
        elif cell.strip():
            raise TableError("a cell stands in a column without a title", number)


def _records(text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Each record with the line on which it begins."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    while True:
        number = reader.line_num + 1
        try:
            yield number, next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise TableError(f"it is not CSV: {error}", number) from None
