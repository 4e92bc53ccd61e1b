"""Spreads: a distribution in three figures; and means, medians and sums of what is known."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

import msgspec


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
