"""gain: of one prediction over another, with the range that what is not known leaves it. Pure.

Break-even, speed-ups and advice all compare predictions; how sure that is, is decided here alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from multinode.predict.network_model import widest
from multinode.predict.predict import Prediction

# Not two runs of one training agree better.
_LEAST_DOUBT = 0.02


class Gain(NamedTuple):
    """A ratio of speeds, and its range."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Gain:
        """The same in another unit."""
        return Gain(self.value * factor, self.low * factor, self.high * factor)

    def reaches(self, least: float) -> tuple[bool, bool, bool]:
        """Whether it is at least that much: at best, in the middle, at worst."""
        return self.high >= least, self.value >= least, self.low >= least


def gain(then: Prediction, now: Prediction, *, doubt: float = 0.0) -> Gain:
    """Samples/s of one prediction over those of another.

    Where the back-test has an interval for what they are on several nodes, it is that of their ratio too: each of its
    residuals is one of several nodes over one. Else both are taken at the same end of what they do not know, which is
    mostly the same (a rate, a hidden share), and what only one of them does not know counts on top.

    Args:
        then: the one.
        now: the other, which is 1.
        doubt: how far off the ratio may be besides, upwards or downwards: 0.1 is 10 %.
    """
    value = then.samples_per_s / now.samples_per_s
    tested = [one for one in (then, now) if one.basis == "back-test"]
    if tested and not any(one.basis == "assumed" and one.scenario.layout.nodes > 1 for one in (then, now)):
        factor = (1 + doubt) * max(one.interval[1] / one.samples_per_s for one in tested)
        return Gain(value, value / factor, value * factor)
    samples = then.scenario.samples / now.scenario.samples
    ratios = [value, *(samples * end.step_ms / start.step_ms for end, start in zip(now.ends, then.ends, strict=True))]
    stretch = (1 + max(doubt, own_error(then), own_error(now))) * _own_doubts(then, now)
    return Gain(value, min(ratios) / stretch, max(ratios) * stretch)


def gain_over_measured(then: Prediction, now: Prediction, measured_samples_per_s: float, *, doubt: float = 0.0) -> Gain:
    """`gain` where `now` was measured: its range is no wider than the interval of the one over that measurement."""
    found, (low, high) = gain(then, now, doubt=doubt), then.interval
    low, high = low / measured_samples_per_s / (1 + doubt), high / measured_samples_per_s * (1 + doubt)
    return Gain(found.value, min(found.value, max(found.low, low)), max(found.value, min(found.high, high)))


def own_error(found: Prediction) -> float:
    """Of the whole step, upwards or downwards: what the model is not better than, whatever it knows of the parts."""
    return max((one.relative for one in found.doubts if one.part == "step"), default=_LEAST_DOUBT)


def _own_doubts(then: Prediction, now: Prediction) -> float:
    """What one of two predictions doubts beyond the other, part by part, as a factor: of its share of the step."""
    factors = []
    for part in ("network", "compute"):
        wide, narrow = sorted((then, now), key=lambda one: -widest(one.doubts, part))
        parts = wide.ends[0]
        share = parts.exposed_ms / parts.step_ms if part == "network" else 1 - parts.exposed_ms / parts.step_ms
        factors.append(1 + (widest(wide.doubts, part) / widest(narrow.doubts, part) - 1) * share)
    return math.prod(factors)
