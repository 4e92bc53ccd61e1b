"""Trial: the runs of one candidate, and the learning rate at which its loss is lowest. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from multinode.experiment.losses import Losses, LossPoint
from multinode.experiment.shortlist import Candidate

LossOf = Literal["held-out", "training", ""]


class TrialRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that was measured; those of one seed have the same data in the same order."""

    run_id: str
    seed: int
    learning_rate: float | None = None
    samples_per_s: float
    losses: Losses


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a candidate.

    Attributes:
        state: as CellRecord has it: `waiting`, `measured`, `out_of_memory`, `failed` and so on.
        reason: why it has no figures, or why a repeat has none.
    """

    candidate: Candidate
    state: str
    reason: str = ""
    runs: tuple[TrialRun, ...] = ()


def loss_of_all(runs: Sequence[TrialRun]) -> LossOf:
    """What all runs have; the losses of different data are not compared."""
    if runs and all(run.losses.held_out for run in runs):
        return "held-out"
    return "training" if runs and all(run.losses.training for run in runs) else ""


def points_of(run: TrialRun, loss_of: LossOf) -> tuple[LossPoint, ...]:
    """Its losses of this kind."""
    return run.losses.held_out if loss_of == "held-out" else run.losses.training if loss_of else ()


def end_loss(run: TrialRun, loss_of: LossOf) -> float | None:
    """The last of them; None where it diverged, or has none."""
    points = points_of(run, loss_of)
    return points[-1].loss if points else None


def first_seed_losses(runs: Sequence[TrialRun]) -> dict[float, float | None]:
    """Loss at the end by learning rate, of the runs of the first seed, ascending."""
    loss_of, first = loss_of_all(runs), min((run.seed for run in runs), default=0)
    rated = [(run.learning_rate, run) for run in runs if run.seed == first]
    return {rate: end_loss(run, loss_of) for rate, run in sorted(rated, key=_rate) if rate is not None}


def at_best_rate(trial: Trial) -> Trial:
    """With the runs of the learning rate alone whose loss of the first seed is lowest."""
    losses = first_seed_losses(trial.runs)
    if not losses:
        return trial
    best = min(losses, key=lambda rate: (_or_infinity(losses[rate]), rate))
    return msgspec.structs.replace(trial, runs=tuple(run for run in trial.runs if run.learning_rate == best))


def _rate(rated: tuple[float | None, TrialRun]) -> float:
    return rated[0] or 0.0


def _or_infinity(loss: float | None) -> float:
    return math.inf if loss is None else loss
