"""Traffic of a training step: the collectives of a strategy, and the bytes through a worker and a node's NIC.

Pure arithmetic on given sizes. Whether the traffic overlaps with the computation is not decided here.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec

from multinode.traffic.algorithms import Layout, worker_factor

_BYTES_PER_GB = 1e9


class Strategy(enum.StrEnum):
    """How parameters, gradients and optimizer states are sharded over the workers."""

    DDP = "DDP"
    ZERO1 = "ZeRO-1"
    ZERO2 = "ZeRO-2"
    ZERO3 = "ZeRO-3"
    FSDP = "FSDP"
    SHARD_GRAD_OP = "FSDP SHARD_GRAD_OP"
    HYBRID_SHARD = "FSDP hybrid shard"


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
    accumulation: int = 1  # K, micro-batches per optimizer step
    # how often a micro-batch gathers the parameters; None is 1 for SHARD_GRAD_OP, and 2 for ZeRO-3 and FSDP. Below 2 if
    # some stay whole between the forward and the backward pass.
    gathers: float | None = None
    # for FSDP, whether gradients are reduced only in the last micro-batch, as in the Trainer and accelerate:
    # `no_sync()`, or `set_requires_gradient_sync(False)` before
    no_sync: bool = True
    fsdp_version: int = 1  # 1 is FullyShardedDataParallel, 2 is `fully_shard`
    # for ZeRO-1, whether each node holds all optimizer states; None is unknown, counted as not, as in DeepSpeed
    optimizer_within_node: bool | None = False


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of collective in a step."""

    op: str  # as in `bus_factor`
    size_bytes: float  # S as nccl-tests counts it: the whole of what is reduced or gathered, in bytes per call
    times: float = 1  # calls of this size per optimizer step; a call stands for all its buckets
    reach: GroupScope = GroupScope.WORLD  # the workers that take part
    hideable: bool = True  # whether computation runs meanwhile; not the case after the optimizer step


def step_exchanges(strategy: Strategy, load: TrafficInputs, layout: Layout) -> tuple[Exchange, ...]:
    """The collectives of one optimizer step.

    With G the bytes of the trainable gradients, P those of all parameters and T of the trainable ones, K
    micro-batches:
    - DDP, also DeepSpeed's ZeRO-0: all-reduce G, once a step (2G in a ring).
    - ZeRO-1: all-reduce G, all-gather T, once. DeepSpeed all-reduces (`use_multi_rank_bucket_allreduce`) where the
      paper (Rajbhandari et al. 2020) reduce-scatters. With optimizer states sharded within each node, T is gathered
      there (InternLM's `zero1.size`, the number of a node's GPUs).
    - ZeRO-2: K times all-reduce G (DeepSpeed reduces each micro-batch, DeepSpeed#373), all-gather T once.
    - ZeRO-3: K times all-gather P in the forward and in the backward pass, reduce-scatter G.
    - FSDP: the same, but reduce-scatter G once if the other micro-batches are under `no_sync`.
    - FSDP SHARD_GRAD_OP: all-gather P and reduce-scatter G, K times. Under `no_sync` once; but version 2 frees the
      parameters after every backward pass and gathers them K times, while version 1 keeps them.
    - FSDP hybrid shard: as FSDP inside each node; each time that gradients are scattered there, one all-reduce of
    each
      worker's share of G between the nodes.
    Activation checkpointing adds no gather: the backward pass has already gathered a unit when it recomputes it.
    Counted with torch 2.13 (`tests/predict/sharded_runs.json`).

    Raises:
        ValueError: the strategy gathers all parameters, and their number is unknown.
    """
    gradients = float(load.trainable * load.gradient_bytes)
    k = load.accumulation
    if strategy in {Strategy.DDP, Strategy.ZERO1, Strategy.ZERO2}:
        reduced = Exchange(op="all_reduce", size_bytes=gradients, times=k if strategy is Strategy.ZERO2 else 1)
        updated = float(load.trainable * load.parameter_bytes)
        within = strategy is Strategy.ZERO1 and load.optimizer_within_node is True
        scope = GroupScope.NODE if within else GroupScope.WORLD
        gathered = Exchange(op="all_gather", size_bytes=updated, reach=scope, hideable=False)
        return (reduced,) if strategy is Strategy.DDP else (reduced, gathered)
    if load.parameters is None:
        raise ValueError(f"{strategy} gathers all parameters, whose number is unknown")
    once = load.no_sync and strategy is not Strategy.ZERO3
    stays = once and strategy is Strategy.SHARD_GRAD_OP and load.fsdp_version == 1
    gathers = load.gathers or (1 if strategy is Strategy.SHARD_GRAD_OP else 2)
    reach = GroupScope.NODE if strategy is Strategy.HYBRID_SHARD else GroupScope.WORLD
    reductions = 1 if once else k
    weights = float(load.parameters * load.parameter_bytes)
    sharded = (
        Exchange(op="all_gather", size_bytes=weights, times=gathers * (1 if stays else k), reach=reach),
        Exchange(op="reduce_scatter", size_bytes=gradients, times=reductions, reach=reach),
    )
    if strategy is not Strategy.HYBRID_SHARD:
        return sharded
    share = gradients / layout.workers_per_node
    return (*sharded, Exchange(op="all_reduce", size_bytes=share, times=reductions, reach=GroupScope.ACROSS))


def nic_bytes(exchanges: Iterable[Exchange], layout: Layout, *, gloo: bool = False) -> float:
    """Bytes that a node's NIC sends in these exchanges, and receives as well.

    A ring over all n workers enters and leaves a node once, whatever its number of workers, so the NIC carries what
    one
    worker sends: factor(op, n) x S. (NCCL's tree over k nodes has factor(op, k), which is less by 1/2 to 1 in
        (n-1)/n.)
    Traffic inside a node does not reach the NIC; a ring across the nodes runs once per local rank.
    """
    total = 0.0
    for one in exchanges:
        if layout.nodes == 1 or one.reach is GroupScope.NODE:
            continue
        across = one.reach is GroupScope.ACROSS
        ranks = layout.workers if one.reach is GroupScope.WORLD else layout.nodes
        total += _ring_bytes(one, ranks, gloo=gloo) * (layout.workers_per_node if across else 1)
    return total


def nic_time_s(size_bytes: float, goodput_gb_per_s: float) -> float:
    """Seconds that a NIC needs for them, full duplex; without start-up and waiting.

    Args:
        size_bytes: bytes sent.
        goodput_gb_per_s: payload rate in one direction, 1e9 bytes per second.
    """
    return size_bytes / (goodput_gb_per_s * _BYTES_PER_GB)


def _ring_bytes(one: Exchange, ranks: int, *, gloo: bool) -> float:
    return one.times * worker_factor("gloo" if gloo else "nccl", one.op, ranks) * one.size_bytes
