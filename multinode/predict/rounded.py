"""Published figures, with the bounds that their last digit leaves. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal

from multinode.stats.estimate import Estimate, exactly

_NUMBER = re.compile(r"\d{1,40}(?:\.\d{0,40})?(?:[eE][-+]?\d{1,3})?", re.ASCII)
_COUNT = re.compile(r"\d{1,40}(?:\.0+)?", re.ASCII)
# Far above any training's figures, and low enough that products of several stay within a float.
_LEAST, _MOST = Decimal("1e-12"), Decimal("1e15")
_MOST_COUNT = 10**12


def product(over: Iterable[Estimate], under: Iterable[Estimate] = (), scale: float = 1.0) -> Estimate:
    """The product of some figures over that of others, times a constant."""
    total = exactly(scale)
    for scaled in over:
        total *= scaled
    for scaled in under:
        total /= scaled
    return total


def parse_rounded(text: str, *, scale: float = 1.0) -> Estimate:
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
    return Estimate(value=float(value) * scale, low=float(low) * scale, high=float(value + half) * scale)


def round_number(number: float) -> Estimate:
    """A published number as YAML has it, exact to half a unit of its last digit.

    Zeros at the end of a whole number are no digits: 200 is 150 to 250, 200.0 is 199.95 to 200.05.
    """
    text = f"{Decimal(number).normalize():E}" if isinstance(number, int) else repr(number)
    return parse_rounded(text.replace("E+", "e"))


def parse_count(text: str) -> Estimate:
    """A count of at least one; `64.0`, as spreadsheets write it, is 64.

    Raises:
        ValueError: it is not a count, or implausible.
    """
    if not _COUNT.fullmatch(text) or not 0 < int(text.partition(".")[0]) <= _MOST_COUNT:
        raise ValueError(f"{text!r} is not a count")
    return exactly(float(text.partition(".")[0]))
