"""Sheet: a table as plain text, before anybody knows whether a terminal or a page shows it. No figure is made here."""

from __future__ import annotations

import math

import msgspec

from multinode.stats.estimate import Estimate

UNKNOWN = "-"
PLUS_MINUS = "\N{PLUS-MINUS SIGN}"
RANGES = f"ranges and {PLUS_MINUS} are 95 % confidence intervals over the repeats; with one run, over its steps"
"""Stands below tables that have some."""
_BYTES_PER_MB = 1e6
_MANY = 1e12
# Below it three digits behind the point are too few.
_LITTLE = 0.00995
# An interval that is wider than this part of its figure, or narrower, is no plus-minus.
_WIDE, _NARROW = 0.25, 0.0005


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


def plus_minus(measured: Estimate, most: int = 9) -> str:
    """A figure and half of its confidence interval: `19.4 +- 0.9`; of a wide one its ends: `19.4 (15.1-27)`.

    Args:
        measured: the figure.
        most: digits behind the point.
    """
    value = measured.value
    off = max(measured.high - value, value - measured.low)
    if off <= _NARROW * value:
        return format_sig(value)
    if off > _WIDE * value:
        return f"{format_sig(value)} ({format_sig(measured.low)}-{format_sig(measured.high)})"
    # One digit of what is uncertain, two where the first is a 1.
    digits = -math.floor(math.log10(off))
    digits = min(most, max(0, digits + (off * 10.0**digits < 2)))  # noqa: PLR2004 - two and more need no second digit
    if round(off, digits) == 0:
        return f"{value:,.{digits}f}"
    return f"{value:,.{digits}f} {PLUS_MINUS} {off:,.{digits}f}"


def times(factor: float) -> str:
    """A ratio of speeds: `1.78x`, `6.7x`, `12x`."""
    for digits, below in ((2, 1.995), (1, 9.95)):
        if factor < below:
            return f"{factor:.{digits}f}x"
    return f"{factor:,.0f}x"


def range_of_times(measured: Estimate) -> str:
    """Its confidence interval: `6.5x to 6.9x`."""
    return f"{times(measured.low)} to {times(measured.high)}"


def span_of_times(factor: float, interval: tuple[float, float] | None) -> str:
    """A ratio of speeds with its range, for a table: `6.7x (5.0-9.0)`."""
    if interval is None or interval[0] == interval[1]:
        return times(factor)
    low, high = (times(end)[:-1] for end in interval)
    return f"{times(factor)} ({low}-{high})"


def percent(share: float | None, form: str = ".1f") -> str:
    """A share in percent, or a dash."""
    return UNKNOWN if share is None else f"{100 * share:{form}} %"


def megabytes(size_bytes: float | None) -> str:
    """Bytes in MB (1e6), or a dash."""
    return UNKNOWN if size_bytes is None else f"{size_bytes / _BYTES_PER_MB:,.2f}"
