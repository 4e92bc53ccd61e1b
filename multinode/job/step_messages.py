"""StepMessages: the collectives of one optimizer step, with the sizes of the single calls.

`traffic` gives the total of a strategy; here it is split into calls as torch's DDP and DeepSpeed make them. The rules
come from their sources and were compared with recorded runs: which tensors have gradients, in which order, and in
which buckets they are sent. How long a call takes is measured elsewhere; overlap with computation is not decided here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from multinode.errors import JobError
from multinode.job.deepspeed import DeepSpeedConfig
from multinode.job.job import Job, LlamaFactoryJob
from multinode.job.model_size import ModelShape
from multinode.job.training import Adapter, Training, read_training, zero_3_gathers
from multinode.records.benchmark import Message
from multinode.traffic.algorithms import Layout, bus_factor
from multinode.traffic.traffic import GroupScope, Strategy, TrafficInputs, step_exchanges
from multinode.units import MIB

# DDP's first bucket is smaller unless the user sets the cap.
_FIRST_CAP_BYTES = MIB
_CAP_MIB = 25
# DeepSpeed pads a parameter group to a multiple of this many elements per worker.
_ALIGNMENT = 2

_EMBEDDING, _HEAD = "embed_tokens", "lm_head"
# Smaller differences in size do not show in a measurement.
_ALIKE = 0.05
# Above this the bandwidth no longer changes, and the buffers of a test take too much memory.
_LARGEST_BYTES = 1 << 30

# Known differences between the messages and the real training, each a sentence without its full stop.
_REDUCED_TO_OWNERS = (
    "DeepSpeed reduces each bucket to the workers that own it (use_multi_rank_bucket_allreduce: false); nccl-test has "
    "no reduce, so it measures a broadcast of the bucket, which is the reverse of a reduce"
)
_FILLED = (
    "the parameters that ZeRO-3 gathers together depend on its trace of the model; they are approximated by filling "
    "stage3_prefetch_bucket_size in module order"
)
_STAY_WHOLE = "parameters that are reused soon stay gathered for the backward pass (stage3_max_reuse_distance)"
_WRAPS_LAYERS = (
    "FSDP is assumed to wrap each decoder layer and to reduce gradients in the last micro-batch only, as with the "
    "Trainer"
)
_INSIDE_LEFT_OUT = (
    "traffic inside a node is excluded; the all-reduce between nodes has one worker per node, but is measured with all "
    "workers"
)
_SMALL_LEFT_OUT = (
    "calls of a few bytes (gradient norms, losses) are excluded: each takes about as long as the smallest message"
)


class Gradient(msgspec.Struct, frozen=True):
    """The gradient of one tensor."""

    elements: int
    # whether it belongs to a weight; biases and normalizations have an optimizer group of their own
    matrix: bool = True


class StepMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one kind and size."""

    collective: str  # one of records.benchmark's COLLECTIVES
    size_bytes: int  # S as nccl-tests counts it
    times: int  # calls per step
    what: str  # what they carry, in a few words
    hideable: bool = True  # whether computation runs meanwhile; not the case after the optimizer step


class StepMessages(msgspec.Struct, frozen=True, kw_only=True):
    """What one optimizer step sends between the nodes."""

    training: str
    messages: tuple[StepMessage, ...]  # its calls, ordered by when their kind first appears
    notes: tuple[str, ...] = ()  # known differences from the real training, one sentence each


class _Calls(NamedTuple):
    """Calls of one collective; each is made `times` times per step."""

    collective: str
    what: str
    elements: Iterable[int]
    width: int
    times: int = 1
    hideable: bool = True


_Sent = tuple[list[_Calls], tuple[str, ...]]


