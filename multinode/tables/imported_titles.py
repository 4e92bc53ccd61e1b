"""Titles of foreign tables: the column that each names, by a name, an alias or a unit; the nearest of those unknown."""

from __future__ import annotations

import difflib
import re
from functools import cache
from typing import NamedTuple

from multinode.predict.published import parse_published, plain_text
from multinode.tables.columns import COLUMNS, column_name
from multinode.tables.imported_columns import (
    DERIVED,
    IMPORTED,
    SPEEDS,
    ImportedColumn,
    find_scale,
    find_unit,
    imported_column,
    is_rate,
    parse_unit,
)


class SpeedColumn(NamedTuple):
    """A column called throughput or speed: the unit of its title, or of each cell, decides its meaning."""

    @property
    def expected(self) -> str:
        """The values that a cell may hold, for messages."""
        return "a speed with its unit, such as 12.3 samples/s, because the title has none"

    def column(self, cell: str) -> ImportedColumn:
        """The column of a cell.

        Raises:
            ValueError: its unit is not that of a speed.
        """
        try:
            form = _rate(parse_published(plain_text(cell)).unit)
        except ValueError:
            # Without a figure, any of them says why.
            form = ImportedColumn(COLUMNS["samples_per_s"], None)
        if form is None:
            raise ValueError(cell)
        return form


TitleColumn = ImportedColumn | SpeedColumn

_SPEEDS = {column_name(name) for name in SPEEDS}
_BRACKETS = re.compile(r"[(\[]([^()\[\]]*)[)\]]")
_LAST_WORD = re.compile(r"(.*\w)\s*[/ _]\s*([^/ _]+)")


def read_title(title: str) -> TitleColumn | None:
    """The column of a title: `samples/s`, `memory (GiB)`, `step_time_ms`, `tokens/sec (k)`; None if unknown.

    A title is a name or an alias, or a unit that only one figure has; a unit of that figure or a scale may follow it in
    brackets, behind a comma, a slash, a blank or an underscore.
    """
    plain = plain_text(title)
    if (column := _whole(plain)) is not None:
        return column
    base, parts = _split(plain)
    if (column := _whole(base)) is not None and parts:
        return _in_units(column, parts)
    last = _LAST_WORD.fullmatch(base)
    if last is None or (column := _whole(last[1])) is None:
        return None
    column = _in_unit(column, last[2])
    return _in_units(column, parts) if column is not None else None


def is_derived(title: str) -> bool:
    """Whether an import works this column out itself, as it does a speedup."""
    plain = plain_text(title)
    return not _derived().isdisjoint({column_name(plain), column_name(_split(plain)[0])})


@cache
def _derived() -> set[str]:
    # Some have the title of another figure, and its unit: samples/s for 10,000 EUR.
    return {column_name(name) for name in DERIVED if read_title(name) is None}


def named_column(title: str, name: str) -> TitleColumn | None:
    """The column that the user names, in the unit and the scale that the title has.

    Raises:
        ValueError: the title has the unit of another quantity; the message says so.
    """
    column = read_title(name)
    if column is None:
        return None
    plain = plain_text(title)
    base, parts = _split(plain)
    last = _LAST_WORD.fullmatch(base)
    for part in (plain, base, *((last[2],) if last is not None else ()), *parts):
        column = _in_unit(column, part) or column
    for part in (plain, base, *parts):
        scaled = _scaled(column, part) if part in parts else None
        other = _other_quantity(column, part) if scaled is None else ""
        if other:
            raise ValueError(f"the title has {part!r}, a unit of {other}")
        column = scaled or column
    return column


def _other_quantity(column: TitleColumn, text: str) -> str:
    """What a unit measures that the column does not; empty if it is no unit, or a letter behind a count."""
    unit = parse_unit(text)
    if isinstance(column, SpeedColumn) or unit is None or _in_unit(column, text) is not None:
        return ""
    if is_rate(unit):
        return COLUMNS[unit.measures].written or unit.measures
    return unit.measures if unit.measures in _OF_UNIT and column.is_measured else ""


def nearest_column(title: str) -> str | None:
    """The column whose name or unit is nearest to a title, as it is written; None if none is near."""
    base, parts = _split(plain_text(title))
    name = column_name(base)
    if name in _SPEEDS:
        return "samples_per_s, tokens_per_s or tgs"
    within = [known for known in _NEAR if len(known) >= _SHORTEST and known in name]
    beginning = [known for known in _NEAR if len(name) >= _SHORTEST and known.startswith(name)]
    near = [
        *sorted(beginning, key=len),
        *sorted(within, key=len, reverse=True),
        *difflib.get_close_matches(name, _NEAR, n=1, cutoff=_NEAR_ENOUGH),
    ]
    if near:
        return _NEAR[near[0]].written
    units = (unit.measures for part in parts if (unit := parse_unit(part)) is not None)
    return next((_OF_UNIT.get(measures, measures) for measures in units), None)


_NEAR = {column_name(name): column for name, column in IMPORTED.items()}
_SHORTEST = 4
_NEAR_ENOUGH = 0.6
_OF_UNIT = {"time": "step_time_ms", "memory": "memory_gib", "share": "mfu"}


def _whole(plain: str) -> TitleColumn | None:
    for text in (plain, " ".join(_BRACKETS.sub(r" \1 ", plain).split())):
        if (column := imported_column(text)) is not None:
            return column
        if column_name(text) in _SPEEDS:
            return SpeedColumn()
        if (rate := _rate(text)) is not None:
            return rate
    return None


def _rate(text: str) -> ImportedColumn | None:
    unit = parse_unit(text.replace("_", " "))
    return ImportedColumn(COLUMNS[unit.measures], unit.scale) if unit is not None and is_rate(unit) else None


def _split(plain: str) -> tuple[str, list[str]]:
    """A title without its brackets and what follows a comma, and these parts."""
    base, *behind = _BRACKETS.sub(" ", plain).split(",")
    inside = (part for bracket in _BRACKETS.findall(plain) for part in re.split("[,;]", bracket))
    return base.strip(), [part for text in (*inside, *behind) if (part := text.strip())]


def _in_units(column: TitleColumn, parts: list[str]) -> TitleColumn | None:
    for part in parts:
        found = _in_unit(column, part) or _scaled(column, part)
        if found is None:
            return None
        column = found
    return column


def _in_unit(column: TitleColumn, text: str) -> ImportedColumn | None:
    """The column with a unit of its title, which cells without one have; None if the unit is not one of it."""
    if isinstance(column, SpeedColumn):
        return _rate(text)
    unit = find_unit(text, column.column)
    if unit is None:
        return None
    is_counted = column.column.kind in {"count", "number", "text", "epochs"}
    return column if is_counted else column._replace(scale=unit.scale)


def _scaled(column: TitleColumn, text: str) -> ImportedColumn | None:
    """The column with a scale of its title."""
    times = find_scale(text, column.column) if isinstance(column, ImportedColumn) else None
    return column._replace(times=times) if times is not None and isinstance(column, ImportedColumn) else None
