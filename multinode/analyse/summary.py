"""summarise: the samples of one run -> its Summary. Pure; trims the warm-up, keeps nothing raw."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import msgspec

from multinode.analyse.steady import find_steady_state
from multinode.core.samples import LossSample, Sample, StepSample, TrainEndSample

__all__ = ["Spread", "Summary", "spread_of", "summarise"]


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution in three figures: median, 95th percentile, and cv (standard deviation over mean)."""

    median: float
    p95: float
    cv: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One run in figures; None comes with a reason in `missing`.

    Attributes:
        schema: `multinode.summary/1`.
        run_id: the run.
        steps: optimizer steps that were recorded.
        steady_steps: those that count.
        rule: which those are.
        step_time_ms: of each step the median over the workers (they end a step together), over the steady state.
        samples_per_s: nominal, of all workers together, over the steady state.
        all_steps_samples_per_s: likewise, warm-up included, as the Trainer counts.
        trainer_samples_per_s: the Trainer's own figure.
        first_loss: the first loss that was logged; `last_loss` the last.
        missing: reason by name of every figure that is None.
    """

    schema: str = "multinode.summary/1"
    run_id: str
    steps: int
    steady_steps: int
    rule: str
    step_time_ms: Spread | None = None
    samples_per_s: float | None = None
    all_steps_samples_per_s: float | None = None
    trainer_samples_per_s: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    missing: dict[str, str] = {}


def summarise(run_id: str, samples: Iterable[Sample]) -> Summary:
    """The summary of all nodes' samples, in any order."""
    kept = list(samples)
    steps = _steps_by_number([sample for sample in kept if isinstance(sample, StepSample)])
    timed = [workers for workers in steps if _times(workers)]
    times_us = [statistics.median(_times(workers)) for workers in timed]
    steady = find_steady_state(times_us)
    counted = times_us[steady.first :]
    losses = sorted((sample for sample in kept if isinstance(sample, LossSample)), key=lambda sample: sample.step)
    samples_per_s = _rate(timed[steady.first :])
    return Summary(
        run_id=run_id,
        steps=len(steps),
        steady_steps=steady.count,
        rule=steady.rule,
        step_time_ms=spread_of([time_us / 1000 for time_us in counted]) if counted else None,
        samples_per_s=samples_per_s,
        all_steps_samples_per_s=_rate(timed),
        trainer_samples_per_s=next(
            (s.train_samples_per_s for s in kept if isinstance(s, TrainEndSample) and s.train_samples_per_s), None
        ),
        first_loss=losses[0].loss if losses else None,
        last_loss=losses[-1].loss if losses else None,
        missing=_missing(steps, samples_per_s) | _missing_losses(losses),
    )


def spread_of(values: Sequence[float]) -> Spread:
    """Median, p95 (nearest rank) and cv of at least one value."""
    ordered = sorted(values)
    p95 = ordered[min(len(ordered) - 1, -(-95 * len(ordered) // 100) - 1)]
    mean = statistics.fmean(ordered)
    deviation = statistics.stdev(ordered) if len(ordered) > 1 else 0.0
    return Spread(median=statistics.median(ordered), p95=p95, cv=deviation / mean if mean else 0.0)


def _steps_by_number(steps: Sequence[StepSample]) -> list[list[StepSample]]:
    """The workers' records of each step, in the order of steps."""
    by_number: dict[int, list[StepSample]] = {}
    for sample in steps:
        by_number.setdefault(sample.step, []).append(sample)
    return [by_number[number] for number in sorted(by_number)]


def _times(workers: Sequence[StepSample]) -> list[float]:
    return [worker.step_time_us for worker in workers if worker.step_time_us is not None]


def _rate(steps: Sequence[Sequence[StepSample]]) -> float | None:
    """Each worker's samples over its own time, summed over the workers; None where one does not know its samples."""
    samples: dict[int, int] = {}
    time_us: dict[int, float] = {}
    for step in steps:
        for worker in step:
            if worker.samples is None:
                return None
            if worker.step_time_us is not None:
                samples[worker.rank] = samples.get(worker.rank, 0) + worker.samples
                time_us[worker.rank] = time_us.get(worker.rank, 0.0) + worker.step_time_us
    return sum(samples[rank] / time_us[rank] * 1e6 for rank in samples if time_us[rank] > 0) or None


def _missing_losses(losses: Sequence[LossSample]) -> dict[str, str]:
    if not losses:
        return dict.fromkeys(("first_loss", "last_loss"), "no loss was logged")
    ends = {"first_loss": losses[0], "last_loss": losses[-1]}
    return {name: f"it was no finite number at step {end.step}" for name, end in ends.items() if end.loss is None}


def _missing(steps: Sequence[Sequence[StepSample]], samples_per_s: float | None) -> dict[str, str]:
    if not steps:
        reason = "no worker recorded a step"
        return {"step_time_ms": reason, "samples_per_s": reason}
    if samples_per_s is None:
        return {"samples_per_s": "the training does not say how many samples a step has"}
    return {}
