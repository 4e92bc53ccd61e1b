"""view: which rows of a table are shown, relative to which, and in what order. Pure."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from multinode.analyse.grid.cell_table import relative_to, with_notes
from multinode.analyse.grid.cell_values import require_name, value_of
from multinode.analyse.grid.cells import CellRow, CellTable
from multinode.core.cluster.device_name import device_key
from multinode.errors import UsageError

__all__ = ["Look", "look_at"]

_Condition = Callable[[CellRow], bool]

_CONDITION = re.compile(r"(?P<name>[^=!<>]+)(?P<sign>!=|<=|>=|=|<|>)(?P<value>.*)", re.DOTALL)
_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
}
_TRUTHS = {"yes": True, "true": True, "no": False, "false": False}
_EXAMPLES = "for example method=lora, nodes>=2, state!=failed"


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What of a table is asked for.

    Attributes:
        baseline: label of the row that the others are relative to; None takes the first that is shown and has a speed.
        sort: name of a value to sort by, the least first; with `-` before it the greatest.
        where: conditions such as `method=lora` and `nodes>=2`; rows that meet all of them are shown.
    """

    baseline: str | None = None
    sort: str | None = None
    where: tuple[str, ...] = ()


def look_at(table: CellTable, look: Look) -> CellTable:
    """The table as it was asked for.

    Raises:
        UsageError: a name or a label is not the table's, or a condition cannot be understood.
    """
    if look.baseline is not None:
        table = relative_to(table, look.baseline)
    conditions = [_condition(table.cells, text) for text in look.where]
    rows = [row for row in table.cells if all(meets(row) for meets in conditions)]
    if look.sort is not None:
        rows = _sorted(table.cells, rows, look.sort)
    if not rows and table.cells and conditions:
        none = f"No row of {len(table.cells):,} meets {' and '.join(look.where)}."
        return msgspec.structs.replace(table, cells=(), baseline=None, rule="", notes=(none,))
    shown = with_notes(msgspec.structs.replace(table, cells=tuple(rows)))
    if look.baseline is not None or any(row.label == table.baseline for row in rows):
        return shown
    return relative_to(shown)


def _sorted(all_rows: Sequence[CellRow], rows: Sequence[CellRow], sort: str) -> list[CellRow]:
    """Rows that have no such value stand last, in the order that they had."""
    name = sort.removeprefix("-")
    require_name(all_rows, name)
    values = [value_of(row, name) for row in rows]
    known = [place for place, value in enumerate(values) if value is not None]
    keys = values
    if any(not isinstance(values[place], (int, float)) for place in known):
        keys = [str(value).casefold() for value in values]
    order = sorted(known, key=keys.__getitem__, reverse=sort.startswith("-"))
    return [rows[place] for place in order] + [row for row, value in zip(rows, values, strict=True) if value is None]


def _condition(all_rows: Sequence[CellRow], text: str) -> _Condition:
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise UsageError(f"{text!r} is no condition", hint=_EXAMPLES)
    name, sign, wanted = match["name"].strip(), match["sign"], match["value"].strip()
    require_name(all_rows, name)
    if not wanted:
        raise UsageError(f"{text!r} says nothing to compare with", hint=_EXAMPLES)
    if sign in {"=", "!="}:
        return lambda row: _is(value_of(row, name), wanted) == (sign == "=")
    bound = _number(wanted)
    if bound is None:
        raise UsageError(f"{text!r}: {wanted!r} is no number, and {sign} compares numbers", hint=_EXAMPLES)
    return lambda row: isinstance(value := value_of(row, name), (int, float)) and _ORDER[sign](value, bound)


def _is(value: object, wanted: str) -> bool:
    """Whether it is what a person wrote: numbers as numbers, words in either case, devices by any of their names.

    What a row does not have is nothing in particular, and equals nothing.
    """
    if value is None:
        return False
    if isinstance(value, bool):
        return value is _TRUTHS.get(wanted.casefold())
    if isinstance(value, (int, float)):
        number = _number(wanted)
        return number is not None and math.isclose(value, number, rel_tol=1e-9)
    text = str(value)
    return text.casefold() == wanted.casefold() or device_key(text) == device_key(wanted)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
