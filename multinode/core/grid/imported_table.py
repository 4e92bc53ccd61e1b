"""ImportedTable: figures measured elsewhere, as a file has them; make_table reads its cells, strict about each.

What columns there are and what a cell may hold stands in imported_columns.py; what a row means is
`analyse.grid.imported_rows`'.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import yaml

from multinode.core.grid.imported_columns import (
    IMPORTED,
    NONE,
    OUT_OF_MEMORY,
    ImportedColumn,
    column_name,
    nearest_columns,
)
from multinode.core.text.rounded import Rounded, exactly
from multinode.core.text.strict_yaml import YamlError, yaml_nodes
from multinode.errors import UsageError

__all__ = [
    "FORMS",
    "HINT",
    "Cell",
    "Extras",
    "ImportedRow",
    "ImportedTable",
    "Line",
    "TableError",
    "make_table",
    "parse_table",
]

HINT = "tables to start from: configs/figures/published_gpus.yaml and published_batches.csv"
FORMS = (".csv", ".tsv", ".yaml", ".yml")
"""Endings of the files that hold a table."""

_MOST_ROWS = 20_000
_SHOWN = 60


class Extras(msgspec.Struct, frozen=True, kw_only=True):
    """What the user says of a whole table.

    Attributes:
        defaults: cells, as text, by title, of what a row leaves empty or the table does not have.
        ignore: titles of columns that are passed over.
    """

    defaults: dict[str, str] = {}
    ignore: tuple[str, ...] = ()


class ImportedRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row.

    Attributes:
        line: where it stands in its file, counted from 1.
        words: cells that are words, by the name of their column.
        figures: cells that are figures, likewise, in its unit.
        out_of: whose memory did not suffice, `gpu` or `node`, where the row says so.
    """

    line: int
    words: dict[str, str] = {}
    figures: dict[str, Rounded] = {}
    out_of: str | None = None


class ImportedTable(msgspec.Struct, frozen=True, kw_only=True):
    """A table as its file has it: at least one row, in the order of the file, and the titles that were passed over."""

    rows: tuple[ImportedRow, ...]
    ignored: tuple[str, ...] = ()


class Cell(NamedTuple):
    """A cell as it is written: its line (None of one that the command line gives), its column's title, its text."""

    line: int | None
    title: str
    text: str


class Line(NamedTuple):
    """A row as it is written: where it begins, and its cells."""

    number: int
    cells: Sequence[Cell]


class _OutOfMemory(NamedTuple):
    """What stands in the place of a figure, and whose memory it was."""

    out_of: str


_Value = str | Rounded | _OutOfMemory | None


class TableError(Exception):
    """What is wrong, before the file is known.

    Args:
        message: one sentence.
        line: where; None is nowhere in the file.
        hint: what fixes it.
    """

    def __init__(self, message: str, line: int | None, hint: str = HINT) -> None:
        super().__init__(message)
        self.line = line
        self.hint = hint


def parse_table(text: str, source: str, extras: Extras) -> ImportedTable:
    """The rows of a CSV or a YAML, as the ending of its name says.

    A CSV has commas, semicolons or tabs between cells, and titles in the first line that is not empty; a YAML is a list
    of mappings, or has `rows:` beside `columns:`, `defaults:` and `ignore:`.

    Args:
        text: of the file.
        source: its path, for messages.
        extras: what the user says of all rows; it comes before what the file says.

    Raises:
        UsageError: `source:line:` and what is wrong.
    """
    try:
        if source.lower().endswith((".yaml", ".yml")):
            return _read_yaml(yaml_nodes(text), extras)
        return make_table(_csv_lines(text.removeprefix(_BYTE_ORDER_MARK), extras), (), extras)
    except YamlError as wrong:
        raise UsageError(wrong.at(source), hint=HINT) from None
    except TableError as wrong:
        place = source if wrong.line is None else f"{source}:{wrong.line}"
        raise UsageError(f"{place}: {wrong}", hint=wrong.hint) from None


