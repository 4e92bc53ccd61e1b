"""Draws: one fixed, quasi-random set of values for all that predictions do not know. Pure.

A prediction is computed once in each draw: an interval holds 90% of what the draws give, and a ratio of two predictions
is taken within each draw, so what both do not know cancels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

LOW, MIDDLE, HIGH = 0.05, 0.5, 0.95
"""Levels of a speed among the draws: the ends of an interval of 90%, and the prediction itself."""
OTHERWISE = 0.5
"""Draws beyond this position, or its negative, have the other of two values that nothing lies between."""
# A rank-1 lattice. Of all generators, these have the most exact quantiles of sums of up to seven unknowns: off by 6%,
# and exact for one.
_HALF, _GENERATORS = 30, (1, 40, 14, 11, 13, 32, 38)


class Draw(NamedTuple):
    """One value of every unknown: 0 is the usual one, -1 to 1 from a fast step to a slow one have 90% of them."""

    rate: float = 0.0  # what links, nodes and algorithms carry, between their bounds
    network: float = 0.0  # error of the time of calls
    compute: float = 0.0  # error of the workers' own work
    cores: float = 0.0  # part of the own work that was a wait for a core: none from 0 on
    overlap: float = 0.0  # part of the communication that computation hides
    step: float = 0.0  # error of the whole step
    fixed: float = 0.0  # part of the own work that is done once per step: none up to 0


def _draw(index: int) -> Draw:
    count = 2 * _HALF + 1
    places = (index * generator for generator in _GENERATORS)
    return Draw(*(((place + _HALF) % count - _HALF) / _HALF / (HIGH - LOW) for place in places))


DRAWS = tuple(map(_draw, range(-_HALF, _HALF + 1)))
"""The set; with each draw it has its mirror image."""


def between(position: float, fast: float, usual: float, slow: float) -> float:
    """A positive unknown at a position of a draw: on a logarithmic scale between its bounds."""
    end, share = (slow, position) if position > 0 else (fast, -position)
    return usual * math.pow(end / usual, min(1.0, share))


def linear(position: float, fast: float, usual: float, slow: float) -> float:
    """A share at a position between its fast, usual and slow values, on a linear scale."""
    end, share = (slow, position) if position > 0 else (fast, -position)
    return usual + (end - usual) * min(1.0, share)


def interval(value: float, drawn: Sequence[float], error: float) -> tuple[float, float]:
    """The interval of 90% of a speed, at least as wide as the error.

    Args:
        value: the prediction.
        drawn: the prediction in each of DRAWS.
        error: of the whole step, in either direction: 0.1 is 10%.
    """
    speeds = sorted(speed * (1 + error) ** -draw.step for speed, draw in zip(drawn, DRAWS, strict=True))
    return min(value / (1 + error), quantile(speeds, LOW)), max(value * (1 + error), quantile(speeds, HIGH))


def quantile(ordered: Sequence[float], level: float) -> float:
    """The value at a level of sorted values."""
    place = level * (len(ordered) - 1)
    below = math.floor(place)
    low, high = ordered[below], ordered[min(below + 1, len(ordered) - 1)]
    return low + (high - low) * (place - below)
