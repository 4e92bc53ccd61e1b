"""What all charts share: a curve thinned to fewer points, with none of its peaks lost."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["MOST_POINTS", "Curve", "thinned"]

MOST_POINTS = 2000

Curve = tuple[list[float], list[float | None]]
"""x, ascending, and y; a y of None is a gap."""


def thinned(xs: Sequence[float], ys: Sequence[float | None], most: int = MOST_POINTS) -> Curve:
    """At most so many points: of each stretch of a long curve the least and the greatest, and the curve's two ends.

    A gap in a long curve is closed where its stretch has points.
    """
    if len(xs) <= most:
        return list(xs), list(ys)
    stretches = max(1, (most - 2) // 2)
    kept = {0, len(xs) - 1}
    for number in range(stretches):
        span = range(number * len(xs) // stretches, (number + 1) * len(xs) // stretches)
        known = [(value, index) for index in span if (value := ys[index]) is not None]
        if known:
            kept |= {min(known)[1], max(known)[1]}
    order = sorted(kept)
    return [xs[index] for index in order], [ys[index] for index in order]
