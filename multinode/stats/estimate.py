"""Estimates: a figure with its 95% confidence interval, and ratios of figures. Pure.

One definition for every printed range (ADR 0029): Student's t over several repeats; for one run, the moving-block
bootstrap over its steps, which are not independent. The variance of that bootstrap for a sum has a closed form (Kuensch
1989; circular: Politis and Romano 1992), so no random numbers are needed.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from multinode.stats.unknown import Unknown
from multinode.units import UNKNOWN, format_sig, ms_digits, times

Bounds = tuple[float, float]
"""Low and high."""

# Blocks of a fifth of the run cover the dependence between steps; in a short run, three steps. In simulations with
# autocorrelations up to 0.6 and with stragglers, intervals of 30 steps cover the true value in 89 to 97 of 100 runs;
# twice the standard error of independent steps does so in 64 to 95.
_BLOCKS = 5
_SHORTEST_BLOCK = 3
# Overlapping blocks are more efficient than adjacent ones (Meketon and Schmeiser 1984).
_PER_BLOCK = 1.5
# Bounds of 97.5%, by degrees of freedom from 1; beyond these 1.96 + 2.4 / df is off by less than 0.3%.
_STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
# Of the logarithm; a wider interval says nothing, and stays within a float.
_WIDEST = 10.0


PLUS_MINUS = "\N{PLUS-MINUS SIGN}"
# A wider or narrower interval is not shown as plus-minus.
_WIDE, _NARROW = 0.25, 0.0005
Form = Literal["figure", "ms", "percent", "range", "ms_range", "times", "times_in_words", "times_range", "faster"]
"""How an estimate is worded: `Estimate.text`."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True, tag_field="is", tag="estimate"):
    """A figure with its interval.

    It is the 95% confidence interval of a measured figure, the 90% interval of a predicted one, and the rounding of a
    published one.
    """

    value: float  # the mean of the repeats
    low: float  # lower end of the interval
    high: float  # upper end of the interval
    repeats: int = 1  # number of repeats
    values: tuple[float, ...] = ()  # one per repeat, in order of measurement; empty for a single one, or if unknown

    def __mul__(self, factor: float | Estimate) -> Estimate:
        """Scaled by a positive factor; by an uncertain one, the product of the ends."""
        if isinstance(factor, Estimate):
            return Estimate(value=self.value * factor.value, low=self.low * factor.low, high=self.high * factor.high)
        value, low, high, *values = (value * factor for value in (self.value, self.low, self.high, *self.values))
        return Estimate(value=value, low=low, high=high, repeats=self.repeats, values=tuple(values))

    def __truediv__(self, divisor: Estimate) -> Estimate:
        """Over another positive figure, at the ends of both: if they are independent, `ratio` is narrower."""
        return Estimate(value=self.value / divisor.value, low=self.low / divisor.high, high=self.high / divisor.low)

    @property
    def bounds(self) -> Bounds:
        """Low and high."""
        return self.low, self.high

    @property
    def is_exact(self) -> bool:
        """Whether the interval is empty."""
        return self.low == self.high

    def text(self, form: Form = "figure", unit: str = "") -> str:
        """The figure and its interval in words.

        Args:
            form: `figure`: `19.4 +- 0.9`, with a wide interval `19.4 (15.1-27)`; `percent`: this form of a figure in
                percent; `range`: `15.1-27`; of step times `ms` and `ms_range`; of a ratio of speeds `times`: `6.7x
                (5.0-9.0)`, `times_in_words`: `6.7x (5.0x to 9.0x)`, `times_range`: `5.0x to 9.0x`, `faster`: `6.7x
                faster (5.0x to 9.0x)` or `slower`. Ends that read the same are left out.
            unit: behind a `figure`.
        """
        write = ms_digits if form in {"ms", "ms_range"} else format_sig
        match form:
            case "figure" | "ms":
                words = self._plus_minus(unit, write=write)
            case "percent":
                words = self._plus_minus("%", most=1)
            case "range" | "ms_range":
                words = f"{write(self.low)}-{write(self.high)}"
            case "times_range":
                words = f"{times(self.low)} to {times(self.high)}"
            case "times":
                words = times(self.value) + _ends(self, "{}-{}", unit="")
            case "times_in_words":
                words = times(self.value) + _ends(self)
            case "faster":
                more, how = (inverse(self), "slower") if self.value < 1 else (self, "faster")
                words = f"{times(more.value)} {how}{_ends(more)}"
        return words

    def _plus_minus(self, unit: str, most: int = 9, write: Callable[[float], str] = format_sig) -> str:
        value, off = self.value, max(self.high - self.value, self.value - self.low)
        if off <= _NARROW * value:
            return write(value) + unit
        if off > _WIDE * value:
            return f"{write(value)}{unit} ({write(self.low)}-{write(self.high)})"
        # One uncertain digit, two if the first is a 1.
        digits = -math.floor(math.log10(off))
        digits = min(most, max(0, digits + (off * 10.0**digits < 2)))  # noqa: PLR2004 - two and more need no second one
        if round(off, digits) == 0:
            return f"{value:,.{digits}f}{unit}"
        return f"{value:,.{digits}f} {PLUS_MINUS} {off:,.{digits}f}{unit}"


def _ends(factor: Estimate, form: str = "{} to {}", unit: str = "x") -> str:
    low, high = (times(end).removesuffix("x") + unit for end in factor.bounds)
    return f" ({form.format(low, high)})" if low != high else ""


