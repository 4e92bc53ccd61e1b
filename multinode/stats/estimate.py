"""Estimates: a figure with its 95 % confidence interval, and one figure over another. Pure.

One definition for every range that is printed (ADR 0029): of several repeats, Student's t over the repeats; of one
run, the moving-block bootstrap over its steps, which are not independent. For a sum the variance of that bootstrap has
a closed form (Kuensch 1989; in a circle, Politis and Romano 1992), so nothing is drawn at random.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

Bounds = tuple[float, float]
"""Low and high."""

# Blocks as long as a fifth of the run hold what steps have in common with those before them; of a short run, three
# steps. Simulated with autocorrelations up to 0.6 and with stragglers, intervals of 30 steps cover the truth in 89 to
# 97 of 100 runs; twice the standard error of independent steps does so in 64 to 95.
_BLOCKS = 5
_SHORTEST_BLOCK = 3
# Overlapping blocks tell more than those beside each other would (Meketon and Schmeiser 1984).
_PER_BLOCK = 1.5
# Bounds of 97.5 %, by degrees of freedom from 1; beyond these 1.96 + 2.4 / df is off by less than 0.3 %.
_STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
# Of the logarithm: what is less certain tells nothing, and stays far from what a float can hold.
_WIDEST = 10.0


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A figure with its 95 % confidence interval; of a published figure, with what the rounding of its digits leaves.

    Attributes:
        value: the mean of the repeats.
        low: the interval's lower end; `high` the upper one.
        repeats: how many there are.
        values: one a repeat, in the order in which they were measured; empty where there is one, or they are not known.
    """

    value: float
    low: float
    high: float
    repeats: int = 1
    values: tuple[float, ...] = ()

    def __mul__(self, factor: float) -> Estimate:
        """Each of its figures times a factor above zero."""
        value, low, high, *values = (one * factor for one in (self.value, self.low, self.high, *self.values))
        return Estimate(value=value, low=low, high=high, repeats=self.repeats, values=tuple(values))


def of_repeats(values: Sequence[float]) -> Estimate:
    """From two repeats or more, none below zero: their mean, and Student's t over them."""
    value = statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(len(values))
    spread = _student(len(values) - 1) * error / value if value else 0.0
    low, high = _around(value, spread)
    return Estimate(value=value, low=low, high=high, repeats=len(values), values=tuple(values))


def of_scatter(value: float, cv: float, count: int) -> Bounds:
    """The interval where nothing is known but the coefficient of variation of so many independent timings."""
    return _around(value, _student(count - 1) * cv / math.sqrt(count) if count > 1 else math.inf)


def estimate_rate(amounts: Sequence[float], times: Sequence[float]) -> Estimate:
    """The sum of the amounts over that of the times of as many steps, of which there is at least one."""
    value = math.fsum(amounts) / math.fsum(times)
    off = [amount - value * time for amount, time in zip(amounts, times, strict=True)]
    low, high = _around(value, half_width(off) / statistics.fmean(amounts) if value else 0.0)
    return Estimate(value=value, low=low, high=high)


def estimate_median(values: Sequence[float]) -> Estimate:
    """The median of the steps; its interval lies between order statistics (Woodruff 1952)."""
    value, ordered = statistics.median(values), sorted(values)
    above = [(one > value) - (one < value) for one in values]
    reach, last = min(0.5, half_width(above) / 2), len(ordered) - 1
    low, high = ordered[math.floor((0.5 - reach) * last)], ordered[math.ceil((0.5 + reach) * last)]
    if reach == 0.5:  # noqa: PLR2004 - all of them: so few steps may lie on one side of their median
        least, most = _around(value, half_width(values) / value if value else 0.0)
        low, high = min(low, least), max(high, most)
    return Estimate(value=value, low=low, high=high)