def make_table(lines: Iterable[Line], defaults: Sequence[Cell], extras: Extras) -> ImportedTable:
    """The rows of a file.

    Args:
        lines: of the file.
        defaults: that the file itself gives.
        extras: what the user says; it comes before the file's defaults.

    Raises:
        TableError: a column is unknown, a cell is not what its column holds, a column that is to be passed over is not
            there, or there is no row.
    """
    ignored = _ignored(extras)
    absent = dict(ignored)
    given = [Cell(None, title, text) for title, text in extras.defaults.items()]
    general = _read(defaults, ignored) | _read(given, ignored)
    rows: list[ImportedRow] = []
    for line in lines:
        if len(rows) == _MOST_ROWS:
            raise TableError(f"there are more than {_MOST_ROWS} rows", line.number)
        rows.append(_row(line.number, general | _read(line.cells, ignored)))
        for cell in line.cells if absent else ():
            absent.pop(column_name(cell.title), None)
    if not rows:
        raise TableError("it has no rows", 1)
    for title in absent.values():
        raise TableError(f"it has no column {_shown(title)} to pass over", None, "--ignore takes its titles")
    return ImportedTable(rows=tuple(rows), ignored=tuple(ignored.values()))


def _ignored(extras: Extras) -> dict[str, str]:
    return {column_name(title): title for title in extras.ignore}


def _row(line: int, values: Mapping[str, _Value]) -> ImportedRow:
    return ImportedRow(
        line=line,
        words={name: value for name, value in values.items() if isinstance(value, str)},
        figures={name: value for name, value in values.items() if isinstance(value, Rounded)},
        out_of=next((value.out_of for value in values.values() if isinstance(value, _OutOfMemory)), None),
    )


def _read(cells: Sequence[Cell], ignored: Mapping[str, str]) -> dict[str, _Value]:
    """Values by column; an empty cell has none, and one that denies it has None."""
    values: dict[str, _Value] = {}
    titles: dict[str, str] = {}
    for cell in cells:
        column = _column(cell, ignored)
        if column is None:
            continue
        if column.column.name in titles:
            told = f"{_shown(titles[column.column.name])} and {_shown(cell.title)} say the same"
            raise TableError(told, cell.line, "keep one, or --ignore the other")
        titles[column.column.name] = cell.title
        if cell.text.strip():
            values[column.column.name] = _value(cell, column)
    return values


def _column(cell: Cell, ignored: Mapping[str, str]) -> ImportedColumn | None:
    if column_name(cell.title) in ignored:
        return None
    column = IMPORTED.get(column_name(cell.title))
    if column is not None:
        return column
    near = " or ".join(nearest_columns(cell.title))
    known = ", ".join(dict.fromkeys(one.written for one in IMPORTED.values()))
    raise TableError(
        f"unknown column {_shown(cell.title)}" + (f": did you mean {near}?" if near else ""),
        cell.line,
        f"known columns: {known}; or pass over it: --ignore {_shown(cell.title)}",
    )


def _value(cell: Cell, column: ImportedColumn) -> _Value:
    text = cell.text.strip()
    odd = next((char for char in text if not char.isprintable()), None)
    if odd is not None:
        raise TableError(f"{cell.title}: invalid character U+{ord(odd):04X}", cell.line)
    if text.lower() in NONE:
        return None
    if column.is_measured and text.lower() in OUT_OF_MEMORY:
        return _OutOfMemory(OUT_OF_MEMORY[text.lower()])
    try:
        value = column.parse(text)
    except ValueError:
        what = f"{cell.title}: {_shown(text)}" if cell.line is not None else f"--default {cell.title}={text[:_SHOWN]}"
        raise TableError(f"{what}: expected {column.expected}", cell.line) from None
    return value * exactly(column.scale) if isinstance(value, Rounded) else value


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


