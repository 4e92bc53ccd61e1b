"""Trials as `judge` takes them: a rate and a curve of losses for each seed."""

from __future__ import annotations

from typing import Any

from multinode.tune.trial import Candidate, CandidateTrial, Losses, LossPoint, TrialRun

__all__ = ["SAMPLES", "curve", "trial"]

SAMPLES = 800


def curve(*losses: float | None, samples: int = SAMPLES) -> tuple[LossPoint, ...]:
    """These losses at equal distances, the last one after all samples."""
    return tuple(LossPoint(samples=samples * number / len(losses), loss=loss) for number, loss in enumerate(losses, 1))


def trial(label: str, *runs: tuple[float, tuple[LossPoint, ...]], **others: Any) -> CandidateTrial:
    """Runs of seeds 42, 43, ...: samples/s and held-out losses each."""
    measured = tuple(
        TrialRun(run_id=f"t-{label}-{seed}", seed=seed, samples_per_s=rate, losses=Losses(held_out=points))
        for seed, (rate, points) in enumerate(runs, 42)
    )
    usual: dict[str, Any] = {"state": "measured" if runs else "failed", "runs": measured}
    candidate = others.pop("candidate", Candidate(label=label, name=label, nodes=2, workers_per_node=1))
    return CandidateTrial(candidate=candidate, **(usual | others))
