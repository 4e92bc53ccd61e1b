"""IMPORTED: the columns that a table measured elsewhere may have, by every name, and what a cell of each may hold."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import NamedTuple

from multinode.core.grid.columns import COLUMNS, CellColumn, ColumnKind
from multinode.core.text.rounded import Rounded, exactly, parse_count, parse_rounded
from multinode.units import parse_clock

__all__ = ["IMPORTED", "NONE", "OUT_OF_MEMORY", "ImportedColumn", "column_name", "nearest_columns"]

_Value = str | Rounded

NONE = frozenset({"-", "null", "none", "n/a", "na"})
"""Cells that say that there is no such figure, in small letters; an empty one leaves it to the table's default."""

OUT_OF_MEMORY = {"oom": "gpu", "oom node": "node"}
"""Cells that stand for a training that ran out of memory, in small letters, and whose memory it was."""

_LONGEST_WORDS = 200
_MOST_SUGGESTED = 4
_FLAGS = {"true": "yes", "yes": "yes", "1": "yes", "false": "no", "no": "no", "0": "no"}
_UNIT = re.compile(r"/\s*(?=[a-z])")
_NO_WORD = re.compile(r"[^a-z0-9]+")


class ImportedColumn(NamedTuple):
    """A column of a foreign table, under one of its names.

    Attributes:
        parse: text to value; raises ValueError.
        expected: what it may hold, for messages.
        is_measured: whether it tells how a training went, and may so hold OOM.
        scale: what its unit is in ours.
    """

    column: CellColumn
    parse: Callable[[str], _Value]
    expected: str
    is_measured: bool = False
    scale: float = 1.0

    @property
    def written(self) -> str:
        """What messages call it."""
        return self.column.written or self.column.name


def column_name(title: str) -> str:
    """A title as IMPORTED has it: small letters and `_`, `/s` as `_per_s`: `Samples/s` is `samples_per_s`."""
    return _NO_WORD.sub("_", _UNIT.sub("_per_", title.strip().lower())).strip("_")


def nearest_columns(title: str) -> list[str]:
    """Known columns that a title is likely to mean, the likeliest first, one a value."""
    name = column_name(title)
    begun = [known for known in IMPORTED if name and known.startswith(name)]
    near = [*begun, *difflib.get_close_matches(name, IMPORTED, n=2 * _MOST_SUGGESTED)]
    figures = {IMPORTED[known].written: known for known in reversed(near)}
    return list(reversed(figures.values()))[:_MOST_SUGGESTED]


def _words(text: str) -> str:
    if len(text) > _LONGEST_WORDS:
        raise ValueError(text)
    return text


def _flag(text: str) -> str:
    if text.lower() not in _FLAGS:
        raise ValueError(text)
    return _FLAGS[text.lower()]


def _epochs(text: str) -> Rounded:
    value = parse_rounded(text)
    # Whoever writes 3 epochs does not mean anything from 2.5 to 3.5.
    return value if "." in text else exactly(value.value)


def _clock(text: str) -> Rounded:
    if ":" not in text:
        return parse_rounded(text)
    seconds = parse_clock(text)
    if not seconds:
        raise ValueError(text)
    half = 0.5 if "." not in text else 0.0
    return Rounded(value=seconds, low=seconds - half, high=seconds + half)


def _part_of_one(text: str) -> Rounded:
    percent = text.endswith("%")
    value = parse_rounded(text.removesuffix("%").rstrip(), scale=0.01 if percent else 1.0)
    if value.value > 1:
        # 45 without a sign may be a share in percent, and is not taken for one.
        raise ValueError(text)
    return value


_KINDS: dict[ColumnKind, tuple[Callable[[str], _Value], str, bool]] = {
    "text": (_words, f"words, at most {_LONGEST_WORDS} characters", False),
    "flag": (_flag, "true or false", False),
    "count": (parse_count, "a whole number, at least 1", False),
    "number": (parse_rounded, "a number above 0", False),
    "epochs": (_epochs, "a number above 0", False),
    "measured": (parse_rounded, "a number above 0 with a decimal point, and no unit", True),
    "clock": (_clock, "seconds, 28:04 (minutes) or 3:35:20 (hours)", True),
    "share": (_part_of_one, "a share above 0, such as 0.45 or 45 %", True),
    "price": (parse_rounded, "a price above 0, a number alone", False),
}


def _imported() -> dict[str, ImportedColumn]:
    found: dict[str, ImportedColumn] = {}
    for column in COLUMNS.values():
        if column.kind is not None:
            one = ImportedColumn(column, *_KINDS[column.kind])
            found |= dict.fromkeys((one.written, *column.names), one)
        for name, scale in column.units.items():
            found[name] = ImportedColumn(column, *_KINDS["measured"], scale)
    return found


IMPORTED = _imported()
"""By every name that a column of a foreign table may have."""