_BYTE_ORDER_MARK = "\ufeff"
# Spreadsheets of half of Europe write semicolons; titles have none of these in them.
_DELIMITERS = (",", ";", "\t")


def _csv_lines(text: str, extras: Extras) -> Iterator[Line]:
    first = next((line for line in text.splitlines() if line.strip()), "")
    delimiter = max(_DELIMITERS, key=first.count)
    titles: Sequence[str] = ()
    for number, cells in _csv_records(text, delimiter):
        if not any(cell.strip() for cell in cells):
            continue
        if not titles:
            titles = [cell.strip() for cell in cells]
            # An unknown title is refused before the first row.
            _read([Cell(number, title, "") for title in titles if title], _ignored(extras))
        elif len(cells) != len(titles):
            raise TableError(f"{len(cells)} cells stand under {len(titles)} titles", number)
        else:
            yield Line(number, list(_csv_cells(number, titles, cells)))


def _csv_cells(number: int, titles: Sequence[str], cells: Sequence[str]) -> Iterator[Cell]:
    for title, cell in zip(titles, cells, strict=True):
        if title:
            yield Cell(number, title, cell)
        elif cell.strip():
            raise TableError("a cell stands in a column without a title", number)


def _csv_records(text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
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


_NULL = "tag:yaml.org,2002:null"
_KEYS = ("columns", "rows", "defaults", "ignore")


def _read_yaml(root: yaml.Node | None, extras: Extras) -> ImportedTable:
    parts = _yaml_parts(root)
    titles = [_yaml_text(node) for node in _yaml_items(parts.get("columns"))]
    defaults = _yaml_cells(parts["defaults"]) if "defaults" in parts else []
    ignore = (*extras.ignore, *(_yaml_text(node) for node in _yaml_items(parts.get("ignore"))))
    lines = [Line(_yaml_line(node), _yaml_row(node, titles)) for node in _yaml_items(parts.get("rows"))]
    return make_table(lines, defaults, msgspec.structs.replace(extras, ignore=ignore))


def _yaml_parts(root: yaml.Node | None) -> dict[str, yaml.Node]:
    if isinstance(root, yaml.SequenceNode):
        return {"rows": root}
    if not isinstance(root, yaml.MappingNode):
        raise TableError("expected a list of rows, or rows: beside columns: and defaults:", 1)
    parts = {_yaml_text(key): value for key, value in root.value}
    for key, _ in root.value:
        if key.value not in _KEYS:
            raise TableError(f"unknown key {key.value!r}: expected one of {', '.join(_KEYS)}", _yaml_line(key))
    return parts


def _yaml_row(node: yaml.Node, titles: Sequence[str]) -> list[Cell]:
    if isinstance(node, yaml.MappingNode):
        return _yaml_cells(node)
    cells = _yaml_items(node)
    if len(cells) != len(titles):
        raise TableError(f"{len(cells)} cells stand in a row of {len(titles)} columns", _yaml_line(node))
    return [Cell(_yaml_line(cell), title, _yaml_text(cell)) for title, cell in zip(titles, cells, strict=True)]


def _yaml_cells(node: yaml.Node) -> list[Cell]:
    if not isinstance(node, yaml.MappingNode):
        raise TableError("expected a mapping of columns to cells", _yaml_line(node))
    # An alias has the line of what it stands for; the key's is where it is used.
    return [Cell(_yaml_line(key), _yaml_text(key), _yaml_text(value, _yaml_line(key))) for key, value in node.value]


def _yaml_items(node: yaml.Node | None) -> list[yaml.Node]:
    if node is not None and not isinstance(node, yaml.SequenceNode):
        raise TableError("expected a list", _yaml_line(node))
    return list(node.value) if node is not None else []


def _yaml_text(node: yaml.Node, line: int | None = None) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise TableError("expected one word or number, not a list or a mapping", line or _yaml_line(node))
    return "null" if node.tag == _NULL else str(node.value)


def _yaml_line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
