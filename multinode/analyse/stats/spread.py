"""Spreads: a distribution in three figures, and a figure with its range over repeats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

import msgspec

__all__ = ["Ranged", "Spread", "known_max", "known_mean", "known_median", "known_sum", "ranged", "ratio", "spread_of"]


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


class Ranged(msgspec.Struct, frozen=True, kw_only=True):
    """A figure with its spread.

    Attributes:
        value: the median of the repeats.
        low: the least of them, or the bound that their own scatter gives where that is lower; `high` likewise.
    """

    value: float
    low: float
    high: float
    repeats: int = 1


def ranged(values: Sequence[float], *, relative: float = 0.0) -> Ranged:
    """Of at least one repeat.

    Args:
        values: one a repeat.
        relative: how far off one repeat may be by its own scatter, upwards or downwards: two that agree are no proof.
    """
    value = statistics.median(values)
    off = relative / math.sqrt(len(values))
    low, high = min(*values, value / (1 + off)), max(*values, value * (1 + off))
    return Ranged(value=value, low=low, high=high, repeats=len(values))


def ratio(over: Ranged, under: Ranged) -> Ranged:
    """One over another, both above zero; its bounds are the furthest apart that theirs allow."""
    return Ranged(
        value=over.value / under.value,
        low=over.low / under.high,
        high=over.high / under.low,
        repeats=min(over.repeats, under.repeats),
    )


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
