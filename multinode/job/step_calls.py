"""StepCall and Work: the collective calls of an optimizer step, by strategy or as the engine cuts them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from multinode.job.step_messages import StepMessages
from multinode.traffic.algorithms import Layout, bus_factor
from multinode.traffic.traffic import GroupScope, Strategy, TrafficInputs, step_exchanges

SMALL_BYTES = 1 << 10
"""Below it a call carries a loss, a count or a flag, and takes a round trip, whatever the bandwidth."""
_REDUCTIONS = frozenset({"all_reduce", "reduce_scatter", "broadcast"})
_GATHERS_BEFORE_USE = frozenset({Strategy.ZERO3, Strategy.FSDP, Strategy.SHARD_GRAD_OP, Strategy.HYBRID_SHARD})


class StepCall(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one collective and size.

    Attributes:
        collective: one of core.collective_test's COLLECTIVES.
        size_bytes: S as nccl-tests counts it.
        times: calls in an optimizer step, or in each micro-batch of it.
        per_micro_batch: which of the two: whether they grow with gradient accumulation.
        hideable: whether computation runs meanwhile; not so for what follows the optimizer.
        reach: whom they join.
    """

    collective: str
    size_bytes: float
    times: float = 1.0
    per_micro_batch: bool = False
    hideable: bool = True
    reach: GroupScope = GroupScope.WORLD


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained.

    Attributes:
        strategy: as the calibrating runs share the model out.
        load: what it moves; its accumulation does not matter.
        bucket_bytes: the most that a reduction carries at once; None is no limit.
        calls: of a step by strategy, where they are known as the engine cuts them; of others they follow from `load`.
    """

    strategy: Strategy
    load: TrafficInputs
    bucket_bytes: float | None = None
    calls: dict[Strategy, tuple[StepCall, ...]] = {}

    def calls_of(self, strategy: Strategy, layout: Layout) -> tuple[StepCall, ...]:
        """The calls of a step, as they are known best.

        Raises:
            ValueError: the strategy gathers all parameters, and how many there are is not known.
        """
        known = self.calls.get(strategy)
        return known or calls_of_strategy(strategy, self.load, layout, bucket_bytes=self.bucket_bytes)

    def is_cut(self, strategy: Strategy) -> bool:
        """Whether its calls are single ones; else one stands for all buckets, and tells nothing of the last."""
        return self.bucket_bytes is not None or bool(self.calls.get(strategy))


def calls_of_strategy(
    strategy: Strategy, load: TrafficInputs, layout: Layout, *, bucket_bytes: float | None = None
) -> tuple[StepCall, ...]:
    """The calls of a step as `traffic` has them, whatever the load's accumulation.

    Args:
        strategy: how the model is shared out.
        load: what it moves.
        layout: the workers.
        bucket_bytes: the most that a reduction carries at once; None sends each in one call.

    Raises:
        ValueError: the strategy gathers all parameters, and how many there are is not known.
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
    """The calls of a step as the engine cuts them.

    Args:
        once: of the job without gradient accumulation.
        twice: of the same job with two micro-batches per step: what has become more, every micro-batch sends.
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
    """The same calls with gradients of other bytes: 0.5 is a hook that sends fp32 as half; parameters stay as wide."""
    return tuple(
        msgspec.structs.replace(call, size_bytes=call.size_bytes * factor) if call.collective in _REDUCTIONS else call
        for call in calls
    )


def passing_bytes(calls: Sequence[StepCall], accumulation: int, layout: Layout) -> float:
    """Bytes that a worker sends in a step, and receives as many: times x S x busbw's factor for those whom it joins."""
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
    """The fraction of a micro-batch's compute beside which its collectives may run, where the engine overlaps at all.

    Gradients are reduced during the backward pass. ZeRO-3 and FSDP gather parameters in the forward pass too, so all of
    the compute may hide them. In times of the forward pass, the backward pass computes the gradients of the inputs (1)
    and of the weights (1, which the frozen weights of LoRA have none of; Hu et al., arXiv 2106.09685), and with
    activation checkpointing the forward pass again (1; Narayanan et al., arXiv 2104.04473, section 5.1).

    Args:
        strategy: how the model is shared out.
        lora: whether an adapter is trained instead of the whole model.
        recompute: whether activations are computed again.
    """
    if strategy in _GATHERS_BEFORE_USE:
        return 1.0
    backward = 1 + (not lora) + recompute
    return backward / (1 + backward)


def _counts(messages: StepMessages) -> dict[StepCall, float]:
    """How many there are of each, which does not count them."""
    counts: dict[StepCall, float] = {}
    for one in messages.messages:
        call = StepCall(collective=one.collective, size_bytes=one.size_bytes, hideable=one.hideable)
        counts[call] = counts.get(call, 0.0) + one.times
    return counts
