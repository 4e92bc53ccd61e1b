"""A table of cells as one flat CSV file, and as Markdown for an issue or a wiki.

The CSV has every value of a row, its unit in the column's name; a cell that a spreadsheet would take for a formula is
told that it is text.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

import msgspec

from multinode.experiment.cell_sheet import cells_sheet, lead, marks_sheet, unmeasured_sheet
from multinode.experiment.cells import RANGED, VALUES, CellRow, CellTable, value_of
from multinode.experiment.columns import COLUMNS
from multinode.profile.export import harmless
from multinode.render.markdown import sheet_markdown, text_markdown

_LISTS = ("run_ids", "node_names", "filed_prices", "disturbances", "contradictions")


def cell_csv(table: CellTable) -> str:
    """The file's text; what the sweep set stands under `set.` and the key's name."""
    keys = tuple(dict.fromkeys(key for row in table.cells for key in row.varied))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for number, row in enumerate(table.cells):
        cells = list(_cells(row, keys))
        if not number:
            writer.writerow([harmless(name) for name, _ in cells])
        writer.writerow([harmless(_written(value)) for _, value in cells])
    if not table.cells:
        writer.writerow(map(_name, VALUES))
    return text.getvalue()


def _cells(row: CellRow, keys: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name in VALUES:
        yield _name(name), value_of(row, name)
        if name in RANGED:
            measured = getattr(row, name)
            for end in ("low", "high"):
                yield f"{_name(name)}_{end}", getattr(measured, end, None)
    yield "repeats", row.samples_per_s.repeats if row.samples_per_s is not None else None
    for name in _LISTS:
        yield name, "; ".join(getattr(row, name))
    for key in keys:
        yield f"set.{key}", row.varied.get(key)


def _name(value: str) -> str:
    """With the unit that the value's name leaves to its description."""
    return COLUMNS[value].csv or value


def _written(value: Any) -> object:
    """What CSV has a form for as it is; lists and such as JSON."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    return msgspec.json.encode(value).decode()


def cell_markdown(table: CellTable) -> Iterator[str]:
    """Its parts: the sentence, the table with all its columns, what was not measured, what is marked."""
    yield f"{text_markdown(lead(table))}\n\n"
    if table.cheapest is not None:
        yield f"{text_markdown(table.cheapest.sentence)}\n\n"
    for sheet in (cells_sheet(table), unmeasured_sheet(table), marks_sheet(table)):
        yield sheet_markdown(sheet)
