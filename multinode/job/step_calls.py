"""StepCall and Work: the collective calls of an optimizer step. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from multinode.traffic.algorithms import Layout, bus_factor
from multinode.traffic.traffic import GroupScope, Strategy, TrafficInputs, step_exchanges

if TYPE_CHECKING:
    from multinode.job.step_messages import StepMessages

SMALL_BYTES = 1 << 10
"""Smaller calls carry a loss, a count or a flag, and take one round trip at any bandwidth."""
_REDUCTIONS = frozenset({"all_reduce", "reduce_scatter", "broadcast"})
_GATHERS_BEFORE_USE = frozenset({Strategy.ZERO3, Strategy.FSDP, Strategy.SHARD_GRAD_OP, Strategy.HYBRID_SHARD})


class StepCall(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one collective and size."""

    collective: str  # one of core.collective_test's COLLECTIVES
    size_bytes: float  # S as nccl-tests counts it
    times: float = 1.0  # calls per optimizer step, or per micro-batch
    per_micro_batch: bool = False  # whether they are made in every micro-batch
    hideable: bool = True  # whether computation runs meanwhile; not the case after the optimizer step
    reach: GroupScope = GroupScope.WORLD  # the workers that take part


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a training."""

    strategy: Strategy  # of the calibration runs
    load: TrafficInputs  # what it moves; its accumulation does not matter
    bucket_bytes: float | None = None  # largest size of a reduction; None is unlimited
    # of a step, by strategy, if known as the engine makes them; otherwise derived from `load`
    calls: dict[Strategy, tuple[StepCall, ...]] = {}

    def calls_of(self, strategy: Strategy, layout: Layout) -> tuple[StepCall, ...]:
        """The calls of a step, from the most precise source."""
        known = self.calls.get(strategy)
        return known or calls_of_strategy(strategy, self.load, layout, bucket_bytes=self.bucket_bytes)

    def is_cut(self, strategy: Strategy) -> bool:
        """Whether single calls are known; otherwise one call stands for all buckets, and the last is unknown."""
        return self.bucket_bytes is not None or bool(self.calls.get(strategy))


def calls_of_strategy(
    strategy: Strategy, load: TrafficInputs, layout: Layout, *, bucket_bytes: float | None = None
) -> tuple[StepCall, ...]:
    """The calls of a step by the rules in `traffic`, whatever the load's accumulation.

    Args:
        strategy: how the model is sharded.
        load: what it moves.
        layout: the workers.
        bucket_bytes: largest size of a reduction; None sends each in one call.
    """
    once, twice = (
        step_exchanges(strategy, msgspec.structs.replace(load, accumulation=accumulation), layout)
        for accumulation in (1, 2)
    )
    calls = []
    for one, two in zip(once, twice, strict=True):
        grows = two.times > one.times
        pieces = max(1, math.ceil(one.size_bytes / bucket_bytes)) if bucket_bytes and one.op != "all_gather" else 1
        calls.append(
            StepCall(
                collective=one.op,
                size_bytes=one.size_bytes / pieces,
                times=one.times * pieces,
                per_micro_batch=grows,
                hideable=one.hideable,
                reach=one.reach,
            )
        )
    return tuple(calls)


def calls_of_messages(once: StepMessages, twice: StepMessages) -> tuple[StepCall, ...]:
    """The calls of a step as the engine makes them.

    Args:
        once: of the job without gradient accumulation.
        twice: of the same job with two micro-batches per step: the additional calls belong to every micro-batch.
    """
    first, second = (_counts(messages) for messages in (once, twice))
    calls = []
    for one, times in first.items():
        more = second.get(one, times) - times
        for grows, count in ((True, more), (False, times - more)):
            if count > 0:
                calls.append(msgspec.structs.replace(one, times=count, per_micro_batch=grows))
    return tuple(calls)


def with_gradients(calls: Iterable[StepCall], factor: float) -> tuple[StepCall, ...]:
    """The same calls with gradients scaled by a factor: 0.5 for fp32 sent as half. Parameters keep their size."""
    return tuple(
        msgspec.structs.replace(call, size_bytes=call.size_bytes * factor) if call.collective in _REDUCTIONS else call
        for call in calls
    )


def passing_bytes(calls: Sequence[StepCall], accumulation: int, layout: Layout) -> float:
    """Bytes that a worker sends (and receives) per step: times x S x busbw factor of the workers that take part."""
    ranks = {
        GroupScope.WORLD: layout.workers,
        GroupScope.NODE: layout.workers_per_node,
        GroupScope.ACROSS: layout.nodes,
        GroupScope.LEADERS: layout.nodes,
    }
    return sum(
        call.times
        * call.size_bytes
        * bus_factor(call.collective, ranks[call.reach])
        * (accumulation if call.per_micro_batch else 1)
        for call in calls
    )


def hideable_share(strategy: Strategy, *, lora: bool = False, recompute: bool = False) -> float:
    """Fraction of a micro-batch's compute time during which its collectives may run, if the engine overlaps them.

    Gradients are reduced during the backward pass. ZeRO-3 and FSDP also gather parameters in the forward pass, so
    all
    of the compute can hide them. In units of the forward pass, the backward pass computes gradients of inputs (1)
    and
    of weights (1; none for frozen weights under LoRA, Hu et al., arXiv 2106.09685), and activation checkpointing
    repeats the forward pass (1; Narayanan et al., arXiv 2104.04473, section 5.1).

    Args:
        strategy: how the model is sharded.
        lora: whether an adapter is trained instead of the whole model.
        recompute: whether activations are recomputed.
    """
    if strategy in _GATHERS_BEFORE_USE:
        return 1.0
    backward = 1 + (not lora) + recompute
    return backward / (1 + backward)


def _counts(messages: StepMessages) -> dict[StepCall, float]:
    counts: dict[StepCall, float] = {}
    for one in messages.messages:
        call = StepCall(collective=one.collective, size_bytes=one.size_bytes, hideable=one.hideable)
        counts[call] = counts.get(call, 0.0) + one.times
    return counts
