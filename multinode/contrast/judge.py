"""compare: the sides of a contrast -> Contrast: how much faster many nodes are than few, and why. Pure.

Sides are made by `contrast_side`, causes found by `slowdown_attribution`; the words are `report`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from multinode.contrast.figures import Contrast, CurvePoint, NodeSpeed, Side
from multinode.contrast.slowdown_attribution import NOTICEABLE, Case, attribute_slowdown, sides_alone
from multinode.errors import UsageError
from multinode.job.workload import FullRun
from multinode.records.plausible import plausible_count
from multinode.stats.estimate import Estimate, UnknownError, inverse, ratio

_MOST_PRICE = 1e6
# More passes over its data than anybody has time for; sums of such figures stay far from what a float can hold.
_MOST_EPOCHS = 1e9
_S_PER_HOUR = 3600
_MS_PER_S = 1e3
_MILLION = 1e6


def hourly_costs(
    prices: Sequence[float | None], nodes: int, tokens_per_s: Estimate | None, missing: dict[str, str]
) -> dict[str, float]:
    """`price_per_hour` of the nodes together, and `cost_per_million_tokens`; what is not known goes to `missing`.

    Args:
        prices: of each node, an hour; None where it has none.
        nodes: how many there are.
        tokens_per_s: of the side; None has its reason in `missing`.
        missing: reasons by name.
    """
    known = [price for price in prices if price is not None and 0 <= price <= _MOST_PRICE]
    if len(known) < nodes or len(known) < len(prices):
        reason = "not every node has a price: price= in the hostfile"
        missing |= dict.fromkeys(("price_per_hour", "cost_per_million_tokens"), reason)
        return {}
    price = math.fsum(known)
    if tokens_per_s is None:
        missing["cost_per_million_tokens"] = missing["tokens_per_s"]
        return {"price_per_hour": price}
    return {"price_per_hour": price, "cost_per_million_tokens": price / (tokens_per_s.value * _S_PER_HOUR) * _MILLION}


def with_full_run(sides: Sequence[Side], candidate: Side) -> tuple[Side, ...]:
    """The sides with time and cost of the full run, at the rate of their steady state: start and end are left out.

    Args:
        sides: all of a contrast.
        candidate: the one whose optimizer steps the job's are.
    """
    try:
        samples = _samples((candidate, *sides))
    except UnknownError as unknown:
        missing = dict.fromkeys(("whole_s", "whole_cost"), str(unknown))
        return tuple(msgspec.structs.replace(side, missing=side.missing | missing) for side in sides)
    return tuple(_priced(side, samples) for side in sides)


def _samples(sides: Sequence[Side]) -> float:
    """How many samples the full run trains; its steps are the first side's, as its settings have them or as they went.

    Raises:
        UnknownError: that is not known.
    """
    first, full = sides[0], FullRun.first_of(side.whole for side in sides)
    if (steps := asked_steps(full)) is not None:
        return steps * (first.global_batch or first.samples_per_s.value * first.step_time_ms.value / _MS_PER_S)
    return asked_epochs(full) * dataset_size(side.dataset_samples for side in sides)


def asked_steps(full: FullRun) -> int | None:
    """Optimizer steps of the full run; None where it asks for epochs, or for what cannot be."""
    return plausible_count(full.steps) or None


def asked_epochs(full: FullRun) -> float:
    """Its passes over the data.

    Raises:
        UnknownError: it asks for none, or for what cannot be.
    """
    if full.epochs is None or not 0 < full.epochs <= _MOST_EPOCHS:
        raise UnknownError("the job does not say how many steps or epochs it is to run")
    return full.epochs


def dataset_size(told: Iterable[int | None]) -> int:
    """Samples of the data set, of the first run that tells them.

    Raises:
        UnknownError: none does.
    """
    known = next((count for samples in told if (count := plausible_count(samples))), None)
    if known is None:
        raise UnknownError("how many samples the data set has is not known")
    return known


def full_run_s(rate: Estimate, samples: float) -> Estimate:
    """How long so many samples take at a rate in samples/s."""
    return inverse(rate) * samples


def _priced(side: Side, samples: float) -> Side:
    whole_s, price = full_run_s(side.samples_per_s, samples), side.price_per_hour
    return msgspec.structs.replace(
        side,
        whole_s=whole_s,
        whole_cost=price * whole_s.value / _S_PER_HOUR if price is not None else None,
        missing=side.missing | ({"whole_cost": side.missing.get("price_per_hour", "")} if price is None else {}),
    )


_SCALING = {"same-workers": "same workers", "scale-out": "weak", "fixed-global-batch": "strong"}


def compare(sides: Sequence[Side], *, mode: str, why: str, job: str, rule: str) -> Contrast:
    """Contrast the candidate with the baseline; further sides make a curve, and tell slow nodes from slow networks.

    Args:
        sides: each with its role; one is the baseline and one the candidate.
        mode: as Contrast has it; likewise `why`, `job` and `rule`.
        why: of the mode.
        job: in a few words.
        rule: which steps are measured.

    Raises:
        UsageError: there is no baseline, or no candidate.
    """
    sides = with_full_run(sides, _of_role(sides, "candidate"))
    baseline, candidate = _of_role(sides, "baseline"), _of_role(sides, "candidate")
    alone = sides_alone(sides, baseline)
    speedup = ratio(candidate.samples_per_s, baseline.samples_per_s)
    return Contrast(
        mode=mode,
        why=why,
        job=job,
        baseline=baseline,
        candidate=candidate,
        others=tuple(side for side in sides if side is not baseline and side is not candidate),
        speedup=speedup,
        efficiency=speedup.value / (candidate.world_size / baseline.world_size),
        scaling=_SCALING.get(mode) or _scaling(baseline, candidate),
        curve=_curve(sides),
        each_node=_each_node(alone),
        loss=attribute_slowdown(Case(baseline=baseline, candidate=candidate, alone=alone, mode=mode)),
        rule=rule,
    )


def _of_role(sides: Sequence[Side], role: str) -> Side:
    found = next((side for side in sides if side.role == role), None)
    if found is None:
        raise UsageError(f"there is no {role} to compare", hint="a contrast has a baseline and a candidate")
    return found


def _scaling(baseline: Side, candidate: Side) -> str:
    """Of two stored runs: by their workers, else by what is the same in a step: the samples of all, or of each."""
    if baseline.world_size == candidate.world_size:
        return "same workers"
    return "strong" if baseline.global_batch == candidate.global_batch is not None else "weak"


def _curve(sides: Sequence[Side]) -> tuple[CurvePoint, ...]:
    if all(side.role != "point" for side in sides):
        return ()
    ordered = sorted((side for side in sides if side.role != "each-node"), key=lambda side: side.nodes)
    return tuple(_point(side, ordered[0]) for side in ordered)


def _point(side: Side, fewest: Side) -> CurvePoint:
    speedup = ratio(side.samples_per_s, fewest.samples_per_s)
    if side is fewest:
        # Over itself it is 1, however much its repeats scatter.
        speedup = msgspec.structs.replace(speedup, low=1.0, high=1.0)
    return CurvePoint(
        nodes=side.nodes,
        world_size=side.world_size,
        samples_per_s=side.samples_per_s,
        speedup=speedup,
        efficiency=speedup.value / (side.world_size / fewest.world_size),
    )


def _each_node(alone: Sequence[Side]) -> tuple[NodeSpeed, ...]:
    fastest = max((side.samples_per_s.value for side in alone), default=1.0)
    return tuple(
        NodeSpeed(
            node=side.node_names[0],
            samples_per_s=side.samples_per_s,
            step_time_ms=side.step_time_ms,
            relative=side.samples_per_s.value / fastest,
        )
        for side in alone
    )


Outcome = Literal["unsynchronised", "inconclusive", "equal", "faster", "slower"]
"""Of the candidate against the baseline; `unsynchronised` workers train a model each, and compare nothing."""


def judge(contrast: Contrast) -> Outcome:
    """Inconclusive where the interval reaches from slower to faster, and wider than anybody would call equal."""
    if unsynchronised_side(contrast) is not None:
        return "unsynchronised"
    low, value, high = contrast.speedup.low, contrast.speedup.value, contrast.speedup.high
    if low <= 1 <= high and (low < 1 - NOTICEABLE or high > 1 + NOTICEABLE):
        return "inconclusive"
    if abs(value - 1) <= NOTICEABLE:
        return "equal"
    return "faster" if value > 1 else "slower"


def unsynchronised_side(contrast: Contrast) -> Side | None:
    """A side whose workers exchange no gradients; None where there is none."""
    sides = (contrast.candidate, contrast.baseline)
    return next((one for one in sides if one.bottleneck.kind == "no_communication" and one.world_size > 1), None)
