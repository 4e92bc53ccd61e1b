"""Plausible: which figures of a node are plausible at all. Nodes are not trusted; the others are as good as missing.

Knows bounds alone; whether figures agree with each other is for who compares them.
"""

from __future__ import annotations

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
