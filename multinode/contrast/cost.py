"""What a side of a contrast costs: its price per hour, and time and cost of the full run on it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from multinode.contrast.figures import Side
from multinode.job.workload import FullRun
from multinode.records.plausible import plausible_count
from multinode.stats.estimate import Estimate, inverse
from multinode.stats.unknown import UnknownError

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
