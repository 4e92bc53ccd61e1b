"""make_side: the runs of one side of a contrast -> its Side; and time and cost of the full run on each. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from multinode.analyse.comparison.contrast_figures import Side
from multinode.analyse.job.workload import Settings, Workload, global_batch
from multinode.analyse.stats.spread import Ranged, Spread, known_mean, ranged
from multinode.analyse.steps.bottleneck import Bottleneck
from multinode.analyse.steps.repeated_split import average_splits
from multinode.analyse.steps.summary import Summary
from multinode.analyse.telemetry.clues import find_disturbances
from multinode.analyse.telemetry.machine_use import energy_of
from multinode.core.text.plausible import plausible_count
from multinode.errors import UsageError

__all__ = ["SideRun", "full_run_samples", "make_side", "with_full_run"]

# What can be true at all; far enough from what a float can hold that no ratio and no product leaves it.
_LEAST, _MOST = 1e-6, 1e12
_MOST_PRICE = 1e6
# A mean lies within twice its standard error of the true one 19 times in 20.
_STANDARD_ERRORS = 2
# Figures scattered more than this tell no more than that they are worthless.
_WIDEST = 10.0
_S_PER_HOUR = 3600
_MILLION = 1e6


class SideRun(msgspec.Struct, frozen=True, kw_only=True):
    """One measured run.

    Attributes:
        node_names: in node-rank order.
        workload: what it trained; None where the run did not keep it.
        prices: of each node, an hour; None where it has none.
        cores: processors of each node; None is unknown.
        link_gbit_per_s: of the slowest of the nodes' cards; None on one node, or unknown.
    """

    summary: Summary
    node_names: tuple[str, ...]
    workers_per_node: int
    workload: Workload | None = None
    prices: tuple[float | None, ...] = ()
    cores: tuple[int | None, ...] = ()
    link_gbit_per_s: float | None = None

    @property
    def nodes(self) -> int:
        """How many nodes."""
        return len(self.node_names)


def make_side(role: str, runs: Sequence[SideRun]) -> Side:
    """A side from its repeats: medians with their spread; of one repeat, with what its own steps' scatter gives.

    Args:
        role: as Side has it.
        runs: at least one, of the same job on the same nodes, in the order in which they were measured.

    Raises:
        UsageError: a run has no speed to compare.
    """
    speeds = [_speed_of(run.summary) for run in runs]
    last, summaries = runs[-1], [run.summary for run in runs]
    workload, world_size = last.workload or Workload(settings=Settings()), last.nodes * last.workers_per_node
    batch, missing = global_batch(workload.settings, world_size), _unknown_facts(last)

    def of_repeats(values: Sequence[float]) -> Ranged:
        return ranged(values, relative=speeds[0].relative)

    tokens: dict[str, Ranged | None] = {}
    for name in ("tokens_per_s", "tgs"):
        told: list[float | None] = [getattr(summary, name) for summary in summaries]
        known = [value for value in told if value is not None and _LEAST <= value <= _MOST]
        tokens[name] = of_repeats(known) if len(known) == len(told) else None
        if tokens[name] is None:
            reasons = (summary.missing[name] for summary in summaries if name in summary.missing)
            missing[name] = next(reasons, "no worker counted its tokens")
    split = average_splits(summaries)
    energy = [energy_of(one.nodes, one.steady_steps * (batch or 0), one.samples_per_s) for one in summaries]
    power = {
        "power_w": known_mean([one.power_w for one in energy]),
        "energy_j_per_sample": known_mean([one.j_per_sample for one in energy]),
    }
    reason = next((one.reason for one in energy if one.reason), "")
    missing |= split.missing | {name: reason for name, value in power.items() if value is None and reason}
    cores = {name: count for name, count in zip(last.node_names, last.cores, strict=False) if count}
    figures: dict[str, Any] = {**tokens, **power, **_prices(last, tokens["tokens_per_s"], missing)}
    return Side(
        role=role,
        run_ids=tuple(summary.run_id for summary in summaries),
        node_names=last.node_names,
        nodes=last.nodes,
        workers_per_node=last.workers_per_node,
        world_size=world_size,
        settings=last.workload.settings if last.workload is not None else None,
        global_batch=batch,
        versions=workload.versions,
        samples_per_s=of_repeats([speed.samples_per_s for speed in speeds]),
        step_time_ms=of_repeats([speed.steps.median for speed in speeds]),
        step_spread=max((speed.steps for speed in speeds), key=lambda steps: steps.cv),
        steady_steps=sum(summary.steady_steps for summary in summaries),
        split=split.split,
        exposed_ms=of_repeats(split.exposed_ms) if split.exposed_ms is not None else None,
        exposed_share=split.exposed_share,
        bytes_per_step=last.summary.comm.bytes_per_step,
        bottleneck=last.summary.bottleneck or Bottleneck(kind="unknown", sentence="what holds it up is not known"),
        link_gbit_per_s=last.link_gbit_per_s,
        stragglers=split.stragglers,
        late_ms=split.late_ms,
        whole=workload.whole,
        dataset_samples=last.summary.dataset_samples,
        disturbances=find_disturbances([summary.nodes for summary in summaries], cores),
        **figures,
        missing=missing,
    )


class _Speed(msgspec.Struct, frozen=True, kw_only=True):
    """What every repeat has: rate, steps, and how far off its own scatter leaves their mean (a part of it)."""

    samples_per_s: float
    steps: Spread
    relative: float


def _speed_of(summary: Summary) -> _Speed:
    steps, rate = summary.step_time_ms, summary.samples_per_s
    if steps is None or rate is None:
        reason = summary.missing.get("samples_per_s", "it recorded no steady step")
        raise UsageError(
            f"run {summary.run_id} has no samples/s to compare: {reason}",
            hint="contrast a LLaMA-Factory job, or run more steps with --steps",
        )
    if not _LEAST <= rate <= _MOST or not _LEAST <= steps.median <= _MOST:
        raise UsageError(
            f"run {summary.run_id}: {rate:g} samples/s in steps of {steps.median:g} ms cannot be true",
            hint="measure it again: what its nodes recorded lies in its directory",
        )
    cv = steps.cv if 0 <= steps.cv < math.inf else 0.0
    relative = min(_WIDEST, _STANDARD_ERRORS * cv / math.sqrt(max(1, summary.steady_steps)))
    return _Speed(samples_per_s=rate, steps=msgspec.structs.replace(steps, cv=cv), relative=relative)


def _unknown_facts(last: SideRun) -> dict[str, str]:
    """Why what was asked for, the link, or the size of the data set is not known."""
    missing: dict[str, str] = {}
    if last.workload is None:
        missing |= dict.fromkeys(("settings", "global_batch"), "the run did not keep what it was asked to train")
    elif global_batch(last.workload.settings, 1) is None:
        missing["global_batch"] = "the batch of a worker, or how many it accumulates, is not known"
    if last.link_gbit_per_s is None:
        alone = "one node needs no link"
        missing["link_gbit_per_s"] = alone if last.nodes == 1 else "not every node's card says how fast it is"
    if last.summary.dataset_samples is None:
        missing["dataset_samples"] = last.summary.missing.get("dataset_samples", "no worker told it")
    return missing


def _prices(last: SideRun, tokens: Ranged | None, missing: dict[str, str]) -> dict[str, float]:
    """What its nodes cost together, and a million tokens on them; what is not known goes to `missing`."""
    known = [price for price in last.prices if price is not None and 0 <= price <= _MOST_PRICE]
    if len(known) < last.nodes or len(known) < len(last.prices):
        reason = "not every node has a price: price= in the hostfile"
        missing |= dict.fromkeys(("price_per_hour", "cost_per_million_tokens"), reason)
        return {}
    price = math.fsum(known)
    if tokens is None:
        missing["cost_per_million_tokens"] = missing["tokens_per_s"]
        return {"price_per_hour": price}
    return {"price_per_hour": price, "cost_per_million_tokens": price / (tokens.value * _S_PER_HOUR) * _MILLION}


# More passes over its data than anybody has time for; sums of such figures stay far from what a float can hold.
_MOST_EPOCHS = 1e9
_MS_PER_S = 1e3


def with_full_run(sides: Sequence[Side], candidate: Side) -> tuple[Side, ...]:
    """The sides with time and cost of the whole job, at the rate of their steady state: start and end are left out.

    Args:
        sides: all of a contrast.
        candidate: the one whose optimizer steps the job's are.
    """
    try:
        samples = full_run_samples(sides, candidate)
    except LookupError as unknown:
        missing = dict.fromkeys(("whole_s", "whole_cost"), str(unknown))
        return tuple(msgspec.structs.replace(side, missing=side.missing | missing) for side in sides)
    return tuple(_priced(side, samples) for side in sides)


def full_run_samples(sides: Sequence[Side], candidate: Side) -> float:
    """How many samples the whole job trains.

    Raises:
        LookupError: that is not known, and why.
    """
    told = (candidate, *sides)
    steps = next((count for side in told if (count := plausible_count(side.whole.steps))), None)
    if steps is not None:
        return steps * _samples_of_step(candidate)
    epochs = next((side.whole.epochs for side in told if side.whole.epochs is not None), None)
    if epochs is None or not 0 < epochs <= _MOST_EPOCHS:
        raise LookupError("the job does not say how many steps or epochs it is to run")
    samples = next((count for side in told if (count := plausible_count(side.dataset_samples))), None)
    if samples is None:
        raise LookupError("how many samples the data set has is not known")
    return epochs * samples


def _samples_of_step(side: Side) -> float:
    """As the settings have it, else as the steps went."""
    return side.global_batch or side.samples_per_s.value * side.step_time_ms.value / _MS_PER_S


def _priced(side: Side, samples: float) -> Side:
    rate = side.samples_per_s
    whole_s = Ranged(value=samples / rate.value, low=samples / rate.high, high=samples / rate.low, repeats=rate.repeats)
    price = side.price_per_hour
    return msgspec.structs.replace(
        side,
        whole_s=whole_s,
        whole_cost=price * whole_s.value / _S_PER_HOUR if price is not None else None,
        missing=side.missing | ({"whole_cost": side.missing.get("price_per_hour", "")} if price is None else {}),
    )
