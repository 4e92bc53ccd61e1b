"""Rounded: a published figure, with the bounds that its last digit leaves. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal

import msgspec

_NUMBER = re.compile(r"\d{1,40}(?:\.\d{0,40})?(?:[eE][-+]?\d{1,3})?", re.ASCII)
_COUNT = re.compile(r"\d{1,40}(?:\.0+)?", re.ASCII)
# Far above any training's figures, and low enough that products of several stay within a float.
_LEAST, _MOST = Decimal("1e-12"), Decimal("1e15")
_MOST_COUNT = 10**12


class Rounded(msgspec.Struct, frozen=True, kw_only=True):
    """A positive figure known to lie between two bounds; products and quotients keep the bounds."""

    value: float  # as written
    low: float  # the smallest value that rounds to it
    high: float  # the largest value that rounds to it

    def __mul__(self, other: Rounded) -> Rounded:
        """The product."""
        return Rounded(value=self.value * other.value, low=self.low * other.low, high=self.high * other.high)

    def __truediv__(self, other: Rounded) -> Rounded:
        """The quotient."""
        return Rounded(value=self.value / other.value, low=self.low / other.high, high=self.high / other.low)


def exactly(value: float) -> Rounded:
    """A figure without rounding, such as a count."""
    return Rounded(value=value, low=value, high=value)


def product(over: Iterable[Rounded], under: Iterable[Rounded] = (), scale: float = 1.0) -> Rounded:
    """The product of some figures over that of others, times a constant."""
    total = exactly(scale)
    for scaled in over:
        total *= scaled
    for scaled in under:
        total /= scaled
    return total


def parse_rounded(text: str, *, scale: float = 1.0) -> Rounded:
    """A published figure, exact to half a unit of its last digit.

    Args:
        text: such as `0.085`, `1169.29`, `1.5e3`.
        scale: factor from its unit to ours.

    Raises:
        ValueError: it is not a positive number, or implausible.
    """
    if not _NUMBER.fullmatch(text) or not _LEAST <= Decimal(text) <= _MOST:
        raise ValueError(f"{text!r} is not a positive number")
    value = Decimal(text)
    half = Decimal(1).scaleb(int(value.as_tuple().exponent)) / 2
    # A value rounded to a single digit, 1e3 or 0.1, was positive, too.
    low = max(value - half, value / 2)
    return Rounded(value=float(value) * scale, low=float(low) * scale, high=float(value + half) * scale)


def round_number(number: float) -> Rounded:
    """A published number as YAML has it, exact to half a unit of its last digit.

    Zeros at the end of a whole number are no digits: 200 is 150 to 250, 200.0 is 199.95 to 200.05.
    """
    text = f"{Decimal(number).normalize():E}" if isinstance(number, int) else repr(number)
    return parse_rounded(text.replace("E+", "e"))


def parse_count(text: str) -> Rounded:
    """A count of at least one; `64.0`, as spreadsheets write it, is 64.

    Raises:
        ValueError: it is not a count, or implausible.
    """
    if not _COUNT.fullmatch(text) or not 0 < int(text.partition(".")[0]) <= _MOST_COUNT:
        raise ValueError(f"{text!r} is not a count")
    return exactly(float(text.partition(".")[0]))
