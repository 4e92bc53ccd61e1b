"""The collective calls of a step by its strategy alone: of other strategies, and without a job's files (engine_calls).

Also their bytes through a worker and a NIC, and time over size.

Pure arithmetic on given sizes. Whether the traffic overlaps with the computation is not decided here.
"""

from __future__ import annotations

import bisect
import enum
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Literal, Self

import msgspec

from multinode.records.samples import plausible_us
from multinode.traffic.algorithms import Layout, bus_factor, worker_factor

_BYTES_PER_GB = 1e9
_GATHERING_STAGE = 3


class Strategy(enum.StrEnum):
    """How the parameters, gradients and optimizer states are sharded over the workers.

    Attributes:
        option: as options and files spell it.
        engine: what shards, `DeepSpeed` or `FSDP`; `DDP` shards nothing.
        stage: of ZeRO; DDP is stage 0; None for FSDP.
    """

    option: str
    engine: Literal["DDP", "DeepSpeed", "FSDP"]
    stage: int | None

    DDP = "DDP", "ddp", "DDP", 0
    ZERO1 = "ZeRO-1", "zero1", "DeepSpeed", 1
    ZERO2 = "ZeRO-2", "zero2", "DeepSpeed", 2
    ZERO3 = "ZeRO-3", "zero3", "DeepSpeed", 3
    # ZeRO-3 that keeps a second copy of the parameters inside each node (hpZ of ZeRO++, Wang et al. 2023)
    ZERO3_HPZ = "ZeRO-3 hpZ", "zero3_hpz", "DeepSpeed", 3
    FSDP = "FSDP", "fsdp", "FSDP", None
    SHARD_GRAD_OP = "FSDP SHARD_GRAD_OP", "shard_grad_op", "FSDP", None
    HYBRID_SHARD = "FSDP hybrid shard", "hybrid_shard", "FSDP", None

    def __new__(cls, value: str, option: str, engine: Literal["DDP", "DeepSpeed", "FSDP"], stage: int | None) -> Self:
        """A member with its attributes."""
        member = str.__new__(cls, value)
        member._value_, member.option, member.engine, member.stage = value, option, engine, stage
        return member

    @classmethod
    def of_option(cls, option: str) -> Strategy:
        """The one that is spelled so.

        Raises:
            KeyError: none is.
        """
        return {strategy.option: strategy for strategy in cls}[option]

    @classmethod
    def of_stage(cls, stage: int) -> Strategy:
        """That of a ZeRO stage, 0 to 3."""
        return (cls.DDP, cls.ZERO1, cls.ZERO2, cls.ZERO3)[stage]

    @property
    def gathers(self) -> bool:
        """Whether parameters are gathered before their use."""
        return self.engine == "FSDP" or self.stage == _GATHERING_STAGE

    @property
    def gathers_in_node(self) -> bool:
        """Whether each node has all parameters, shared among its workers."""
        return self in {Strategy.HYBRID_SHARD, Strategy.ZERO3_HPZ}

    @property
    def shards_gradients(self) -> bool:
        """Whether each worker holds a part of the gradients; of the optimizer's states it does in all but DDP."""
        return self.gathers or self is Strategy.ZERO2

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters are released between their uses in a step."""
        return self.gathers and self is not Strategy.SHARD_GRAD_OP


class GroupScope(enum.StrEnum):
    """Who takes part: all workers, those of a node, those of a local rank across nodes, or the first of each node."""

    WORLD = "world"
    NODE = "node"
    ACROSS = "across"
    LEADERS = "leaders"


class TrafficInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What a training has to move."""

    # of the model, including frozen ones; None if unknown, which suffices for DDP, ZeRO-1 and ZeRO-2
    parameters: int | None
    trainable: int  # trained parameters
    parameter_bytes: int  # bytes per parameter on the wire
    gradient_bytes: int  # bytes per gradient element on the wire
    # how often a micro-batch gathers the parameters; None is 1 for SHARD_GRAD_OP, and 2 for ZeRO-3 and FSDP. Below 2 if
    # some stay whole between the forward and the backward pass.
    gathers: float | None = None
    # for FSDP, whether gradients are reduced only in the last micro-batch, as in the Trainer and accelerate:
    # `no_sync()`, or `set_requires_gradient_sync(False)` before
    no_sync: bool = True
    fsdp_version: int = 1  # 1 is FullyShardedDataParallel, 2 is `fully_shard`
    # for ZeRO-1, whether each node holds all optimizer states; None is unknown, counted as not, as in DeepSpeed
    optimizer_within_node: bool | None = False

    def reduces_often(self, strategy: Strategy) -> bool:
        """Whether a strategy that shards gradients reduces them in every micro-batch."""
        return strategy.stage == _GATHERING_STAGE or not self.no_sync

    def gathers_often(self, strategy: Strategy) -> bool:
        """Whether a strategy that shards parameters gathers them in every micro-batch."""
        keeps = strategy is Strategy.SHARD_GRAD_OP and self.fsdp_version == 1
        return self.reduces_often(strategy) or not keeps


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one collective and size in a step."""

    collective: str  # one of records.benchmark's COLLECTIVES
    size_bytes: float  # S as nccl-tests counts it: the whole of what is reduced or gathered, in bytes per call
    times: float = 1.0  # calls per optimizer step, or per micro-batch
    per_micro_batch: bool = False  # whether they are made in every micro-batch
    hideable: bool = True  # whether computation runs meanwhile; not the case after the optimizer step
    reach: GroupScope = GroupScope.WORLD  # the workers that take part
    what: str = ""  # what they carry, in a few words

    def times_in(self, accumulation: int) -> float:
        """Calls per optimizer step of so many micro-batches."""
        return self.times * accumulation if self.per_micro_batch else self.times

    def ranks(self, layout: Layout) -> int:
        """Workers in each group that makes it."""
        if self.reach is GroupScope.WORLD:
            return layout.workers
        return layout.workers_per_node if self.reach is GroupScope.NODE else layout.nodes


def strategy_calls(strategy: Strategy, load: TrafficInputs, layout: Layout) -> tuple[Call, ...]:
    """The collectives of one optimizer step; one call stands for all its buckets.

    With G the bytes of the trainable gradients, P those of all parameters and T of the trainable ones:
    - DDP, also DeepSpeed's ZeRO-0: all-reduce G, once a step (2G in a ring).
    - ZeRO-1: all-reduce G, all-gather T, once. DeepSpeed all-reduces (`use_multi_rank_bucket_allreduce`) where the
      paper (Rajbhandari et al. 2020) reduce-scatters. With optimizer states sharded within each node, T is gathered
      there (InternLM's `zero1.size`, the number of a node's GPUs).
    - ZeRO-2: all-reduce G in every micro-batch (DeepSpeed#373), all-gather T once.
    - ZeRO-3: in every micro-batch all-gather P in the forward and in the backward pass, reduce-scatter G.
    - ZeRO-3 hpZ: each node has all parameters in a second copy, which is filled by the first gather of a step and
      counts until the optimizer changes them: T once a step between the nodes, all other gathers inside each node
      (DeepSpeed 0.19.8, `_partition_param_sec`, `invalidate_secondary_tensor`). Frozen parameters stay valid.
    - FSDP: as ZeRO-3, but reduce-scatter G once if the other micro-batches are under `no_sync`.
    - FSDP SHARD_GRAD_OP: all-gather P and reduce-scatter G in every micro-batch. Under `no_sync` once; but version 2
      frees the parameters after every backward pass and gathers them again, while version 1 keeps them.
    - FSDP hybrid shard: as FSDP inside each node; each time that gradients are scattered there, one all-reduce of each
      worker's share of G between the nodes.
    Activation checkpointing adds no gather: the backward pass has already gathered a unit when it recomputes it.
    Counted with torch 2.13 (`tests/predict/sharded_runs.json`).

    Raises:
        ValueError: the strategy gathers all parameters, and their number is unknown.
    """
    gradients = float(load.trainable * load.gradient_bytes)
    if strategy in {Strategy.DDP, Strategy.ZERO1, Strategy.ZERO2}:
        reduced = Call(collective="all_reduce", size_bytes=gradients, per_micro_batch=strategy is Strategy.ZERO2)
        updated = float(load.trainable * load.parameter_bytes)
        within = strategy is Strategy.ZERO1 and load.optimizer_within_node is True
        scope = GroupScope.NODE if within else GroupScope.WORLD
        gathered = Call(collective="all_gather", size_bytes=updated, reach=scope, hideable=False)
        return (reduced,) if strategy is Strategy.DDP else (reduced, gathered)
    if load.parameters is None:
        raise ValueError(f"{strategy} gathers all parameters, whose number is unknown")
    gathers = load.gathers or (1 if strategy is Strategy.SHARD_GRAD_OP else 2)
    reach = GroupScope.NODE if strategy.gathers_in_node else GroupScope.WORLD
    weights = float(load.parameters * load.parameter_bytes)
    reduces_often = load.reduces_often(strategy)
    sharded = (
        Call(
            collective="all_gather",
            size_bytes=weights,
            times=gathers,
            per_micro_batch=load.gathers_often(strategy),
            reach=reach,
        ),
        Call(
            collective="reduce_scatter",
            size_bytes=gradients,
            per_micro_batch=reduces_often,
            reach=GroupScope.WORLD if strategy is Strategy.ZERO3_HPZ else reach,
        ),
    )
    if strategy is Strategy.ZERO3_HPZ:
        fresh = Call(collective="all_gather", size_bytes=float(load.trainable * load.parameter_bytes))
        return (fresh, *sharded)
    if strategy is not Strategy.HYBRID_SHARD:
        return sharded
    share = gradients / layout.workers_per_node
    across = Call(collective="all_reduce", size_bytes=share, per_micro_batch=reduces_often, reach=GroupScope.ACROSS)
    return (*sharded, across)


def nic_bytes(calls: Iterable[Call], layout: Layout, accumulation: int = 1, *, gloo: bool = False) -> float:
    """Bytes that a node's NIC sends in a step of these calls, and receives as well.

    A ring over all n workers enters and leaves a node once, whatever its number of workers, so the NIC carries what
    one worker sends: factor(op, n) x S. (NCCL's tree over k nodes has factor(op, k), which is less by 1/2 to 1 in
    (n-1)/n.) Traffic inside a node does not reach the NIC; a ring across the nodes runs once per local rank.
    """
    total = 0.0
    for call in calls:
        if layout.nodes == 1 or call.reach is GroupScope.NODE:
            continue
        rings = layout.workers_per_node if call.reach is GroupScope.ACROSS else 1
        factor = worker_factor("gloo" if gloo else "nccl", call.collective, call.ranks(layout))
        total += rings * call.times_in(accumulation) * factor * call.size_bytes
    return total


def nic_time_s(size_bytes: float, goodput_gb_per_s: float) -> float:
    """Seconds that a NIC needs for them, full duplex; without start-up and waiting.

    Args:
        size_bytes: bytes sent.
        goodput_gb_per_s: payload rate in one direction, 1e9 bytes per second.
    """
    return size_bytes / (goodput_gb_per_s * _BYTES_PER_GB)


Point = tuple[int, float]

# With a larger residual at any size, two numbers do not describe the curve. Measured on virtual nodes (gloo, 2 and 4 of
# them, 1 Gbit/s, 8 B to 16 MiB, all six collectives): residuals reach 46% to 96%, as a shaper's burst lets small
# messages pass. Median error at held-back sizes of 1 MiB and more: fit 3.7% to 48%; interpolation in size and time 0.1%
# to 4.9%, in their logarithms 0.1% to 6.8%. At 100 Mbit/s interpolation is off by 0% to 6.1% (2 nodes) and 1.9% to 8.7%
# (4 nodes), where the larger sizes had 5 to 9 iterations; smoother curves through more neighbors did no better.
_POOR_FIT = 0.05
_LEAST_SIZES = 2
_US_PER_GB_PER_S = 1e-3


SMALL_BYTES = 1 << 10
"""Smaller calls carry a loss, a count or a flag, and take one round trip at any bandwidth."""
_REDUCTIONS = frozenset({"all_reduce", "reduce_scatter", "broadcast"})


class Work(msgspec.Struct, frozen=True, kw_only=True, tag_field="is", tag="work"):
    """The work of a training."""

    strategy: Strategy  # of the calibration runs
    load: TrafficInputs  # what it moves
    bucket_bytes: float | None = None  # largest size of a reduction; None is unlimited
    # of a step, by strategy, if known as the engine makes them; otherwise derived from `load`
    calls: dict[Strategy, tuple[Call, ...]] = {}

    def calls_of(self, strategy: Strategy, layout: Layout) -> tuple[Call, ...]:
        """The calls of a step, from the most precise source."""
        calls = self.calls.get(strategy)
        return calls or in_buckets(strategy_calls(strategy, self.load, layout), self.bucket_bytes)

    def is_cut(self, strategy: Strategy) -> bool:
        """Whether single calls are known; otherwise one call stands for all buckets, and the last is unknown."""
        return self.bucket_bytes is not None or bool(self.calls.get(strategy))


def in_buckets(calls: Iterable[Call], bucket_bytes: float | None) -> tuple[Call, ...]:
    """Cut reductions into calls of at most `bucket_bytes`; None sends each in one call."""
    if bucket_bytes is None:
        return tuple(calls)
    cut = []
    for call in calls:
        pieces = 1 if call.collective == "all_gather" else max(1, math.ceil(call.size_bytes / bucket_bytes))
        cut.append(msgspec.structs.replace(call, size_bytes=call.size_bytes / pieces, times=call.times * pieces))
    return tuple(cut)


def with_gradients(calls: Iterable[Call], factor: float) -> tuple[Call, ...]:
    """Scale the gradients of calls by a factor: 0.5 for fp32 sent as half. Parameters keep their size."""
    return tuple(
        msgspec.structs.replace(call, size_bytes=call.size_bytes * factor) if call.collective in _REDUCTIONS else call
        for call in calls
    )


def passing_bytes(calls: Sequence[Call], accumulation: int, layout: Layout) -> float:
    """Bytes that a worker sends (and receives) per step: times x S x busbw factor of the workers that take part."""
    return sum(
        call.times_in(accumulation) * call.size_bytes * bus_factor(call.collective, call.ranks(layout))
        for call in calls
    )


class SizeCurve(msgspec.Struct, frozen=True, kw_only=True):
    """Time over size of one collective."""

    points: tuple[Point, ...]  # sizes in bytes and measured times in microseconds, by size
    alpha_us: float  # of the fit t = alpha + size / bandwidth: the cost of every message, at least zero
    bandwidth_gb_per_s: float | None  # of the fit, 1e9 bytes per second; None if the times do not grow with size
    residuals: tuple[float, ...]  # of the fit, by point: (fitted - measured) / measured
    # what predicts: the fit, or interpolation if the fit is off by more than 5% at any point
    method: Literal["fit", "interpolation"]

    def predict_us(self, size_bytes: float) -> float:
        """Time of a message of this size, in microseconds.

        Interpolation is linear in size and time between two points; below the smallest point it takes that point's
        time, and beyond the largest it continues at the last slope.
        """
        if self.method == "fit":
            return _line_us(self.alpha_us, self.bandwidth_gb_per_s, size_bytes)
        return _interpolate_us(self.points, size_bytes)


class ScanCurves(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a size scan that other runs can use."""

    run_id: str
    world_size: int
    nodes: tuple[str, ...]
    # of the slowest node: total rate of the NICs that the collectives used; None if one is unknown, or for one node
    link_gbit_per_s: float | None = None
    curves: dict[str, SizeCurve] = {}  # time over size, by collective, if several sizes were measured


def fit_curve(points: Iterable[Point]) -> SizeCurve:
    """The curve through points in bytes and microseconds; several of one size become their median."""
    unique = _clean(points)
    alpha_us, bandwidth = _fit(unique)
    residuals = tuple(_line_us(alpha_us, bandwidth, size) / time_us - 1 for size, time_us in unique)
    poor = max(map(abs, residuals)) > _POOR_FIT
    return SizeCurve(
        points=unique,
        alpha_us=alpha_us,
        bandwidth_gb_per_s=bandwidth,
        residuals=residuals,
        method="interpolation" if poor else "fit",
    )


def _clean(points: Iterable[Point]) -> tuple[Point, ...]:
    times: dict[int, list[float]] = {}
    for size, time_us in points:
        if not 0 < size < math.inf or not plausible_us(time_us):
            raise ValueError(f"{size} bytes in {time_us} us is implausible")
        times.setdefault(size, []).append(time_us)
    if len(times) < _LEAST_SIZES:
        raise ValueError(f"a curve needs at least two sizes: there are {len(times)}")
    return tuple((size, statistics.median(mine)) for size, mine in sorted(times.items()))


def _fit(points: Sequence[Point]) -> tuple[float, float | None]:
    """Least squares of (alpha + size * slope) / time - 1, neither below zero: alpha and 1 / slope."""
    # Sizes relative to the largest, times relative to the smallest: products stay within a float.
    unit, least_us = points[-1][0], min(time_us for _, time_us in points)
    ones = [least_us / time_us for _, time_us in points]
    sizes = [size / unit * scale for (size, _), scale in zip(points, ones, strict=True)]
    ones_ones, ones_sizes, sizes_sizes = (_product(*pair) for pair in ((ones, ones), (ones, sizes), (sizes, sizes)))
    sum_ones, sum_sizes = math.fsum(ones), math.fsum(sizes)
    determinant = ones_ones * sizes_sizes - ones_sizes**2
    alpha = (sum_ones * sizes_sizes - sum_sizes * ones_sizes) / determinant if determinant > 0 else 0.0
    slope = (sum_sizes * ones_ones - sum_ones * ones_sizes) / determinant if determinant > 0 else -1.0
    if alpha <= 0 < sizes_sizes:
        alpha, slope = 0.0, sum_sizes / sizes_sizes
    elif slope <= 0:
        alpha, slope = sum_ones / ones_ones, 0.0
    slope_us = slope * least_us
    return alpha * least_us, unit / slope_us * _US_PER_GB_PER_S if slope_us > 0 else None


def _product(left: Sequence[float], right: Sequence[float]) -> float:
    return math.fsum(value * other for value, other in zip(left, right, strict=True))


def _line_us(alpha_us: float, bandwidth_gb_per_s: float | None, size_bytes: float) -> float:
    return alpha_us + (size_bytes / bandwidth_gb_per_s * _US_PER_GB_PER_S if bandwidth_gb_per_s else 0.0)


def _interpolate_us(points: Sequence[Point], size_bytes: float) -> float:
    if size_bytes <= points[0][0]:
        return points[0][1]
    after = min(bisect.bisect_left(points, size_bytes, key=lambda point: point[0]), len(points) - 1)
    (size, time_us), (next_size, next_us) = points[after - 1 : after + 1]
    way = (size_bytes - size) / (next_size - size)
    if size_bytes > next_size:
        # A last point faster than the previous one is noise: larger messages do not take less time.
        return next_us + max(next_us - time_us, 0.0) * (way - 1)
    return time_us * (1 - way) + next_us * way