def exactly(value: float) -> Estimate:
    """A figure without uncertainty, such as a count."""
    return Estimate(value=value, low=value, high=value)


def of_bounds(value: float, bounds: Bounds | None) -> Estimate:
    """A figure whose interval is known; without one, it is exact."""
    low, high = bounds or (value, value)
    return Estimate(value=value, low=low, high=high)


def value_of(figure: Estimate | Unknown) -> float | None:
    """The figure without its interval; None where it is unknown."""
    return None if isinstance(figure, Unknown) else figure.value


def text_of(estimate: Estimate | None, form: Form = "figure") -> str:
    """The figure with its interval; a dash without one."""
    return UNKNOWN if estimate is None else estimate.text(form)


def of_repeats(values: Sequence[float]) -> Estimate:
    """From at least two nonnegative repeats: their mean, and Student's t over them."""
    value = statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(len(values))
    spread = _student(len(values) - 1) * error / value if value else 0.0
    low, high = _around(value, spread)
    return Estimate(value=value, low=low, high=high, repeats=len(values), values=tuple(values))


def estimate_rate(amounts: Sequence[float], times: Sequence[float]) -> Estimate:
    """The sum of amounts over the sum of times of at least one step."""
    value = math.fsum(amounts) / math.fsum(times)
    off = [amount - value * time for amount, time in zip(amounts, times, strict=True)]
    low, high = _around(value, half_width(off) / statistics.fmean(amounts) if value else 0.0)
    return Estimate(value=value, low=low, high=high)


def estimate_median(values: Sequence[float]) -> Estimate:
    """The median of the steps; its interval lies between order statistics (Woodruff 1952)."""
    value, ordered = statistics.median(values), sorted(values)
    above = [(other > value) - (other < value) for other in values]
    reach, last = min(0.5, half_width(above) / 2), len(ordered) - 1
    low, high = ordered[math.floor((0.5 - reach) * last)], ordered[math.ceil((0.5 + reach) * last)]
    if reach == 0.5:  # noqa: PLR2004 - all of them: so few steps may lie on one side of their median
        least, most = _around(value, half_width(values) / value if value else 0.0)
        low, high = min(low, least), max(high, most)
    return Estimate(value=value, low=low, high=high)


def ratio(above: Estimate, below: Estimate) -> Estimate:
    """One figure over another, both positive.

    Repeats measured in turns are compared turn by turn: what slows a whole turn slows both. Otherwise the widths of
    both intervals, in logarithms, add up like independent errors (MOVER, Zou and Donner 2008).
    """
    value = above.value / below.value
    pairs = list(zip(above.values, below.values, strict=False)) if len(above.values) == len(below.values) else []
    if len(pairs) > 1 and all(min(pair) > 0 for pair in pairs):
        logs = [math.log(value / other) for value, other in pairs]
        low, high = _around(value, _student(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs)))
    else:
        low, _ = _around(value, math.hypot(math.log(above.value / above.low), math.log(below.high / below.value)))
        _, high = _around(value, math.hypot(math.log(above.high / above.value), math.log(below.value / below.low)))
    return Estimate(value=value, low=low, high=high, repeats=min(above.repeats, below.repeats))


def inverse(figure: Estimate) -> Estimate:
    """One over a positive figure."""
    value, low, high, *values = (1 / value for value in (figure.value, figure.high, figure.low, *figure.values))
    return Estimate(value=value, low=low, high=high, repeats=figure.repeats, values=tuple(values))


def half_width(values: Sequence[float]) -> float:
    """Of the 95% interval around the mean of a series: standard error by block bootstrap, times Student's t."""
    count = len(values)
    if count < 2:  # noqa: PLR2004 - nothing tells how far steps scatter
        return math.inf
    block = max(1, round(count / _BLOCKS), min(_SHORTEST_BLOCK, count // _SHORTEST_BLOCK))
    mean = statistics.fmean(values)
    # Sums of the blocks starting at each step; the series is circular.
    sums = [0.0, *itertools.accumulate(value - mean for value in (*values, *values[:block]))]
    squares = math.fsum((sums[start + block] - sums[start]) ** 2 for start in range(count))
    # Blocks share the mean of the series, which reduces their variance by block / count.
    variance = squares / (count * block * (count - block))
    return _student(int(_PER_BLOCK * (count / block - 1))) * math.sqrt(variance)


def _student(freedom: int) -> float:
    freedom = max(1, freedom)
    return _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.96 + 2.4 / freedom


def _around(value: float, spread: float) -> Bounds:
    factor = math.exp(min(_WIDEST, spread))
    return value / factor, value * factor


class Spread(msgspec.Struct, frozen=True, kw_only=True, tag_field="is", tag="spread"):
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
    """The median of the known values; None without any."""
    known_values = [value for value in values if value is not None]
    return statistics.median(known_values) if known_values else None


def known_max(values: Iterable[float | None]) -> float | None:
    """The maximum of the known values; None without any."""
    return max((value for value in values if value is not None), default=None)


def known_sum(values: Iterable[float | None]) -> float | None:
    """The sum; None if a value is unknown, or without values."""
    every = list(values)
    known_values = [value for value in every if value is not None]
    return math.fsum(known_values) if known_values and len(known_values) == len(every) else None


def known_mean(values: Iterable[float | None]) -> float | None:
    """The mean; None if a value is unknown, or without values."""
    every = list(values)
    total = known_sum(every)
    return total / len(every) if total is not None else None
