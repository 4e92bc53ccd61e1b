"""Trained time: for how long a node trained, by its stored steps. Pure; what was asked for is not known here."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable

from multinode.core.run.samples import Sample, StepSample

__all__ = ["trained_s"]

_NS_PER_S = 1e9


def trained_s(samples: Iterable[Sample]) -> float | None:
    """Seconds from a node's first step to when the step that was cut off would have ended.

    A training that is stopped at its time is cut off in the middle of a step. So a median step is added to those that
    it ended: where that reaches the time, it has made all the steps that there was time for. Of several workers it is
    the one that trained least; each is timed by its own node's monotonic clock.

    Returns:
        The time; None where a worker, or the node, recorded fewer than two steps.
    """
    ends_ns: dict[int, list[int]] = {}
    for sample in samples:
        if isinstance(sample, StepSample):
            ends_ns.setdefault(sample.rank, []).append(sample.mono_ns)
    if not ends_ns or any(len(ends) < 2 for ends in ends_ns.values()):  # noqa: PLR2004 - a step lies between two ends
        return None
    return min(map(_worker_ns, ends_ns.values())) / _NS_PER_S


def _worker_ns(ends_ns: list[int]) -> float:
    ends_ns = sorted(ends_ns)
    return ends_ns[-1] - ends_ns[0] + statistics.median(after - before for before, after in itertools.pairwise(ends_ns))
