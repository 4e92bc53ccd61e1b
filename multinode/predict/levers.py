"""Levers: traffic and compute of averaging every H steps and of PowerSGD, instead of DDP's gradients. Pure.

`worker/sync.py` and `worker/power_sgd.py` implement them on the nodes; see ADR 0033.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from multinode.job.step_calls import StepCall
from multinode.records.averaging import Averaging
from multinode.traffic.traffic import GroupScope, TrafficInputs

_FP32_BYTES, _HALF_BYTES = 4, 2
# `worker/sync.py` flattens parameters into buckets of this size.
_BUCKET_BYTES = 64 << 20
# fp16 changes have a scale that all nodes agree on: one number per bucket.
_SCALE_BYTES = 4
# As in torch: a matrix that would not shrink to half stays uncompressed.
_LEAST_RATE = 2
# Cost in multiples of a fused AdamW step over the same parameters, from CPU times of a training of 3.7 M parameters on
# one core. PowerSGD's products with thin matrices cost most.
_ROUND_WORK, _LOW_RANK_WORK = 2.0, 4.5


class LowRank(msgspec.Struct, frozen=True, kw_only=True):
    """Gradients as PowerSGD sends them, as fractions of their bytes."""

    left: float  # the first all-reduce of thin matrices, in fp32; `right` the second
    right: float
    rest: float  # sent uncompressed: vectors, and matrices that would not shrink to half


def make_low_rank(matrices: Iterable[tuple[int, int, int]], load: TrafficInputs, rank: int) -> LowRank:
    """Gradients compressed by PowerSGD.

    Args:
        matrices: rows, columns and count of trained matrices.
        load: number of trained parameters, and bytes per gradient.
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
    """Three consecutive all-reduces per bucket.

    Args:
        calls: of DDP.
        found: the compressed gradients.
        hideable: whether they overlap with the backward pass; with NCCL its stream waits for them.
    """
    parts = [part for part in (found.rest, found.left, found.right) if part]
    return tuple(
        msgspec.structs.replace(call, size_bytes=call.size_bytes * part, hideable=call.hideable and hideable)
        for call in calls
        for part in parts
    )


def averaging_calls(calls: Sequence[StepCall], averaging: Averaging, load: TrafficInputs) -> tuple[StepCall, ...]:
    """Calls per step, as the mean of a round: gradients inside each node, and a share of the average.

    Args:
        calls: of DDP over all workers.
        averaging: what is averaged, and when.
        load: number of trained parameters.
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
    """Compute per step, in multiples of the optimizer's."""
    rounds = _ROUND_WORK / averaging.every if averaging is not None else 0.0
    return rounds + (_LOW_RANK_WORK * (1 - low_rank.rest) if low_rank is not None else 0.0)
