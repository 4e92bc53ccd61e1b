"""Early verdict: from the first steps of a run on several nodes, whether one node would be faster. Pure.

Uses the same model as `advise`, with only the records of this run.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from multinode.predict.advice import NOTICEABLE, RankedOption, pays, rank_options
from multinode.predict.early_verdict_words import verdict_line
from multinode.predict.training_state import TrainingState, TuningOption
from multinode.predict.tuning_options import one_node
from multinode.profile.summary import Summary
from multinode.records.run import BestChange, EarlyVerdict, Projection, RunSteps, unknown_verdict
from multinode.traffic.traffic import Strategy

# Changes that a user can make right away: no machines, no other training, nothing that may not fit the memory.
_SETTINGS = frozenset(
    {"gradients", "accumulation", "overlap", "buckets", "strategy", "pair", "averaging", "outer", "script"}
)


def early_verdict(steps: RunSteps, today: TrainingState, summary: Summary) -> EarlyVerdict:
    """The speed of one node, and the best change.

    Args:
        steps: progress of the run.
        today: the run, calibrated only from itself.
        summary: of its records.
    """
    rate, step_ms = summary.samples_per_s, summary.step_time_ms
    if not rate or step_ms is None:
        return unknown_verdict(steps, "no measured step was recorded by all workers")
    low, high = summary.intervals.get("samples_per_s") or _by_time(rate, step_ms.median, summary)
    left_s = None
    if steps.total_steps is not None:
        left_s = max(0, steps.total_steps - steps.step) * today.scenario.samples / rate
    alone = one_node(today)
    found = alone.after.prediction()
    fits = _memory(alone)
    budget = today.gpu_memory
    verdict = EarlyVerdict(
        **msgspec.structs.asdict(steps),
        now=_projection((1.0, low / rate, high / rate), left_s),
        one_node=_projection((found.samples_per_s / rate, found.interval[0] / high, found.interval[1] / low), left_s),
        best=_best(rank_options(today), left_s),
        memory=fits,
        needed_gib=alone.expected_gib if fits == "too_small" else None,
        gpu_gib=budget.total_gib if budget is not None and fits == "too_small" else None,
        core_wait_ms=_core_wait_ms(summary, alone.after.scenario.layout.workers, found.step_time_ms),
    )
    return msgspec.structs.replace(verdict, sentence=verdict_line(verdict))


def _by_time(rate: float, median_ms: float, summary: Summary) -> tuple[float, float]:
    low_ms, high_ms = summary.intervals.get("step_time_ms", (median_ms, median_ms))
    return rate * median_ms / high_ms, rate * median_ms / low_ms


def _core_wait_ms(summary: Summary, workers: int, step_ms: float) -> float | None:
    known = [one.core_wait_ms or 0.0 for one in summary.split.workers if one.rank < workers]
    waited_ms = sum(known) / len(known) if known else 0.0
    return waited_ms if waited_ms > NOTICEABLE * step_ms else None


def _projection(speedup: tuple[float, float, float], left_s: float | None) -> Projection:
    value, low, high = speedup
    return Projection(speedup=value, speedup_interval=(low, high), **_left(speedup, left_s))


def _left(speedup: tuple[float, float, float], left_s: float | None) -> dict[str, Any]:
    value, low, high = speedup
    return {} if left_s is None else {"left_s": left_s / value, "left_interval_s": (left_s / high, left_s / low)}


def _memory(alone: TuningOption) -> Literal["fits", "too_small", "unknown"]:
    deepspeed = alone.before.deepspeed
    if alone.before.scenario.strategy is Strategy.DDP:
        return "fits"
    if deepspeed is not None and (deepspeed.offload_optimizer or deepspeed.offload_parameters):
        return "unknown"
    if alone.fits is None:
        return "unknown"
    return "fits" if alone.fits else "too_small"


def _best(ranked: tuple[RankedOption, ...], left_s: float | None) -> BestChange | None:
    for advice, option in ranked:
        if option.kind in _SETTINGS and pays(advice) and advice.interval[0] > 1:
            speedup = (advice.gain, *advice.interval)
            return BestChange(
                name=advice.name,
                options=option.change.options if option.change is not None else "",
                samples_ratio=option.after.scenario.samples / option.before.scenario.samples,
                speedup=advice.gain,
                speedup_interval=advice.interval,
                **_left(speedup, left_s),
            )
    return None
