"""Measured: the figures that sides of a contrast and cells of a sweep share; prices by the hostfile, and costs. Pure.

`hostfile_price` has the price of a run's nodes by its hostfile. Prices from a file are in `sweep/prices.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec

from multinode.cluster.cluster import Cluster
from multinode.figures.figure import MONEY, Figure, Row
from multinode.findings.finding import Finding
from multinode.model.workload import SETTINGS, FullRun, JobSettings
from multinode.profile.machine_use import NodeUse
from multinode.profile.throughput import STEP_TIME_CV, STEP_TIME_P95, TGS, TOKENS_PER_S, Throughput
from multinode.records.plan import LaunchPlan
from multinode.stats.estimate import Estimate, Spread, inverse, known_sum
from multinode.stats.unknown import UNMEASURED, Unknown, UnknownError, found, known, or_none, or_unknown
from multinode.units import UNKNOWN, format_count, format_placement


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A job on its nodes, measured once or several times."""

    run_ids: tuple[str, ...] = ()  # one per repeat
    node_names: tuple[str, ...] = ()  # as in the hostfile; empty if unknown
    nodes: int | Unknown = UNMEASURED  # `workers_per_node` on each, `world_size` in all
    workers_per_node: int | Unknown = UNMEASURED
    world_size: int | Unknown = UNMEASURED
    settings: JobSettings | Unknown = UNMEASURED  # of the training
    global_batch: int | Unknown = UNMEASURED  # samples per optimizer step of all workers (HF: total train batch size)
    dataset_samples: int | Unknown = UNMEASURED  # samples of the dataset, as in the training
    samples_per_s: Estimate | Unknown = UNMEASURED  # nominal, of all workers, over the measured steps
    tokens_per_s: Estimate | Unknown = UNMEASURED  # of all workers, including padding; `tgs` per worker
    tgs: Estimate | Unknown = UNMEASURED
    step_time_ms: Estimate | Unknown = UNMEASURED  # of an optimizer step: medians of the repeats
    step_spread: Spread | Unknown = UNMEASURED  # of the repeat with the largest variation of steps
    whole_s: Estimate | Unknown = UNMEASURED  # time of the user's full run at this rate; `whole_cost` its price
    whole_cost: float | Unknown = UNMEASURED
    energy_j_per_sample: float | Unknown = UNMEASURED  # of all GPUs
    price_per_hour: float | Unknown = UNMEASURED  # of all its nodes, or of their GPUs
    cost_per_million_tokens: float | Unknown = UNMEASURED  # by the hour, including padding
    disturbances: tuple[Finding, ...] = ()  # other load, heat and losses on its nodes


def measured_values(measured: Measured) -> dict[str, Any]:
    """The values of a row, by the names of its figures and of the settings."""
    values = {name: getattr(measured, name) for name in measured.__struct_fields__}
    settings, spread = or_none(measured.settings), or_none(measured.step_spread)
    values |= settings.by_name if settings is not None else dict.fromkeys(SETTINGS)
    return values | {
        STEP_TIME_P95.name: None if spread is None else spread.p95,
        STEP_TIME_CV.name: None if spread is None else spread.cv,
        **speed_values(measured),
    }


def _placement(row: Row) -> str:
    nodes, workers = or_none(row[NODES]), or_none(row[WORLD_SIZE])
    if nodes is None:
        return UNKNOWN if workers is None else format_count(workers, "worker")
    return format_placement(nodes, or_none(row[WORKERS_PER_NODE]), workers)


WORLD_SIZE = Figure[int](
    "world_size",
    form="number",
    about="number of workers on all nodes",
    phrase="workers",
    aliases=(
        *("devices", "gpus", "num_gpus", "n_gpus", "gpu_num", "gpu_number", "gpu_count", "number_of_gpus"),
        *("num_of_gpus", "no_of_gpus", "num_devices", "total_gpus", "workers", "num_processes"),
    ),
)
NODES = Figure[int](
    "nodes",
    "nodes",
    "x workers",
    form="number",
    about="number of nodes, and of workers on each node",
    phrase="nodes x workers",
    aliases=(
        *("num_nodes", "nnodes", "n_nodes", "node_num", "node_number", "node_count", "number_of_nodes"),
        *("num_of_nodes", "no_of_nodes", "machines", "num_machines"),
    ),
    cell=_placement,
)
WORKERS_PER_NODE = Figure[int](
    "workers_per_node",
    form="number",
    about="workers on each node",
    aliases=(
        *("gpus_per_node", "nproc_per_node", "gpu_num_per_node", "num_gpus_per_node", "gpu_per_node"),
        *("n_gpus_per_node", "gpus_per_machine"),
    ),
)
DATASET_SAMPLES = Figure[int](
    "dataset_samples",
    form="number",
    about="number of samples in the data set",
    aliases=("num_samples", "train_samples", "num_train_samples"),
)
ENERGY = Figure[float](
    "energy_j_per_sample",
    "energy",
    "J per sample",
    form="figure",
    about="energy of all GPUs per sample",
    line="energy per sample (J)",
)
PRICE_PER_HOUR = Figure[float](
    "price_per_hour",
    "price",
    f"{MONEY} an hour",
    form="money",
    about="price per hour of all nodes, or of their GPUs",
    line="price per hour",
)
WHOLE_TIME = Figure[Estimate](
    "whole_s",
    "full run",
    form="duration",
    about="duration of the job's full run at this speed",
    line="full run (estimated)",
    aliases=("runtime", "runtime_s", "train_runtime", "duration", "duration_s"),
    has_range=True,
)
WHOLE_COST = Figure[float](
    "whole_cost",
    "job costs",
    MONEY,
    form="money",
    about="cost of the job's full run",
    line="full run cost (estimated)",
)
COST_PER_MILLION_TOKENS = Figure[float](
    "cost_per_million_tokens",
    "1M tokens cost",
    MONEY,
    form="money",
    about="cost of a million tokens (including padding) at the hourly price",
    line="cost per million tokens",
)
EXPOSED = Figure[Estimate](
    "exposed_ms",
    "exposed",
    "ms",
    form="ms",
    about="exposed communication per step, excluding waits for stragglers",
    phrase="exposed communication",
)
EXPOSED_SHARE = Figure[float](
    "exposed_share",
    "exposed communication",
    form="share",
    about="exposed communication divided by step time",
    line="exposed, share of the step",
)
SPEEDUP = Figure[Estimate](
    "speedup", "speed-up", form="figure", about="samples/s relative to the baseline", has_range=True
)
EFFICIENCY = Figure[float](
    "efficiency", "efficiency", form="percent", about="speed-up divided by the ratio of workers; 100% is ideal scaling"
)