def step_messages(
    job: Job, model: Mapping[str, Any] | None, layout: Layout, transformers: str | None = None
) -> StepMessages:
    """The calls of one optimizer step of a job; they do not depend on the backend.

    Args:
        job: the job.
        model: the model's config.json; None if it could not be read.
        layout: the workers.
        transformers: its version on the nodes, as for `read_training`.

    Raises:
        JobError: the traffic of the job is unknown.
    """
    if not isinstance(job, LlamaFactoryJob):
        raise JobError(
            "the messages of a script are unknown before it runs",
            hint="use a LLaMA-Factory YAML: multinode nccl-test --like sft.yaml",
        )
    training = read_training(job, model, transformers)
    if training.strategy is Strategy.DDP:
        calls, notes = _ddp(job, training) if training.settings is None else _zero_0(training)
    elif training.settings is not None:
        stage_3 = training.strategy is Strategy.ZERO3
        calls, notes = (_zero_3 if stage_3 else _zero_1_and_2)(training, training.settings, layout)
    else:
        calls, notes = _fsdp(training, layout)
    return StepMessages(training=training.name, messages=_counted(calls), notes=(*notes, _SMALL_LEFT_OUT))


def messages_to_test(
    step: StepMessages, *, most: int, largest_bytes: int = _LARGEST_BYTES, multiple: int = 1
) -> tuple[Message, ...]:
    """The messages to measure for a step: the sizes of each collective, ascending, similar ones merged.

    The most frequent of similar sizes is kept. If there are too many, the message with the most bytes of each
    collective is kept, then the others with the most bytes.

    Args:
        step: what a step sends.
        most: maximum number of messages.
        largest_bytes: larger messages are measured at this size.
        multiple: in bytes; sizes are rounded up to it. Element size times workers makes every collective even.
    """
    times: dict[str, Counter[int]] = {}
    for one in step.messages:
        size = -(-min(one.size_bytes, largest_bytes) // multiple) * multiple
        times.setdefault(one.collective, Counter())[size] += one.times
    totals = {
        Message(collective=collective, size_bytes=size): size * count
        for collective, counts in times.items()
        for size, count in _merged(counts).items()
    }
    heaviest = sorted(totals, key=lambda message: totals[message], reverse=True)
    # The largest of each collective before the second of any: without one its time could not be estimated.
    firsts = list({message.collective: message for message in reversed(heaviest)}.values())
    kept = sorted(heaviest, key=lambda message: message not in firsts)[:most]
    order = list(times)
    return tuple(sorted(kept, key=lambda message: (order.index(message.collective), message.size_bytes)))


def estimate_step_us(step: StepMessages, time_of: Callable[[str, int], float | None]) -> float | None:
    """Communication time of one step without overlap, in us: the sum of the times of its calls.

    Args:
        step: what a step sends.
        time_of: time of a collective of this many bytes, in us; None if unknown.

    Returns:
        None if the time of a message is unknown.
    """
    total_us = 0.0
    for one in step.messages:
        time_us = time_of(one.collective, one.size_bytes)
        if time_us is None:
            return None
        total_us += one.times * time_us
    return total_us


def _counted(calls: Iterable[_Calls]) -> tuple[StepMessage, ...]:
    counts: Counter[tuple[str, int, str, bool]] = Counter()
    for one in calls:
        for elements in one.elements:
            counts[one.collective, elements * one.width, one.what, one.hideable] += one.times
    return tuple(
        StepMessage(collective=collective, size_bytes=size, times=times, what=what, hideable=hideable)
        for (collective, size, what, hideable), times in counts.items()
        if size and times
    )


def _ddp(job: LlamaFactoryJob, training: Training) -> _Sent:
    """Torch's DDP: all-reduces its buckets once per step, after the last micro-batch.

    It rebuilds them after the first iteration in the order in which gradients arrive. If it looks for unused
    parameters, it keeps its first buckets: the modules' order, filled from the front.
    """
    config, width = job.config, training.load.gradient_bytes
    cap_mib = config.get("ddp_bucket_cap_mb") or _CAP_MIB
    if type(cap_mib) is not int or cap_mib < 1:
        raise JobError(
            f"{job.config_path}: ddp_bucket_cap_mb: {cap_mib!r} is not a size in MiB", hint="--set ddp_bucket_cap_mb=25"
        )
    caps = [cap_mib * MIB] if cap_mib != _CAP_MIB else [_FIRST_CAP_BYTES, _CAP_MIB * MIB]
    finds_unused = config.get("ddp_find_unused_parameters")
    if not isinstance(finds_unused, bool):
        # As transformers decides: not with gradient checkpointing. LLaMA-Factory turns it off for LoRA.
        finds_unused = not training.lora and config.get("disable_gradient_checkpointing") is True
    rebuilt = not finds_unused or config.get("ddp_static_graph") is True
    order = (arriving if rebuilt else registered)(training.shape, training.adapter)
    sizes = fill_past((one * width for one in _elements(order)), caps)
    return [_Calls("all_reduce", "gradient buckets", sizes if rebuilt else sizes[::-1], 1)], ()


def _zero_0(training: Training) -> _Sent:
    """DeepSpeed without ZeRO: the engine's own buckets of 5e8 elements, in the modules' order."""
    elements = _elements(registered(training.shape, training.adapter))
    buckets = fill_past(elements, [DeepSpeedConfig().reduce_bucket_elements or 0])
    return [_Calls("all_reduce", "gradient buckets", buckets, training.load.gradient_bytes)], ()


def _zero_1_and_2(training: Training, settings: DeepSpeedConfig, layout: Layout) -> _Sent:
    """DeepSpeed all-reduces buckets of gradients and gathers each group of updated parameters in one call.

    Stage 2 does so in every micro-batch, as gradients arrive. Stage 1 does so once, group by group, unless
    overlap_comm makes it act on arrival, too. `allgather_bucket_size` has no effect with backends that gather into
    one
    tensor, such as gloo and NCCL.
    """
    load, stage_1 = training.load, training.strategy is Strategy.ZERO1
    every = registered(training.shape, training.adapter)
    # The optimizer's groups: with weight decay and without (biases and normalizations, in transformers).
    groups = [_elements(one for one in every if one.matrix is matrix) for matrix in (True, False)]
    order = _elements(arriving(training.shape, training.adapter))
    if stage_1 and not settings.overlap_comm:
        order = [*groups[0], *groups[1]]
    cap = _reduce_cap(training, settings)
    reduce = "all_reduce" if settings.multi_rank_allreduce else "broadcast"
    times = 1 if stage_1 else load.accumulation
    gathered = [_padded(sum(group), _ALIGNMENT * layout.workers) for group in groups]
    notes: tuple[str, ...] = () if settings.multi_rank_allreduce else (_REDUCED_TO_OWNERS,)
    if any(one > cap for one in order):
        alone = f"a gradient of more than reduce_bucket_size ({cap} elements) is sent alone"
        notes = (*notes, f"{alone}; if two workers own it, DeepSpeed splits it, which is not counted")
    return [
        _Calls(reduce, "gradient buckets", fill_up_to(order, cap), load.gradient_bytes, times),
        _Calls("all_gather", "updated parameters", gathered, load.parameter_bytes, hideable=False),
    ], notes


def _zero_3(training: Training, settings: DeepSpeedConfig, layout: Layout) -> _Sent:
    """DeepSpeed gathers parameters before use, reduce-scatters gradients, and keeps small parameters whole."""
    load, shape, n = training.load, training.shape, layout.workers
    # transformers' values for `auto`.
    small = _known(settings.persistent_elements, 10 * shape.hidden)
    prefetch = _known(settings.prefetch_elements, 9 * shape.hidden**2 // 10)
    parameters = _elements((*registered(shape, None), *(registered(shape, training.adapter) if training.lora else ())))
    large, kept = ([_padded(one, n) for one in parameters if (one > small) is large] for large in (True, False))
    whole, again = zero_3_gathers(settings, shape, recompute=training.recompute)
    cut = next((at for at in range(len(large)) if sum(large[at:]) <= whole), len(large))
    # A tied embedding that is released is gathered for the output layer, too.
    tied = large[:1] if shape.tied and cut else []
    passes = [(large[:cut], again), (large[cut:], 1), (tied, 1)]
    trained = [_padded(one, n) for one in _elements(arriving(shape, training.adapter))]
    buckets = fill_up_to(trained, _reduce_cap(training, settings))
    times, width = load.accumulation, load.parameter_bytes
    return [
        *(
            _Calls("all_gather", "parameters before their use", fill_past(part, [prefetch]), width, often * times)
            for part, often in passes
        ),
        _Calls("reduce_scatter", "gradient buckets", buckets, load.gradient_bytes, times),
        _Calls("all_gather", "small parameters after the step", kept, width, hideable=False),
    ], (_FILLED, *([_STAY_WHOLE] if cut < len(large) else []))


def _fsdp(training: Training, layout: Layout) -> _Sent:
    """Each layer is a unit; everything outside the layers is another."""
    hybrid = training.strategy is Strategy.HYBRID_SHARD
    load, layers = training.load, training.shape.layers
    ranks = layout.workers_per_node if hybrid else layout.workers
    trained = _unit(training.shape, training.adapter)
    base = _unit(training.shape, None) if training.lora else (0, 0)
    outer, layer = (_padded(one + other, ranks) for one, other in zip(base, trained, strict=True))
    gradients = [_padded(one, ranks) for one in (*[trained[1]] * layers, trained[0])]
    sharded = step_exchanges(training.strategy, load, layout)
    reductions = round(sharded[1].times)
    if hybrid:
        shares = [one // ranks for one in gradients]
        across = _Calls("all_reduce", "shares of gradients", shares, load.gradient_bytes, reductions)
        return [across], (_WRAPS_LAYERS, _INSIDE_LEFT_OUT)
    whole = training.strategy is Strategy.SHARD_GRAD_OP
    times = 1 if whole else 3 if training.around else 2
    gathered = [*[outer] * (1 if whole or load.fsdp_version == 1 else 2), *[layer] * layers * times]
    # Micro-batches: under no_sync, version 1 keeps the parameters that stay whole.
    micro_batches = round(sharded[0].times) if whole else load.accumulation
    return [
        _Calls("all_gather", "parameters of a layer", gathered, load.parameter_bytes, micro_batches),
        _Calls("reduce_scatter", "gradients of a layer", gradients, load.gradient_bytes, reductions),
    ], (_WRAPS_LAYERS,)


def _unit(shape: ModelShape, adapter: Adapter | None) -> tuple[int, int]:
    first, last = _outer_gradients(shape, adapter)
    return sum(_elements((*first, *last))), sum(_elements(_layer_gradients(shape, adapter)))


def _elements(gradients: Iterable[Gradient]) -> list[int]:
    return [one.elements for one in gradients]


def _reduce_cap(training: Training, settings: DeepSpeedConfig) -> int:
    return _known(settings.reduce_bucket_elements, training.shape.hidden**2)


def _known(fixed: int | None, automatic: int) -> int:
    return automatic if fixed is None else fixed


def _padded(elements: int, multiple: int) -> int:
    return -(-elements // multiple) * multiple


def _merged(counts: Counter[int]) -> Counter[int]:
    merged: Counter[int] = Counter()
    for size, count in sorted(counts.items(), key=lambda each: (each[1], each[0]), reverse=True):
        merged[_alike(size, merged)] += count
    return merged


def _alike(size: int, others: Iterable[int]) -> int:
    return next((other for other in others if abs(other - size) < _ALIKE * max(other, size)), size)


def registered(shape: ModelShape, adapter: Adapter | None) -> tuple[Gradient, ...]:
    """All gradients in the order in which the modules register their parameters."""
    first, last = _outer_gradients(shape, adapter)
    return (*first, *(_layer_gradients(shape, adapter) * shape.layers), *last)


def arriving(shape: ModelShape, adapter: Adapter | None) -> tuple[Gradient, ...]:
    """All gradients in the order of the backward pass: the forward pass reversed.

    A tied embedding, which the output layer also uses, is complete at its first use, so it comes last.
    """
    first, last = _outer_gradients(shape, adapter)
    used = (*first, *(_used_in_layer(shape, adapter) * shape.layers), *last)
    return used[::-1]


def _layer_gradients(shape: ModelShape, adapter: Adapter | None) -> tuple[Gradient, ...]:
    names = _trained(shape.linears, adapter)
    linears = [one for name in names for one in _linear_gradients(shape, name, adapter)]
    return (*linears, *_norms(shape, adapter))


def _outer_gradients(shape: ModelShape, adapter: Adapter | None) -> tuple[tuple[Gradient, ...], tuple[Gradient, ...]]:
    table = shape.vocabulary * shape.hidden
    if adapter is None:
        head = () if shape.tied else (Gradient(table),)
        return (Gradient(table),), (Gradient(shape.hidden, matrix=False), *head)
    ends = (Gradient(adapter.rank * shape.vocabulary), Gradient(adapter.rank * shape.hidden))
    before = ends if _EMBEDDING in adapter.targets else ()
    # An adapter applies A first, which has the width of the inputs.
    return before, ends[::-1] if _HEAD in adapter.targets else ()


def fill_past(elements: Iterable[int], caps: Sequence[int]) -> tuple[int, ...]:
    """Buckets of torch's DDP: tensors are added until a bucket reaches its cap, so the last one may exceed it.

    Args:
        elements: of the tensors, in order.
        caps: of the first bucket, the second, ...; the last one applies to all that follow.
    """
    buckets = [0]
    for one in elements:
        if buckets[-1] >= caps[min(len(buckets), len(caps)) - 1]:
            buckets.append(0)
        buckets[-1] += one
    return tuple(filter(None, buckets))


def fill_up_to(elements: Iterable[int], cap: int) -> tuple[int, ...]:
    """Buckets of DeepSpeed: sent before a tensor that would not fit; a tensor above the cap is sent alone."""
    buckets = [0]
    for one in elements:
        if buckets[-1] and buckets[-1] + one > cap:
            buckets.append(0)
        buckets[-1] += one
    return tuple(filter(None, buckets))


def _used_in_layer(shape: ModelShape, adapter: Adapter | None) -> tuple[Gradient, ...]:
    norms = _norms(shape, adapter)
    names = _trained(shape.linears, adapter)
    cut = names.index("gate_proj") if "gate_proj" in names else len(names)
    attention, mlp = (
        [one for name in part for one in _linear_gradients(shape, name, adapter)] for part in (names[:cut], names[cut:])
    )
    return (*norms[:-1], *attention, *norms[-1:], *mlp)


def _trained(names: Iterable[str], adapter: Adapter | None) -> list[str]:
    everything = adapter is None or adapter.targets == ("all",)
    return [name for name in names if everything or name in (adapter.targets if adapter else ())]


def _linear_gradients(shape: ModelShape, name: str, adapter: Adapter | None) -> Iterator[Gradient]:
    linear = shape.linears[name]
    if adapter is not None:
        yield Gradient(adapter.rank * linear.inputs)
        yield Gradient(adapter.rank * linear.outputs)
        return
    yield Gradient(linear.inputs * linear.outputs)
    if linear.bias:
        yield Gradient(linear.outputs, matrix=False)


def _norms(shape: ModelShape, adapter: Adapter | None) -> tuple[Gradient, ...]:
    if adapter is not None:
        return ()
    # Two of the residual stream's width: the rest is queries and keys, half each.
    head = (shape.norms_a_layer - 2 * shape.hidden) // 2
    sizes = [*([head, head] if head else []), shape.hidden, shape.hidden]
    return tuple(Gradient(size, matrix=False) for size in sizes)


SMALL_BYTES = 1 << 10
"""Smaller calls carry a loss, a count or a flag, and take one round trip at any bandwidth."""
_REDUCTIONS = frozenset({"all_reduce", "reduce_scatter", "broadcast"})
_GATHERS_BEFORE_USE = frozenset({Strategy.ZERO3, Strategy.FSDP, Strategy.SHARD_GRAD_OP, Strategy.HYBRID_SHARD})


class StepCall(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one collective and size."""

    collective: str  # one of records.benchmark's COLLECTIVES
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