def ratio(above: Estimate, below: Estimate) -> Estimate:
    """One figure over another, both above zero.

    Repeats that were measured in turns are compared turn by turn: what slows a whole turn slows both. Else the widths
    of both intervals, in logarithms, add up as independent errors do (MOVER, Zou and Donner 2008).
    """
    value = above.value / below.value
    pairs = list(zip(above.values, below.values, strict=False)) if len(above.values) == len(below.values) else []
    if len(pairs) > 1 and all(min(pair) > 0 for pair in pairs):
        logs = [math.log(one / other) for one, other in pairs]
        low, high = _around(value, _student(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs)))
    else:
        low, _ = _around(value, math.hypot(math.log(above.value / above.low), math.log(below.high / below.value)))
        _, high = _around(value, math.hypot(math.log(above.high / above.value), math.log(below.value / below.low)))
    return Estimate(value=value, low=low, high=high, repeats=min(above.repeats, below.repeats))


def inverse(figure: Estimate) -> Estimate:
    """One over a figure above zero."""
    value, low, high, *values = (1 / one for one in (figure.value, figure.high, figure.low, *figure.values))
    return Estimate(value=value, low=low, high=high, repeats=figure.repeats, values=tuple(values))


def half_width(values: Sequence[float]) -> float:
    """Of the 95 % interval around the mean of a series: the block bootstrap's standard error, times Student's t."""
    count = len(values)
    if count < 2:  # noqa: PLR2004 - nothing tells how far steps scatter
        return math.inf
    block = max(1, round(count / _BLOCKS), min(_SHORTEST_BLOCK, count // _SHORTEST_BLOCK))
    mean = statistics.fmean(values)
    # Sums of the blocks that begin at each step; the first step follows the last.
    sums = [0.0, *itertools.accumulate(one - mean for one in (*values, *values[:block]))]
    squares = math.fsum((sums[start + block] - sums[start]) ** 2 for start in range(count))
    # Blocks share the mean of the series, which takes block / count from their variance.
    variance = squares / (count * block * (count - block))
    return _student(int(_PER_BLOCK * (count / block - 1))) * math.sqrt(variance)


def _student(freedom: int) -> float:
    freedom = max(1, freedom)
    return _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96 + 2.4 / freedom


def _around(value: float, spread: float) -> Bounds:
    factor = math.exp(min(_WIDEST, spread))
    return value / factor, value * factor


_Found = TypeVar("_Found")


class UnknownError(ValueError):
    """A figure is not known; the message is the reason, as people read it."""


def attempt(missing: dict[str, str], name: str, find: Callable[[], _Found]) -> _Found | None:
    """What is found; None where it is not known, with the reason put into `missing`."""
    try:
        return find()
    except UnknownError as error:
        missing[name] = str(error)
        return None


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution in three figures: median, 95th percentile, and cv (standard deviation over mean)."""

    median: float
    p95: float
    cv: float


def spread_of(values: Sequence[float]) -> Spread:
    """Median, p95 (nearest rank) and cv of at least one value."""
    ordered = sorted(values)
    p95 = ordered[min(len(ordered) - 1, -(-95 * len(ordered) // 100) - 1)]
    mean = statistics.fmean(ordered)
    deviation = statistics.stdev(ordered) if len(ordered) > 1 else 0.0
    return Spread(median=statistics.median(ordered), p95=p95, cv=deviation / mean if mean else 0.0)


def known_median(values: Iterable[float | None]) -> float | None:
    """The median of those that are known; None where none is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def known_max(values: Iterable[float | None]) -> float | None:
    """The greatest of those that are known; None where none is."""
    return max((value for value in values if value is not None), default=None)


def known_sum(values: Iterable[float | None]) -> float | None:
    """The sum; None where one of them is not known, or there is none."""
    every = list(values)
    known = [value for value in every if value is not None]
    return math.fsum(known) if known and len(known) == len(every) else None


def known_mean(values: Iterable[float | None]) -> float | None:
    """The mean; None where one of them is not known, or there is none."""
    every = list(values)
    total = known_sum(every)
    return total / len(every) if total is not None else None
