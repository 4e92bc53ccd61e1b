"""The collective calls of a step of a LLaMA-Factory job as its engine makes them: buckets of DDP, gathers of ZeRO.

Where the job and its model are known, these count; otherwise those of the strategy alone (`step_calls`). The rules of
torch's DDP and FSDP and of DeepSpeed come from their sources and were compared with recorded runs: which tensors have
gradients, in which order, and in which buckets they are sent. How long a call takes is measured elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from multinode.errors import JobError
from multinode.findings.finding import Finding
from multinode.findings.rule import RuleGroup
from multinode.job.deepspeed import DeepSpeedConfig
from multinode.job.job import TrainingJob, set_options
from multinode.job.settings import is_true
from multinode.model.tensors import Tensor
from multinode.model.training import ShardedTraining, read_training, zero_3_gathers
from multinode.records.benchmark import Message
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Call, GroupScope, Strategy
from multinode.units import MIB

# DDP's first bucket is smaller unless the user sets the cap.
_FIRST_CAP_BYTES = MIB
_CAP_MIB = 25
# What ZeRO++ sends.
_INT8_BYTES, _INT4_BYTES = 1, 0.5
# DeepSpeed pads a parameter group to a multiple of this many elements per worker.
_ALIGNMENT = 2

# Smaller differences in size do not show in a measurement.
_ALIKE = 0.05
# Above this the bandwidth no longer changes, and the buffers of a test take too much memory.
_LARGEST_BYTES = 1 << 30

DIFFERENCES = RuleGroup("Differences between the measured messages and the real training")
_REDUCED_TO_OWNERS = DIFFERENCES.rule(
    "broadcast-for-reduce",
    about="DeepSpeed reduces each bucket only to the workers that own it",
    message="DeepSpeed reduces each bucket to the workers that own it (use_multi_rank_bucket_allreduce: false). "
    "nccl-test has no reduce, so it measures a broadcast of the bucket, which is the reverse of a reduce",
)
_SENT_ALONE = DIFFERENCES.rule(
    "large-gradient",
    about="a gradient that is larger than DeepSpeed's buckets",
    message="a gradient that is larger than reduce_bucket_size ({elements} elements) is sent alone. If two workers own "
    "it, DeepSpeed splits it; multinode ignores this split",
    figures=("elements",),
)
_FILLED = DIFFERENCES.rule(
    "gathered-together",
    about="the parameters that ZeRO-3 gathers together",
    message="DeepSpeed uses its trace of the model to decide which parameters ZeRO-3 gathers together. multinode "
    "approximates this by filling stage3_prefetch_bucket_size in module order",
)
_STAY_WHOLE = DIFFERENCES.rule(
    "reused-soon",
    about="parameters that ZeRO-3 does not release",
    message="parameters that are reused soon stay gathered for the backward pass (stage3_max_reuse_distance)",
)
_SCALES = DIFFERENCES.rule(
    "scales",
    about="quantized weights or gradients",
    message="the scales of quantized values are excluded (one number for several thousand values)",
)
_WRAPS_LAYERS = DIFFERENCES.rule(
    "wrapped-layers",
    about="the units of FSDP",
    message="multinode assumes that FSDP wraps each decoder layer and reduces gradients only in the last micro-batch, "
    "as with the Trainer",
)
_INSIDE_LEFT_OUT = DIFFERENCES.rule(
    "traffic-inside-nodes",
    about="a strategy that also communicates inside nodes",
    message="traffic inside a node is excluded. In training, one worker per node takes part in an all-reduce between "
    "nodes; nccl-test measures it with all workers",
)
_SMALL_LEFT_OUT = DIFFERENCES.rule(
    "small-calls",
    about="calls of a few bytes",
    message="calls of a few bytes (gradient norms, losses) are excluded: each takes about as long as the smallest "
    "message",
)


class StepMessages(msgspec.Struct, frozen=True, kw_only=True):
    """What one optimizer step sends between the nodes."""

    training: str
    messages: tuple[Call, ...]  # its calls per step, ordered by when their kind first appears
    notes: tuple[Finding, ...] = ()  # known differences from the real training


_Sent = tuple[list[Call], tuple[Finding, ...]]


def step_messages(
    job: TrainingJob, model: Mapping[str, Any] | None, layout: Layout, transformers: str | None = None
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
    training = read_training(job, model, transformers)
    calls, notes = engine_calls(job, training, layout)
    between = [call for call in calls if call.reach is not GroupScope.NODE]
    per_step = [
        msgspec.structs.replace(call, times=round(call.times_in(training.accumulation)), per_micro_batch=False)
        for call in between
    ]
    if len(between) < len(calls):
        notes = (*notes, _INSIDE_LEFT_OUT.found(None))
    notes = (*notes, _SMALL_LEFT_OUT.found(None))
    return StepMessages(training=training.name, messages=tuple(per_step), notes=notes)


def engine_calls(job: TrainingJob, training: ShardedTraining, layout: Layout) -> _Sent:
    """The calls of a step as the engine of a job makes them, and their known differences from the real training."""
    if training.strategy is Strategy.DDP:
        calls, notes = _ddp(job, training) if training.settings is None else _zero_0(training)
    elif training.settings is not None:
        zero = _zero_3 if training.strategy.gathers else _zero_1_and_2
        calls, notes = zero(training, training.settings, layout)
    else:
        calls, notes = _fsdp(training, layout)
    return calls, notes


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
    for step_message in step.messages:
        size = -(-min(round(step_message.size_bytes), largest_bytes) // multiple) * multiple
        times.setdefault(step_message.collective, Counter())[size] += round(step_message.times)
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


def estimate_step_us(step: StepMessages, time_of: Callable[[str, float], float | None]) -> float | None:
    """Communication time of one step without overlap, in us: the sum of the times of its calls.

    Args:
        step: what a step sends.
        time_of: time of a collective of this many bytes, in us; None if unknown.

    Returns:
        None if the time of a message is unknown.
    """
    total_us = 0.0
    for message in step.messages:
        time_us = time_of(message.collective, message.size_bytes)
        if time_us is None:
            return None
        total_us += message.times * time_us
    return total_us


def _calls(kind: Call, elements: Iterable[int]) -> list[Call]:
    """A call of this kind, whose size is that of an element, for each number of elements."""
    return [
        msgspec.structs.replace(kind, size_bytes=number * kind.size_bytes, times=count * kind.times)
        for number, count in Counter(elements).items()
        if number
    ]


def _ddp(job: TrainingJob, training: ShardedTraining) -> _Sent:
    """Torch's DDP: all-reduces its buckets once per step, after the last micro-batch.

    It rebuilds them after the first iteration in the order in which gradients arrive. If it looks for unused
    parameters, it keeps its first buckets: the modules' order, filled from the front.
    """
    config, width = job.arguments, training.load.gradient_bytes
    cap_mib = config.get("ddp_bucket_cap_mb") or _CAP_MIB
    if type(cap_mib) is not int or cap_mib < 1:
        raise JobError(
            f"{job.config_path}: ddp_bucket_cap_mb: {cap_mib!r} is not a size in MiB",
            hint=set_options(job, ddp_bucket_cap_mb=_CAP_MIB),
        )
    caps = [cap_mib * MIB] if cap_mib != _CAP_MIB else [_FIRST_CAP_BYTES, _CAP_MIB * MIB]
    finds_unused = config.get("ddp_find_unused_parameters")
    if not isinstance(finds_unused, bool):
        # As transformers decides: not with gradient checkpointing. LLaMA-Factory turns it off for LoRA.
        finds_unused = not training.lora and is_true(config.get("disable_gradient_checkpointing"))
    rebuilt = not finds_unused or is_true(config.get("ddp_static_graph"))
    order = training.tensors.arriving if rebuilt else training.tensors.trained
    sizes = fill_past((element * width for element in _elements(order)), caps)
    bucket = Call(collective="all_reduce", size_bytes=1, what="gradient buckets")
    return _calls(bucket, sizes if rebuilt else sizes[::-1]), ()


def _zero_0(training: ShardedTraining) -> _Sent:
    """DeepSpeed without ZeRO: the engine's own buckets of 5e8 elements, in the modules' order."""
    elements = _elements(training.tensors.trained)
    buckets = fill_past(elements, [DeepSpeedConfig().reduce_bucket_elements or 0])
    bucket = Call(collective="all_reduce", size_bytes=training.load.gradient_bytes, what="gradient buckets")
    return _calls(bucket, buckets), ()


def _zero_1_and_2(training: ShardedTraining, settings: DeepSpeedConfig, layout: Layout) -> _Sent:
    """DeepSpeed all-reduces buckets of gradients and gathers each group of updated parameters in one call.

    Stage 2 does so in every micro-batch, as gradients arrive. Stage 1 does so once, group by group, unless overlap_comm
    makes it act on arrival, too. `allgather_bucket_size` has no effect with backends that gather into one tensor, such
    as gloo and NCCL.
    """
    load, stage_1 = training.load, training.strategy is Strategy.ZERO1
    every = training.tensors.trained
    # The optimizer's groups: with weight decay and without (biases and normalizations, in transformers).
    groups = [_elements(gather for gather in every if gather.matrix is matrix) for matrix in (True, False)]
    order = _elements(training.tensors.arriving)
    if stage_1 and not settings.overlap_comm:
        order = [*groups[0], *groups[1]]
    cap = _reduce_cap(training, settings)
    bucket = Call(
        collective="all_reduce" if settings.multi_rank_allreduce else "broadcast",
        size_bytes=load.gradient_bytes,
        per_micro_batch=not stage_1,
        what="gradient buckets",
    )
    updated = Call(collective="all_gather", size_bytes=load.parameter_bytes, hideable=False, what="updated parameters")
    gathered = [_padded(sum(group), _ALIGNMENT * layout.workers) for group in groups]
    notes: tuple[Finding, ...] = () if settings.multi_rank_allreduce else (_REDUCED_TO_OWNERS.found(None),)
    if any(size > cap for size in order):
        notes = (*notes, _SENT_ALONE.found(None, elements=cap))
    return [*_calls(bucket, fill_up_to(order, cap)), *_calls(updated, gathered)], notes


def _zero_3(training: ShardedTraining, settings: DeepSpeedConfig, layout: Layout) -> _Sent:
    """DeepSpeed gathers parameters before use, reduce-scatters gradients, and keeps small parameters whole."""
    load, model, n = training.load, training.tensors, layout.workers
    # transformers' values for `auto`.
    small = _known(settings.persistent_elements, 10 * model.hidden)
    prefetch = _known(settings.prefetch_elements, 9 * model.hidden**2 // 10)
    parameters = _elements((*model.base, *(model.trained if training.lora else ())))
    large, kept = (
        [_padded(parameter, n) for parameter in parameters if (parameter > small) is large] for large in (True, False)
    )
    whole, again = zero_3_gathers(settings, model, recompute=training.recompute)
    cut = next((at for at in range(len(large)) if sum(large[at:]) <= whole), len(large))
    # A tied embedding that is released is gathered for the output layer, too.
    tied = large[:1] if model.tied and cut else []
    gathered = [
        elements
        for part, passes in ((large[:cut], again), (large[cut:], 1), (tied, 1))
        for elements in fill_past(part, [prefetch]) * passes
    ]
    gather = Call(
        collective="all_gather",
        size_bytes=_INT8_BYTES if settings.quantized_weights else load.parameter_bytes,
        per_micro_batch=True,
        what="parameters before their use",
    )
    gathers = _calls(gather, gathered)
    if training.strategy is Strategy.ZERO3_HPZ:
        fresh = [_padded(element, n) for element in _elements(model.trained) if element > small]
        once = fill_past(fresh, [prefetch])
        gathers = _kept_in_node(gather, gathered, once, training.accumulation)
    after = Call(
        collective="all_gather",
        size_bytes=load.parameter_bytes,
        hideable=False,
        what="small parameters after the step",
    )
    notes = (_FILLED.found(None), *([_STAY_WHOLE.found(None)] if cut < len(large) else []))
    if settings.quantized_weights or settings.quantized_gradients:
        notes = (*notes, _SCALES.found(None))
    return [*gathers, *_zero_3_gradients(training, settings, layout), *_calls(after, kept)], notes


def _kept_in_node(gather: Call, gathered: Iterable[int], once: Iterable[int], accumulation: int) -> list[Call]:
    """Gathers of ZeRO-3 hpZ.

    Args:
        gather: of one element.
        gathered: elements of all gathers of a micro-batch.
        once: elements of those that cross the nodes, in the first micro-batch of a step.
        accumulation: micro-batches of a step.
    """
    inside = msgspec.structs.replace(gather, reach=GroupScope.NODE)
    counts: dict[int, float] = dict(Counter(gathered))
    for elements in once:
        # A first gather that is filled in other company is still one of that many elements.
        nearest = min(counts, key=lambda size: abs(size - elements))
        counts[nearest] -= 1 / accumulation
    across = msgspec.structs.replace(gather, per_micro_batch=False, what="trained parameters, once per step")
    return [
        *_calls(across, once),
        *(
            msgspec.structs.replace(inside, size_bytes=size * inside.size_bytes, times=count)
            for size, count in counts.items()
            if count > 0
        ),
    ]


def _zero_3_gradients(training: ShardedTraining, settings: DeepSpeedConfig, layout: Layout) -> list[Call]:
    """DeepSpeed reduce-scatters buckets; with qgZ each matrix by itself, in int4, inside the nodes and then between."""
    model, n = training.tensors, layout.workers
    bucket = Call(
        collective="reduce_scatter",
        size_bytes=training.load.gradient_bytes,
        per_micro_batch=True,
        what="gradient buckets",
    )
    if not settings.quantized_gradients:
        trained = [_padded(element, n) for element in _elements(model.arriving)]
        return _calls(bucket, fill_up_to(trained, _reduce_cap(training, settings)))
    narrow = [tensor.matrix and tensor.elements % (2 * n) == 0 for tensor in model.arriving]
    kinds: list[list[int]] = [[], []]
    for tensor, is_narrow in zip(model.arriving, narrow, strict=True):
        kinds[is_narrow].append(tensor.elements)
    exchange = msgspec.structs.replace(
        bucket, collective="all_to_all", size_bytes=_INT4_BYTES, reach=GroupScope.NODE, what="gradients in int4"
    )
    between = msgspec.structs.replace(
        exchange, size_bytes=_INT4_BYTES / layout.workers_per_node, reach=GroupScope.ACROSS
    )
    whole, matrices = kinds
    return [
        *_calls(bucket, [_padded(elements, n) for elements in whole]),
        *_calls(exchange, matrices),
        *_calls(between, matrices),
    ]


def _fsdp(training: ShardedTraining, layout: Layout) -> _Sent:
    """Each layer is a unit; everything outside the layers is another."""
    hybrid = training.strategy is Strategy.HYBRID_SHARD
    load, model, strategy = training.load, training.tensors, training.strategy
    ranks = layout.workers_per_node if hybrid else layout.workers
    outer, layers = _padded(model.outside.all, ranks), [_padded(layer.all, ranks) for layer in model.layers]
    gradients = [_padded(layer.trained, ranks) for layer in (*model.layers, model.outside)]
    whole = strategy is Strategy.SHARD_GRAD_OP
    passes = 1 if whole else 3 if training.around else 2
    gathered = [*[outer] * (1 if whole or load.fsdp_version == 1 else 2), *layers * passes]
    reach = GroupScope.NODE if hybrid else GroupScope.WORLD
    gather = Call(
        collective="all_gather",
        size_bytes=load.parameter_bytes,
        per_micro_batch=load.gathers_often(strategy),
        reach=reach,
        what="parameters of a layer",
    )
    reduction = Call(
        collective="reduce_scatter",
        size_bytes=load.gradient_bytes,
        per_micro_batch=load.reduces_often(strategy),
        reach=reach,
        what="gradients of a layer",
    )
    across = msgspec.structs.replace(
        reduction, collective="all_reduce", reach=GroupScope.ACROSS, what="shares of gradients"
    )
    shares = [gradient // ranks for gradient in gradients] if hybrid else []
    return [*_calls(gather, gathered), *_calls(reduction, gradients), *_calls(across, shares)], (
        _WRAPS_LAYERS.found(None),
    )


def _elements(tensors: Iterable[Tensor]) -> list[int]:
    return [tensor.elements for tensor in tensors]


def _reduce_cap(training: ShardedTraining, settings: DeepSpeedConfig) -> int:
    return _known(settings.reduce_bucket_elements, training.tensors.hidden**2)


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


def fill_past(elements: Iterable[int], caps: Sequence[int]) -> tuple[int, ...]:
    """Buckets of torch's DDP: tensors are added until a bucket reaches its cap, so the last one may exceed it.

    Args:
        elements: of the tensors, in order.
        caps: of the first bucket, the second, ...; the last one applies to all that follow.
    """
    buckets = [0]
    for element in elements:
        if buckets[-1] >= caps[min(len(buckets), len(caps)) - 1]:
            buckets.append(0)
        buckets[-1] += element
    return tuple(filter(None, buckets))


def fill_up_to(elements: Iterable[int], cap: int) -> tuple[int, ...]:
    """Buckets of DeepSpeed: sent before a tensor that would not fit; a tensor above the cap is sent alone."""
    buckets = [0]
    for element in elements:
        if buckets[-1] and buckets[-1] + element > cap:
            buckets.append(0)
        buckets[-1] += element
    return tuple(filter(None, buckets))
