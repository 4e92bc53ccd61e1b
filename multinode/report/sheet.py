"""Sheet: a table as plain text, before anybody knows whether a terminal or a page shows it. No figure is made here."""

from __future__ import annotations

import msgspec

__all__ = ["UNKNOWN", "Column", "Sheet", "figure", "megabytes", "percent"]

UNKNOWN = "-"
_BYTES_PER_MB = 1e6


class Column(msgspec.Struct, frozen=True):
    """A column.

    Attributes:
        name: what stands in it.
        unit: of its figures.
        words: whether it holds words, which stand on the left and may wrap, or figures.
    """

    name: str
    unit: str = ""
    words: bool = False


class Sheet(msgspec.Struct, frozen=True, kw_only=True):
    """A table.

    Attributes:
        title: what it is about.
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


def percent(share: float | None, form: str = ".1f") -> str:
    """A share in percent, or a dash."""
    return UNKNOWN if share is None else f"{100 * share:{form}} %"


def megabytes(size_bytes: float | None) -> str:
    """Bytes in MB (1e6), or a dash."""
    return UNKNOWN if size_bytes is None else f"{size_bytes / _BYTES_PER_MB:,.2f}"
