"""Ranged: a measured figure with its spread over repeats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

__all__ = ["Ranged", "ranged", "ratio"]


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
