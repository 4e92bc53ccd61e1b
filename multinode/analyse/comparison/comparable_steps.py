"""Comparable steps: the steps of a contrast's sides, as if their workers had as many samples in each. Pure.

What follows from them for the candidate is `slowdown_attribution`'.
"""

from __future__ import annotations

import msgspec

from multinode.analyse.comparison.contrast_figures import Side
from multinode.analyse.stats.spread import Ranged

__all__ = ["NOTICEABLE", "Case", "exposed_ms", "is_noticeable", "network_ms_of", "part_ms", "step_like", "work_ratio"]

NOTICEABLE = 0.05
"""Of a whole, the part that a user would notice."""
_MS_PER_S = 1e3
# Strategies that exchange gradients or parameters in every micro-batch, by the beginnings of their names.
_IN_MICRO_BATCHES = ("ZeRO-2", "ZeRO-3", "FSDP")
_SAME_WORK = ("same-workers", "scale-out")
_GROWING = ("compute_ms", "data_ms")


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What the loss is looked for in.

    Attributes:
        baseline: the side with fewer nodes; `candidate` that with more.
        alone: every node by itself, the baseline too where it is one; empty where that was not asked for.
        mode: as Contrast has it.
    """

    baseline: Side
    candidate: Side
    alone: tuple[Side, ...] = ()
    mode: str


def is_noticeable(part_ms: float, whole_ms: float) -> bool:
    """Whether anybody would notice: more than a twentieth."""
    return part_ms > NOTICEABLE * whole_ms


def step_like(side: Side, case: Case) -> Ranged:
    """The side's step in ms if its workers had as many samples in it as the candidate's."""
    grows, step = _growing_share(side), side.step_time_ms
    factor = (1 - grows) + work_ratio(side, case) * grows
    return msgspec.structs.replace(step, value=step.value * factor, low=step.low * factor, high=step.high * factor)


def work_ratio(side: Side, case: Case) -> float:
    """Samples of a worker and step on the candidate, over those on the side."""
    candidate = case.candidate
    if side.global_batch and candidate.global_batch:
        return candidate.global_batch / candidate.world_size / (side.global_batch / side.world_size)
    if case.mode in _SAME_WORK or side is candidate:
        return 1.0
    if case.mode == "fixed-global-batch":
        # What a worker does alone on each node is what one of the baseline does.
        return case.baseline.world_size / candidate.world_size
    return _samples_of_worker(candidate) / _samples_of_worker(side)


def _samples_of_worker(side: Side) -> float:
    return side.samples_per_s.value * side.step_time_ms.value / _MS_PER_S / side.world_size


def _growing_share(side: Side) -> float:
    """The part of a step that grows with its samples: all of it, unless it was split."""
    split = side.split
    if split is None or split.compute_ms is None:
        return 1.0
    growing_ms = split.compute_ms + (split.data_ms or 0.0)
    if _exchanges_in_micro_batches(side):
        growing_ms += (split.exposed_ms or 0.0) + (split.wait_ms or 0.0)
    return min(1.0, max(0.0, growing_ms / split.step_ms))


def _exchanges_in_micro_batches(side: Side) -> bool:
    strategy = side.settings.strategy if side.settings is not None else None
    return (strategy or "").startswith(_IN_MICRO_BATCHES)


def exposed_ms(side: Side) -> float | None:
    """Of its median step, by the share of those that were split; one worker alone has nothing to exchange."""
    split = side.split
    if split is None or split.exposed_ms is None:
        return 0.0 if side.world_size == 1 else None
    return split.exposed_ms / split.step_ms * side.step_time_ms.value


def network_ms_of(case: Case, reference: Side) -> float | None:
    """Exposed communication of the candidate beyond the reference's own; a network gives no time back."""
    mine, own = exposed_ms(case.candidate), exposed_ms(reference)
    if mine is None or own is None:
        return None
    grows = work_ratio(reference, case) if _exchanges_in_micro_batches(reference) else 1.0
    return max(0.0, mine - own * grows)


def part_ms(side: Side, name: str, case: Case) -> float | None:
    """A part of its median step, by the name of WorkerSplit's field, if it had as many samples as the candidate's."""
    told: float | None = getattr(side.split, name, None)
    if side.split is None or told is None:
        return None
    grows = work_ratio(side, case) if name in _GROWING else 1.0
    return told / side.split.step_ms * side.step_time_ms.value * grows
