"""Levers: what averaging every H-th step and PowerSGD send and compute, in place of DDP's gradients. Pure.

What they do is decided on the nodes: `multinode_sync` and `multinode_power_sgd`; ADR 0033 has the reasons.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from multinode.job.step_calls import StepCall
from multinode.records.averaging import Averaging
from multinode.traffic.traffic import GroupScope, TrafficInputs

_FP32_BYTES, _HALF_BYTES = 4, 2
# `multinode_sync` flattens parameters into buckets of this size.
_BUCKET_BYTES = 64 << 20
# fp16 changes are scaled by what all nodes agree on: one number per bucket.
_SCALE_BYTES = 4
# torch's, and ours: what does not become half as large stays as it is.
_LEAST_RATE = 2
# Both read and write memory, as the optimizer does: in times of a fused AdamW step over the same parameters, by the CPU
# time of each in a training of 3.7 M parameters on one core. PowerSGD's products with thin matrices cost most.
_ROUND_WORK, _LOW_RANK_WORK = 2.0, 4.5


class LowRank(msgspec.Struct, frozen=True, kw_only=True):
    """Gradients as PowerSGD sends them, in parts of their bytes.

    Attributes:
        left: the first all-reduce of thin matrices, in fp32; `right` the second.
        rest: what is sent as it is: vectors, and matrices that would not become half as large.
    """

    left: float
    right: float
    rest: float


def make_low_rank(matrices: Iterable[tuple[int, int, int]], load: TrafficInputs, rank: int) -> LowRank:
    """What PowerSGD makes of gradients.

    Args:
        matrices: rows, columns and count of those that are trained.
        load: how much is trained, and how wide a gradient is.
        rank: columns of the thin matrices.
    """
    left = right = compressed = 0
    for rows, columns, count in matrices:
        if rows * columns > (rows + columns) * rank * _LEAST_RATE:
            left, right = left + count * rows * rank, right + count * columns * rank
            compressed += count * rows * columns
    width = _FP32_BYTES / load.gradient_bytes
    return LowRank(
        left=left / load.trainable * width,
        right=right / load.trainable * width,
        rest=max(0, load.trainable - compressed) / load.trainable,
    )


def low_rank_calls(calls: Sequence[StepCall], found: LowRank, *, hideable: bool) -> tuple[StepCall, ...]:
    """Of each bucket three all-reduces, one after the other.

    Args:
        calls: of DDP.
        found: what becomes of its gradients.
        hideable: whether they run beside the backward pass; with NCCL its stream waits for them.
    """
    parts = [part for part in (found.rest, found.left, found.right) if part]
    return tuple(
        msgspec.structs.replace(call, size_bytes=call.size_bytes * part, hideable=call.hideable and hideable)
        for call in calls
        for part in parts
    )


def averaging_calls(calls: Sequence[StepCall], averaging: Averaging, load: TrafficInputs) -> tuple[StepCall, ...]:
    """Of a step in a whole round: gradients inside each node, and a part of the average that follows the last step.

    Args:
        calls: of DDP over all workers.
        averaging: what is averaged, and when.
        load: how much is trained.
    """
    inside = [msgspec.structs.replace(call, reach=GroupScope.NODE) for call in calls]
    return (*inside, *_round_calls(averaging, load))


def _round_calls(averaging: Averaging, load: TrafficInputs) -> Iterator[StepCall]:
    width = load.gradient_bytes
    if averaging.outer_lr is not None:
        # Changes are kept in at least fp32.
        width = max(width, _FP32_BYTES)
    buckets = math.ceil(load.trainable * load.gradient_bytes / _BUCKET_BYTES)
    size_bytes = load.trainable * (_HALF_BYTES if averaging.dtype is not None else width) / buckets
    for size in (size_bytes, *([_SCALE_BYTES] if averaging.dtype == "fp16" else [])):
        yield StepCall(
            collective="all_reduce",
            size_bytes=size,
            times=buckets / averaging.every,
            hideable=False,
            reach=GroupScope.LEADERS,
        )


def lever_work(averaging: Averaging | None, low_rank: LowRank | None) -> float:
    """What they compute in a step, in times of the optimizer's."""
    rounds = _ROUND_WORK / averaging.every if averaging is not None else 0.0
    return rounds + (_LOW_RANK_WORK * (1 - low_rank.rest) if low_rank is not None else 0.0)
