"""judge: what a contrast shows, as a code; why the candidate loses what it loses is `slowdown_attribution`'s. Pure."""

from __future__ import annotations

from typing import Literal

from multinode.contrast.figures import Contrast, Side
from multinode.contrast.slowdown_attribution import NOTICEABLE

Outcome = Literal["unsynchronised", "inconclusive", "equal", "faster", "slower"]
"""Of the candidate against the baseline; `unsynchronised` workers train a model each, and compare nothing."""


def judge(contrast: Contrast) -> Outcome:
    """Inconclusive where the interval reaches from slower to faster, and wider than anybody would call equal."""
    if unsynchronised_side(contrast) is not None:
        return "unsynchronised"
    low, value, high = contrast.speedup.low, contrast.speedup.value, contrast.speedup.high
    if low <= 1 <= high and (low < 1 - NOTICEABLE or high > 1 + NOTICEABLE):
        return "inconclusive"
    if abs(value - 1) <= NOTICEABLE:
        return "equal"
    return "faster" if value > 1 else "slower"


def unsynchronised_side(contrast: Contrast) -> Side | None:
    """A side whose workers exchange no gradients; None where there is none."""
    sides = (contrast.candidate, contrast.baseline)
    return next((one for one in sides if one.bottleneck.kind == "no_communication" and one.world_size > 1), None)