SPEEDS: tuple[Figure[Any], ...] = (TOKENS_PER_S, TGS)
"""The speed of a training beside samples/s, in the tables of runs, contrasts and sweeps."""


def speed_values(of: Measured | Throughput) -> dict[str, Any]:
    """The values of `SPEEDS`, by their names; a run's summary is a `Throughput`."""
    return {TOKENS_PER_S.name: of.tokens_per_s, TGS.name: of.tgs}


M = TypeVar("M", bound=Measured)
_S_PER_HOUR = 3600.0
# Each cost as figures and a factor, over a figure or a number.
_COSTS: dict[str, tuple[tuple[str, ...], float, str | float]] = {
    "whole_cost": (("price_per_hour", "whole_s"), 1.0, _S_PER_HOUR),
    "samples_per_money": (("samples_per_s",), _S_PER_HOUR, "price_per_hour"),
    "samples_per_s_per_purchase": (("samples_per_s",), 1.0, "price_purchase"),
    "cost_per_million_tokens": (("price_per_hour",), 1e6 / _S_PER_HOUR, "tokens_per_s"),
}


def hostfile_price(plan: LaunchPlan, cluster: Cluster, kind: Literal["hourly", "purchase"]) -> float | None:
    """Price of a run's nodes together, from its hostfile; None if it has none for every node."""
    nodes = {node.name: node for node in cluster.nodes}
    prices = [getattr(nodes.get(place.node), kind, lambda _: None)(len(place.ranks)) for place in plan.places]
    given = [price for price in prices if price is not None]
    return math.fsum(given) if given and len(given) == len(prices) else None


def with_costs(measured: M) -> M:
    """The figures with all costs that follow from its prices, as far as they have a field."""
    costs = {name: found(partial(_cost, measured, name)) for name in _COSTS if hasattr(measured, name)}
    return msgspec.structs.replace(measured, **costs)


def _cost(measured: Measured, name: str) -> float:
    def value(part: str) -> float:
        figure: Estimate | float = known(getattr(measured, part))
        return figure.value if isinstance(figure, Estimate) else figure

    parts, factor, under = _COSTS[name]
    cost = math.prod(map(value, parts), start=factor)
    divisor = value(under) if isinstance(under, str) else under
    cost = cost / divisor if divisor else math.inf
    if not math.isfinite(cost):
        raise UnknownError("it costs nothing")
    return cost


def asked_epochs(full: FullRun) -> float:
    """Epochs of the full run.

    Raises:
        UnknownError: it sets none.
    """
    if full.epochs is None:
        raise UnknownError("the job does not set its number of steps or epochs")
    return full.epochs


def dataset_size(sizes: Iterable[int | None]) -> int:
    """Samples of the dataset, from the first run that has them.

    Raises:
        UnknownError: none has.
    """
    size = next((samples for samples in sizes if samples), None)
    if size is None:
        raise UnknownError("the number of samples in the dataset is unknown")
    return size


def full_run_s(rate: Estimate, samples: float) -> Estimate:
    """Time of this many samples at a rate in samples/s."""
    return inverse(rate) * samples


class GpuEnergy(msgspec.Struct, frozen=True, kw_only=True):
    """Of all GPUs of a run."""

    power_w: float | Unknown  # during the measured steps
    j_per_sample: float | Unknown  # energy per sample, in J


def energy_of(nodes: Sequence[NodeUse], samples: int, samples_per_s: float | None) -> GpuEnergy:
    """Power from NVML's median per GPU; energy from its counter over the samples, otherwise power over samples/s.

    Only if every GPU reports it: a partial sum would look like the total.

    Args:
        nodes: of a run.
        samples: of the window; 0 if unknown.
        samples_per_s: of all workers.
    """
    bare = next((node for node in nodes if len(node.gpus) < max(1, len(node.ranks))), None)
    if bare is not None or not nodes:
        where = f" of {bare.node}" if bare is not None else ""
        count = "not every" if bare and bare.gpus else "no"
        unsampled = Unknown(f"{count} GPU{where} was sampled while the measured steps ran")
        return GpuEnergy(power_w=unsampled, j_per_sample=unsampled)
    gpus = [gpu for node in nodes for gpu in node.gpus]
    power_w = known_sum(or_none(gpu.power_w) for gpu in gpus)
    energy_j = known_sum(or_none(gpu.energy_j) for gpu in gpus)
    j_per_sample = energy_j / samples if energy_j is not None and samples > 0 else None
    if j_per_sample is None and power_w is not None and samples_per_s:
        j_per_sample = power_w / samples_per_s
    reason = "not every GPU reports its power"
    return GpuEnergy(power_w=or_unknown(power_w, reason), j_per_sample=or_unknown(j_per_sample, reason))
