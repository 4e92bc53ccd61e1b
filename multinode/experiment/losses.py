"""Losses of one run by the samples that it has trained on: of evaluations, and as the training logged them. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from multinode.profile.observed import Observed
from multinode.records.samples import EvaluationSample, LossSample

PARTS = 8
"""A run is evaluated so often; the training loss is a mean over as many parts of it."""


class LossPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A loss after so many samples; None where it was NaN or infinity."""

    samples: float
    loss: float | None


class Losses(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run, by samples, ascending.

    Attributes:
        held_out: of evaluations, which are on averaged parameters; empty where nothing was evaluated.
        training: as it was logged, a mean over each part of the run; empty where nothing was logged.
    """

    held_out: tuple[LossPoint, ...] = ()
    training: tuple[LossPoint, ...] = ()


def read_losses(observed: Observed, global_batch: int) -> Losses:
    """What a run recorded of its loss, by the worker of the lowest rank that tells any."""
    held_out = _by_step(observed.of(EvaluationSample))
    return Losses(
        held_out=tuple(LossPoint(samples=step * global_batch, loss=loss) for step, loss in held_out),
        training=_smoothed(_by_step(observed.of(LossSample)), global_batch),
    )


def samples_to(points: Sequence[LossPoint], target: float) -> float | None:
    """Samples after which the loss is first this low, on a straight line between two points; None where it never is."""
    before: LossPoint | None = None
    for point in points:
        if point.loss is not None and point.loss <= target:
            if before is None or before.loss is None:
                return point.samples
            share = (before.loss - target) / (before.loss - point.loss)
            return before.samples + share * (point.samples - before.samples)
        before = point
    return None


def _by_step(samples: Sequence[EvaluationSample] | Sequence[LossSample]) -> list[tuple[int, float | None]]:
    """Step and loss; of several at one step the first."""
    rank = min((sample.rank for sample in samples), default=0)
    losses: dict[int, float | None] = {}
    for sample in samples:
        if sample.rank == rank:
            losses.setdefault(sample.step, sample.loss)
    return sorted(losses.items())


def _smoothed(losses: Sequence[tuple[int, float | None]], global_batch: int) -> tuple[LossPoint, ...]:
    """The mean of each part of the steps; one that has none is left out."""
    if not losses:
        return ()
    last = losses[-1][0]
    points = []
    for part in range(PARTS):
        first, end = last * part / PARTS, last * (part + 1) / PARTS
        logged = [loss for step, loss in losses if first < step <= end]
        if logged:
            known = [loss for loss in logged if loss is not None]
            mean = statistics.fmean(known) if len(known) == len(logged) else None
            points.append(LossPoint(samples=end * global_batch, loss=mean))
    return tuple(points)
