"""Full run: what each side would take for all that the user's job asks for, in time and money. Pure.

Both sides train the same samples, or the one with the smaller batch would seem cheap for doing less. A job that asks
for optimizer steps means those of the candidate, where it is to run; one that asks for epochs means its data so often.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from multinode.analyse.comparison.contrast_figures import Side
from multinode.analyse.stats.spread import Ranged
from multinode.core.text.plausible import plausible_count

__all__ = ["full_run_samples", "with_full_run"]

# More passes over its data than anybody has time for; sums of such figures stay far from what a float can hold.
_MOST_EPOCHS = 1e9
_S_PER_HOUR = 3600
_MS_PER_S = 1e3


def with_full_run(sides: Sequence[Side], candidate: Side) -> tuple[Side, ...]:
    """The sides with time and cost of the whole job, at the rate of their steady state: start and end are left out.

    Args:
        sides: all of a contrast.
        candidate: the one whose optimizer steps the job's are.
    """
    samples = full_run_samples(sides, candidate)
    return tuple(_priced(side, samples) for side in sides)


def full_run_samples(sides: Sequence[Side], candidate: Side) -> float | str:
    """How many samples the whole job trains; or why that is not known."""
    told = (candidate, *sides)
    steps = next((count for side in told if (count := plausible_count(side.whole.steps))), None)
    if steps is not None:
        return steps * _samples_of_step(candidate)
    epochs = next((side.whole.epochs for side in told if side.whole.epochs is not None), None)
    if epochs is None or not 0 < epochs <= _MOST_EPOCHS:
        return "the job does not say how many steps or epochs it is to run"
    samples = next((count for side in told if (count := plausible_count(side.dataset_samples))), None)
    return "how many samples the data set has is not known" if samples is None else epochs * samples


def _samples_of_step(side: Side) -> float:
    """As the settings have it, else as the steps went."""
    return side.global_batch or side.samples_per_s.value * side.step_time_ms.value / _MS_PER_S


def _priced(side: Side, samples: float | str) -> Side:
    if isinstance(samples, str):
        return msgspec.structs.replace(side, missing=side.missing | dict.fromkeys(("whole_s", "whole_cost"), samples))
    rate = side.samples_per_s
    whole_s = Ranged(value=samples / rate.value, low=samples / rate.high, high=samples / rate.low, repeats=rate.repeats)
    price = side.price_per_hour
    return msgspec.structs.replace(
        side,
        whole_s=whole_s,
        whole_cost=price * whole_s.value / _S_PER_HOUR if price is not None else None,
        missing=side.missing | ({"whole_cost": side.missing.get("price_per_hour", "")} if price is None else {}),
    )
