"""Which steps count: the warm-up is dropped by one rule, and the rule is printed beside every number made with it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

# NCCL connects lazily and DDP rebuilds its buckets after the first iteration: five steps at the least.
_LEAST_DROPPED = 5
_STABLE_WITHIN = 1.5
_SHARE_DROPPED = 1 / 3


class SteadyState(msgspec.Struct, frozen=True, kw_only=True):
    """The measured steps.

    Attributes:
        first: index of the first measured step.
        rule: why, in words.
    """

    first: int
    count: int
    rule: str


def find_steady_state(step_times_us: Sequence[float]) -> SteadyState:
    """Drop the first 5 steps (of fewer than 15: a third), and on while one takes over 1.5 times the median of the rest.

    At most a third is dropped in all; at least one step counts, where there is one.
    """
    total = len(step_times_us)
    most = int(total * _SHARE_DROPPED)
    first = min(_LEAST_DROPPED, most)
    if total - first > 0:
        limit = _STABLE_WITHIN * statistics.median(step_times_us[first:])
        while first < most and step_times_us[first] > limit:
            first += 1
    return SteadyState(
        first=first, count=total - first, rule=f"the first {first} of {total} steps are warm-up, excluded"
    )


def steps_to_run(counted: int) -> int:
    """Steps that a training has to make for so many to count, if none of them is slow to settle."""
    total = counted
    while total - min(_LEAST_DROPPED, int(total * _SHARE_DROPPED)) < counted:
        total += 1
    return total
