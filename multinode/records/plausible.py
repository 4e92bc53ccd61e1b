"""Plausible: which figures of a node are plausible at all. Nodes are not trusted; the others are as good as missing.

Knows bounds alone; whether figures agree with each other is for who compares them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal

import msgspec

# Eleven days: no step, and no part of one, takes longer; sums of such figures stay far from what a float can hold.
_LONGEST_US = 1e12
# A nanosecond: no clock tells less, and what is divided by it stays far from there, too.
_SHORTEST_US = 1e-3
_LARGEST_COUNT = 1 << 60


def plausible_us(value: float | None) -> float | None:
    """A duration in microseconds: none at all, or from a nanosecond to eleven days; None is anything else."""
    # What is no number is in no range; an integer of a thousand digits is compared before it is made a float.
    return float(value) if value is not None and (value == 0 or _SHORTEST_US <= value <= _LONGEST_US) else None


def plausible_count(value: int | None) -> int | None:
    """A number of things; None where it is missing, negative or above 2**60."""
    return value if value is not None and 0 <= value <= _LARGEST_COUNT else None


_NUMBER = re.compile(r"\d{1,40}(?:\.\d{0,40})?(?:[eE][-+]?\d{1,3})?", re.ASCII)
_COUNT = re.compile(r"\d{1,40}(?:\.0+)?", re.ASCII)
# Far above what any training has, and few enough orders of magnitude that no product of several leaves a float.
_LEAST, _MOST = Decimal("1e-12"), Decimal("1e15")
_MOST_COUNT = 10**12


class Rounded(msgspec.Struct, frozen=True, kw_only=True):
    """A figure above zero that is known to lie between two bounds; products and quotients carry the bounds along.

    Attributes:
        value: as it was written.
        low: the least that is rounded to it; `high` the most.
    """

    value: float
    low: float
    high: float

    def __mul__(self, other: Rounded) -> Rounded:
        """The product."""
        return Rounded(value=self.value * other.value, low=self.low * other.low, high=self.high * other.high)

    def __truediv__(self, other: Rounded) -> Rounded:
        """The quotient."""
        return Rounded(value=self.value / other.value, low=self.low / other.high, high=self.high / other.low)


def exactly(value: float) -> Rounded:
    """A figure without rounding, such as a number of things."""
    return Rounded(value=value, low=value, high=value)


def product(over: Iterable[Rounded], under: Iterable[Rounded] = (), scale: float = 1.0) -> Rounded:
    """The product of some figures over that of others, times a constant."""
    found = exactly(scale)
    for one in over:
        found *= one
    for one in under:
        found /= one
    return found


def parse_rounded(text: str, *, scale: float = 1.0) -> Rounded:
    """A figure as it was published: half a unit of its last digit either way.

    Args:
        text: such as `0.085`, `1169.29`, `1.5e3`.
        scale: what its unit is in ours.

    Raises:
        ValueError: it is no number above zero, or an implausible one.
    """
    if not _NUMBER.fullmatch(text) or not _LEAST <= Decimal(text) <= _MOST:
        raise ValueError(f"{text!r} is no figure above 0")
    value = Decimal(text)
    half = Decimal(1).scaleb(int(value.as_tuple().exponent)) / 2
    # What was rounded up to a single digit, 1e3 or 0.1, was above zero all the same.
    low = max(value - half, value / 2)
    return Rounded(value=float(value) * scale, low=float(low) * scale, high=float(value + half) * scale)


def parse_count(text: str) -> Rounded:
    """A number of things, at least one; `64.0` of a spreadsheet is 64.

    Raises:
        ValueError: it is none, or an implausible one.
    """
    if not _COUNT.fullmatch(text) or not 0 < int(text.partition(".")[0]) <= _MOST_COUNT:
        raise ValueError(f"{text!r} is no number of things")
    return exactly(float(text.partition(".")[0]))
