"""The cost model: a Scenario, its cost per optimizer step, how much of it hides communication, the step time. Pure.

Owns the formula; `network_model` gives the time of calls, `calibration` the costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from multinode.levers.averaging import Averaging
from multinode.levers.levers import NONE, Levers
from multinode.predict.network_model import CommTimes, Link
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Call, GroupScope, Strategy, TrafficInputs

_FP32_BYTES, _HALF_BYTES = 4, 2
# `worker/levers/sync.py` flattens parameters into buckets of this size.
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


def low_rank_calls(calls: Sequence[Call], low_rank: LowRank, *, hideable: bool) -> tuple[Call, ...]:
    """Three consecutive all-reduces per bucket.

    Args:
        calls: of DDP.
        low_rank: the compressed gradients.
        hideable: whether they overlap with the backward pass; with NCCL its stream waits for them.
    """
    parts = [part for part in (low_rank.rest, low_rank.left, low_rank.right) if part]
    return tuple(
        msgspec.structs.replace(call, size_bytes=call.size_bytes * part, hideable=call.hideable and hideable)
        for call in calls
        for part in parts
    )


def averaging_calls(calls: Sequence[Call], averaging: Averaging, load: TrafficInputs) -> tuple[Call, ...]:
    """Calls per step, as the mean of a round: gradients inside each node, and a share of the average.

    Args:
        calls: of DDP over all workers.
        averaging: what is averaged, and when.
        load: number of trained parameters.
    """
    inside = [msgspec.structs.replace(call, reach=GroupScope.NODE) for call in calls]
    return (*inside, *_round_calls(averaging, load))


def _round_calls(averaging: Averaging, load: TrafficInputs) -> Iterator[Call]:
    width = load.gradient_bytes
    if averaging.outer_lr is not None:
        # Changes are kept in at least fp32.
        width = max(width, _FP32_BYTES)
    buckets = math.ceil(load.trainable * load.gradient_bytes / _BUCKET_BYTES)
    size_bytes = load.trainable * (_HALF_BYTES if averaging.dtype is not None else width) / buckets
    for size in (size_bytes, *([_SCALE_BYTES] if averaging.dtype == "fp16" else [])):
        yield Call(
            collective="all_reduce",
            size_bytes=size,
            times=buckets / averaging.every,
            hideable=False,
            reach=GroupScope.LEADERS,
        )


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """The settings to predict."""

    link: Link
    layout: Layout
    per_device_batch: float  # samples per micro-batch of a worker, above zero
    accumulation: int = 1  # micro-batches per step
    strategy: Strategy = Strategy.DDP
    gradient_factor: float = 1.0  # factor on gradient bytes: 0.5 is a hook that sends fp32 as half
    bucket_bytes: float | None = None  # maximum bytes per reduction; None as calibrated
    overlap: bool = True  # whether computation may hide communication
    levers: Levers = NONE  # what changes the training itself
    low_rank: LowRank | None = None  # what PowerSGD makes of the gradients; None sends them unchanged

    @property
    def averaging(self) -> Averaging | None:
        """How nodes average parameters instead of gradients; None if they do not, as on one node."""
        return self.levers.on(self.layout.nodes).averaging

    @property
    def is_another_algorithm(self) -> bool:
        """Whether the algorithm differs from that of all runs used for predictions."""
        return self.averaging is not None or self.low_rank is not None

    @property
    def lever_work(self) -> float:
        """Compute per step of its levers, in multiples of the optimizer's."""
        rounds = _ROUND_WORK / self.averaging.every if self.averaging is not None else 0.0
        return rounds + (_LOW_RANK_WORK * (1 - self.low_rank.rest) if self.low_rank is not None else 0.0)

    @property
    def samples(self) -> float:
        """Samples per optimizer step of all workers."""
        return self.layout.workers * self.per_device_batch * self.accumulation


def overlaps(strategy: Strategy, backend: str) -> bool:
    """Whether an engine can compute and communicate at once.

    DDP's reducer issues its calls asynchronously. DeepSpeed and FSDP issue them synchronously on their own CUDA streams
    (torch 2.13, `FSDPParamGroup.unshard_async_op` is False by default): with gloo such a call blocks the worker.
    """
    return strategy is Strategy.DDP or backend != "gloo"


HIDEABLE_SHARE = 2 / 3
"""`hideable_share` of an unknown training: the backward pass without activation checkpointing."""


def hideable_share(strategy: Strategy, *, lora: bool = False, recompute: bool = False) -> float:
    """Fraction of a micro-batch's compute time during which its collectives may run, if the engine overlaps them.

    Gradients are reduced during the backward pass. ZeRO-3 and FSDP also gather parameters in the forward pass, so all
    of the compute can hide them. In units of the forward pass, the backward pass computes gradients of inputs (1) and
    of weights (1; none for frozen weights under LoRA, Hu et al., arXiv 2106.09685), and activation checkpointing
    repeats the forward pass (1; Narayanan et al., arXiv 2104.04473, section 5.1).

    Args:
        strategy: how the model is sharded.
        lora: whether an adapter is trained instead of the whole model.
        recompute: whether activations are recomputed.
    """
    if strategy.gathers:
        return 1.0
    backward = 1 + (not lora) + recompute
    return backward / (1 + backward)


class StepCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of a step for a worker without communication, in ms."""

    compute_ms: float  # t_f + t_b, forward and backward pass of one micro-batch
    optimizer_ms: float = 0.0  # t_opt, once per step
    host_ms: float = 0.0  # t_host, once per step
    data_ms: float = 0.0  # wait for the batch of one micro-batch
    hideable_share: float = HIDEABLE_SHARE  # fraction of `compute_ms` that can hide communication (`hideable_share`)
    overlap: float | None = None  # rho, the fraction of that time that was used; None if unknown
    least_overlap: float = 0.0  # if rho is unknown, its lower bound from what was hidden
    # upper bound of the fraction of `compute_ms` that is done once per step, if nothing separates it; 0 if it is known
    most_fixed: float = 0.0

    @property
    def hideable_ms(self) -> float:
        """t_hide of a micro-batch."""
        return self.hideable_share * self.compute_ms

    def with_fixed(self, share: float, accumulation: int) -> StepCosts:
        """Costs of the step if a share of its compute is done once, instead of in each of its micro-batches.

        Args:
            share: of `compute_ms`.
            accumulation: micro-batches of the step.
        """
        fixed_ms = share * self.compute_ms
        return msgspec.structs.replace(
            self, compute_ms=self.compute_ms - fixed_ms, host_ms=self.host_ms + accumulation * fixed_ms
        )


class StepParts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a step's time, in ms."""

    compute_ms: float  # of all micro-batches; also `data_ms`
    optimizer_ms: float  # per step, including averaging or PowerSGD; also `host_ms`
    host_ms: float
    data_ms: float
    comm_ms: float  # time of the calls: C and what cannot be hidden
    beyond_ms: float  # of x, all but the last bucket of each backward pass, which nothing can hide
    exposed_ms: float  # x, the part that lengthens the step

    @property
    def step_ms(self) -> float:
        """T_step."""
        return self.compute_ms + self.optimizer_ms + self.host_ms + self.data_ms + self.exposed_ms


class Overlap(msgspec.Struct, frozen=True, kw_only=True):
    """What computation can hide."""

    hide_ms: float = 0.0  # rho t_hide of each micro-batch, in which calls can run; it ends with the backward pass
    calls: tuple[Call, ...] = ()  # per step, in the engine's order; if empty, bytes are divisible at will


NOTHING_HIDDEN = Overlap()


def step_parts(costs: StepCosts, comm: CommTimes, *, accumulation: int, overlap: Overlap = NOTHING_HIDDEN) -> StepParts:
    """T_step = K (t_f + t_b) + t_opt + t_host + x.

    Calls of every micro-batch can hide behind the computation of every one. Calls after the optimizer are exposed.

    Args:
        costs: of the step.
        comm: of its calls.
        accumulation: K.
        overlap: of its calls and its computation.
    """
    exposed = beyond = 0.0
    for grows, comm_ms, count in ((False, comm.step_ms, 1), (True, comm.micro_batch_ms, accumulation)):
        calls = [call for call in overlap.calls if call.hideable and call.per_micro_batch is grows]
        late_ms = count * exposed_ms(calls, comm_ms, overlap.hide_ms)
        exposed += late_ms
        beyond += max(0.0, late_ms - count * comm_ms * _share(calls, -1))
    return StepParts(
        compute_ms=accumulation * costs.compute_ms,
        optimizer_ms=costs.optimizer_ms,
        host_ms=costs.host_ms,
        data_ms=accumulation * costs.data_ms,
        comm_ms=comm.step_ms + accumulation * comm.micro_batch_ms + comm.after_ms,
        beyond_ms=beyond,
        exposed_ms=exposed + comm.after_ms,
    )


def hideable_part(calls: Sequence[Call]) -> float:
    """Share of the hiding time that a slow link uses: nothing is sent before the first bucket is full."""
    return 1 - _share([call for call in calls if call.hideable], 0)


def _share(calls: Sequence[Call], index: int) -> float:
    total = sum(call.times * call.size_bytes for call in calls)
    return calls[index].size_bytes / total if total else 0.0


def exposed_ms(calls: Sequence[Call], comm_ms: float, hide_ms: float) -> float:
    """Communication left when a backward pass ends, from the timeline of its buckets.

    Gradients arrive evenly over the hiding time. A bucket is sent when it is full and the previous one is sent; the
    last one hides behind nothing.

    Args:
        calls: in order; if empty, only the sum counts.
        comm_ms: their time, each by its share of the bytes.
        hide_ms: of a micro-batch.
    """
    total = sum(call.times * call.size_bytes for call in calls)
    full_ms = end_ms = 0.0
    for call in calls if total else ():
        filling_ms, sending_ms = (call.size_bytes / total * whole_ms for whole_ms in (hide_ms, comm_ms))
        # With equal buckets, the first waits longest if sending is slower than filling, otherwise the last.
        first_ms = max(end_ms, full_ms + filling_ms) + call.times * sending_ms
        full_ms += call.times * filling_ms
        end_ms = max(first_ms, full_ms + sending_ms)
    return max(0.0, (end_ms if total else comm_ms) - hide_ms)
