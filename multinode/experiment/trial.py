"""Trial: the runs of one candidate, and its best learning rate. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal

import msgspec

from multinode.experiment.shortlist import Candidate
from multinode.profile.observed import Observed
from multinode.records.samples import EvaluationSample, LossSample

PARTS = 8
"""Number of evaluations per run, and of parts over which the training loss is averaged."""


class LossPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A loss after a number of samples; None if it was NaN or infinite."""

    samples: float
    loss: float | None


class Losses(msgspec.Struct, frozen=True, kw_only=True):
    """The losses of one run by samples, ascending."""

    held_out: tuple[LossPoint, ...] = ()  # from evaluations, on averaged parameters; empty if nothing was evaluated
    training: tuple[LossPoint, ...] = ()  # as logged, averaged over each part of the run; empty if nothing was logged


def read_losses(observed: Observed, global_batch: int) -> Losses:
    """The losses that a run recorded, of the lowest rank that has any."""
    held_out = _by_step(observed.of(EvaluationSample))
    return Losses(
        held_out=tuple(LossPoint(samples=step * global_batch, loss=loss) for step, loss in held_out),
        training=_smoothed(_by_step(observed.of(LossSample)), global_batch),
    )


def samples_to(points: Sequence[LossPoint], target: float) -> float | None:
    """Samples at which the loss first reaches this value, interpolated linearly; None if it never does."""
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
    rank = min((sample.rank for sample in samples), default=0)
    losses: dict[int, float | None] = {}
    for sample in samples:
        if sample.rank == rank:
            losses.setdefault(sample.step, sample.loss)
    return sorted(losses.items())


def _smoothed(losses: Sequence[tuple[int, float | None]], global_batch: int) -> tuple[LossPoint, ...]:
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


LossOf = Literal["held-out", "training", ""]


class TrialRun(msgspec.Struct, frozen=True, kw_only=True):
    """A measured run; runs of one seed have the same data in the same order."""

    run_id: str
    seed: int
    learning_rate: float | None = None
    samples_per_s: float
    losses: Losses


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a candidate."""

    candidate: Candidate
    state: str  # as in CellRecord: `waiting`, `measured`, `out_of_memory`, `failed` and so on
    reason: str = ""  # why it, or a repeat of it, has no figures
    runs: tuple[TrialRun, ...] = ()


def loss_of_all(runs: Sequence[TrialRun]) -> LossOf:
    """The kind of loss that all runs have; losses on different data are not compared."""
    if runs and all(run.losses.held_out for run in runs):
        return "held-out"
    return "training" if runs and all(run.losses.training for run in runs) else ""


def points_of(run: TrialRun, loss_of: LossOf) -> tuple[LossPoint, ...]:
    """The losses of this kind."""
    return run.losses.held_out if loss_of == "held-out" else run.losses.training if loss_of else ()


def end_loss(run: TrialRun, loss_of: LossOf) -> float | None:
    """The final loss; None if it diverged or has none."""
    points = points_of(run, loss_of)
    return points[-1].loss if points else None


def first_seed_losses(runs: Sequence[TrialRun]) -> dict[float, float | None]:
    """Final loss by learning rate, of the runs of the first seed, ascending."""
    loss_of, first = loss_of_all(runs), min((run.seed for run in runs), default=0)
    rated = [(run.learning_rate, run) for run in runs if run.seed == first]
    return {rate: end_loss(run, loss_of) for rate, run in sorted(rated, key=_rate) if rate is not None}


def at_best_rate(trial: Trial) -> Trial:
    """The trial with only the runs at the learning rate that has the lowest loss for the first seed."""
    losses = first_seed_losses(trial.runs)
    if not losses:
        return trial
    best = min(losses, key=lambda rate: (_or_infinity(losses[rate]), rate))
    return msgspec.structs.replace(trial, runs=tuple(run for run in trial.runs if run.learning_rate == best))


def _rate(rated: tuple[float | None, TrialRun]) -> float:
    return rated[0] or 0.0


def _or_infinity(loss: float | None) -> float:
    return math.inf if loss is None else loss
