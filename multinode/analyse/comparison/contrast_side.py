"""make_side: the runs of one side of a contrast -> its Side; and time and cost of the full run on each. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from multinode.analyse.comparison.contrast_figures import Side
from multinode.analyse.job.workload import Settings, Workload, global_batch
from multinode.analyse.stats.spread import Ranged, Spread, known_mean, ranged
from multinode.analyse.steps.bottleneck import Bottleneck
from multinode.analyse.steps.repeated_split import average_splits
from multinode.analyse.steps.summary import Summary
from multinode.analyse.telemetry.clues import find_disturbances
from multinode.analyse.telemetry.machine_use import GpuEnergy, energy_of
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
    last = runs[-1]
    side = Side(
        role=role,
        run_ids=tuple(run.summary.run_id for run in runs),
        node_names=last.node_names,
        nodes=last.nodes,
        workers_per_node=last.workers_per_node,
        world_size=last.nodes * last.workers_per_node,
        samples_per_s=_ranged([speed.samples_per_s for speed in speeds], speeds),
        step_time_ms=_ranged([speed.steps.median for speed in speeds], speeds),
        step_spread=max((speed.steps for speed in speeds), key=lambda steps: steps.cv),
        steady_steps=sum(run.summary.steady_steps for run in runs),
        bottleneck=last.summary.bottleneck or Bottleneck(kind="unknown", sentence="what holds it up is not known"),
        disturbances=find_disturbances([run.summary.nodes for run in runs], _cores(last)),
    )
    side = _with_split(_with_tokens(_with_facts(side, last), runs, speeds), runs, speeds)
    return _with_price(_with_energy(side, runs), last)


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


def _ranged(values: Sequence[float], speeds: Sequence[_Speed]) -> Ranged:
    return ranged(values, relative=speeds[0].relative)


def _with_facts(side: Side, last: SideRun) -> Side:
    """What does not change from repeat to repeat."""
    workload = last.workload or Workload(settings=Settings())
    return msgspec.structs.replace(
        side,
        settings=last.workload.settings if last.workload is not None else None,
        global_batch=global_batch(workload.settings, side.world_size),
        versions=workload.versions,
        bytes_per_step=last.summary.comm.bytes_per_step,
        link_gbit_per_s=last.link_gbit_per_s,
        whole=workload.whole,
        dataset_samples=last.summary.dataset_samples,
        missing=_unknown_facts(last, workload.settings),
    )


def _unknown_facts(last: SideRun, settings: Settings) -> dict[str, str]:
    """Why what was asked for, the link, or the size of the data set is not known."""
    missing: dict[str, str] = {}
    if last.workload is None:
        missing |= dict.fromkeys(("settings", "global_batch"), "the run did not keep what it was asked to train")
    elif global_batch(settings, 1) is None:
        missing["global_batch"] = "the batch of a worker, or how many it accumulates, is not known"
    if last.link_gbit_per_s is None:
        alone = "one node needs no link"
        missing["link_gbit_per_s"] = alone if last.nodes == 1 else "not every node's card says how fast it is"
    if last.summary.dataset_samples is None:
        missing["dataset_samples"] = last.summary.missing.get("dataset_samples", "no worker told it")
    return missing


def _cores(run: SideRun) -> Mapping[str, int]:
    return {name: count for name, count in zip(run.node_names, run.cores, strict=False) if count}


def _with_tokens(side: Side, runs: Sequence[SideRun], speeds: Sequence[_Speed]) -> Side:
    """Tokens a second, of all and of one worker, where every repeat has them."""
    found = {}
    missing = dict(side.missing)
    for name in ("tokens_per_s", "tgs"):
        told: list[float | None] = [getattr(run.summary, name) for run in runs]
        known = [value for value in told if value is not None and _LEAST <= value <= _MOST]
        if len(known) == len(told):
            found[name] = _ranged(known, speeds)
        else:
            missing[name] = _first_reason((run.summary.missing for run in runs), name, "no worker counted its tokens")
    return msgspec.structs.replace(side, missing=missing, **found)


def _with_split(side: Side, runs: Sequence[SideRun], speeds: Sequence[_Speed]) -> Side:
    """Where a step goes, and for whom the others wait."""
    found = average_splits([run.summary for run in runs])
    exposed = found.exposed_ms
    return msgspec.structs.replace(
        side,
        split=found.split,
        exposed_ms=_ranged(exposed, speeds) if exposed is not None else None,
        exposed_share=found.exposed_share,
        stragglers=found.stragglers,
        late_ms=found.late_ms,
        missing=side.missing | found.missing,
    )


def _with_energy(side: Side, runs: Sequence[SideRun]) -> Side:
    found = [_energy(run.summary, side.global_batch or 0) for run in runs]
    reason = next((one.reason for one in found if one.reason), "")
    return msgspec.structs.replace(
        side,
        power_w=known_mean([one.power_w for one in found]),
        energy_j_per_sample=known_mean([one.j_per_sample for one in found]),
        missing=side.missing | (dict.fromkeys(_unknown_energy(found), reason) if reason else {}),
    )


def _energy(summary: Summary, batch: int) -> GpuEnergy:
    return energy_of(summary.nodes, summary.steady_steps * batch, summary.samples_per_s)


def _unknown_energy(found: Sequence[GpuEnergy]) -> list[str]:
    names = {"power_w": [one.power_w for one in found], "energy_j_per_sample": [one.j_per_sample for one in found]}
    return [name for name, values in names.items() if None in values]


def _with_price(side: Side, last: SideRun) -> Side:
    """What its nodes cost together, and a million tokens on them."""
    known = [price for price in last.prices if price is not None and 0 <= price <= _MOST_PRICE]
    if len(known) < last.nodes or len(known) < len(last.prices):
        reason = "not every node has a price: price= in the hostfile"
        names = ("price_per_hour", "cost_per_million_tokens")
        return msgspec.structs.replace(side, missing=side.missing | dict.fromkeys(names, reason))
    price = math.fsum(known)
    tokens = side.tokens_per_s
    return msgspec.structs.replace(
        side,
        price_per_hour=price,
        cost_per_million_tokens=price / (tokens.value * _S_PER_HOUR) * _MILLION if tokens is not None else None,
        missing=side.missing | ({"cost_per_million_tokens": side.missing["tokens_per_s"]} if tokens is None else {}),
    )


def _first_reason(reasons: Iterable[Mapping[str, str]], name: str, otherwise: str) -> str:
    return next((told[name] for told in reasons if name in told), otherwise)


# More passes over its data than anybody has time for; sums of such figures stay far from what a float can hold.
_MOST_EPOCHS = 1e9
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
