"""Sheet: a table as plain text, before anybody knows whether a terminal or a page shows it. No figure is made here."""

from __future__ import annotations

import msgspec

__all__ = ["RANGES", "UNKNOWN", "Column", "Sheet", "figure", "format_sig", "megabytes", "percent"]

UNKNOWN = "-"
RANGES = "ranges are 95 % confidence intervals over the repeats; of a single run, over its steps: no other run is known"
"""Stands below tables that have some."""
_BYTES_PER_MB = 1e6
_MANY = 1e12
# Below it three digits behind the point are too few.
_LITTLE = 0.00995


class Column(msgspec.Struct, frozen=True):
    """A column.

    Attributes:
        words: whether it holds words, which stand on the left and may wrap, or figures.
    """

    name: str
    unit: str = ""
    words: bool = False


class Sheet(msgspec.Struct, frozen=True, kw_only=True):
    """A table.

    Attributes:
        columns: without them, its rows are a name and what there is to say of it.
        rows: a cell a column; plain text, whoever wrote it.
        notes: a sentence each, to stand below it.
    """

    title: str
    columns: tuple[Column, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()


def figure(value: float | None, form: str = ".1f") -> str:
    """A figure, or a dash."""
    return UNKNOWN if value is None else format(value, form)


def format_sig(value: float | None) -> str:
    """A figure with as many digits as a reader can use, two to four of them, or a dash."""
    if value is None or value == 0:
        return UNKNOWN if value is None else "0"
    if abs(value) < _LITTLE:
        return f"{value:.2g}"
    for digits, below in ((3, 0.9995), (2, 9.995), (1, 999.95)):
        if abs(value) < below:
            return f"{value:.{digits}f}"
    return f"{value:,.0f}" if abs(value) < _MANY else f"{value:.3g}"


def percent(share: float | None, form: str = ".1f") -> str:
    """A share in percent, or a dash."""
    return UNKNOWN if share is None else f"{100 * share:{form}} %"


def megabytes(size_bytes: float | None) -> str:
    """Bytes in MB (1e6), or a dash."""
    return UNKNOWN if size_bytes is None else f"{size_bytes / _BYTES_PER_MB:,.2f}"
