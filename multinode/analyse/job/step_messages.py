"""StepMessages: the collectives of one optimizer step with the sizes that go out as single calls.

`traffic` says what a strategy moves in all; here it is cut as torch and DeepSpeed cut it. What a call takes is measured
elsewhere; whether it hides behind the computation is not decided here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from multinode.analyse.collectives.traffic import Layout, Strategy
from multinode.analyse.job.gradients import (
    Gradient,
    arriving,
    fill_past,
    fill_up_to,
    layer_gradients,
    outer_gradients,
    registered,
)
from multinode.analyse.job.model_size import ModelShape
from multinode.analyse.job.training import Adapter, Training, read_training
from multinode.core.job.deepspeed import DeepSpeedConfig
from multinode.core.job.job import Job, LlamaFactoryJob
from multinode.errors import JobError

__all__ = ["StepMessage", "StepMessages", "step_messages"]

_MIB = 1 << 20
# torch's DDP: the first bucket is smaller than the others, unless somebody sets their cap.
_FIRST_CAP_BYTES = _MIB
_CAP_MIB = 25
# DeepSpeed pads a group of parameters to a multiple of so many elements for each worker.
_ALIGNMENT = 2

_REDUCED_TO_OWNERS = (
    "DeepSpeed reduces each bucket to the workers that own it (use_multi_rank_bucket_allreduce: false); nccl-test has "
    "no reduce, and measures a broadcast of the bucket, which is a reduce turned round"
)
_CUT_AT_OWNERS = (
    "a gradient of more than reduce_bucket_size ({cap} elements) is sent alone; where it belongs to two workers, "
    "DeepSpeed cuts it there, which is not counted"
)
_FILLED = (
    "which parameters ZeRO-3 gathers together depends on its trace of the model: approximated by filling "
    "stage3_prefetch_bucket_size in the modules' order"
)
_STAY_WHOLE = "the parameters stay whole from the forward to the backward pass (stage3_max_live_parameters)"
_GATHERED_TWICE = "all parameters are taken to be gathered twice, although some stay whole for the backward pass"
_WRAPS_LAYERS = "FSDP is taken to wrap each decoder layer, and what is outside of them to be gathered once"
_INSIDE_LEFT_OUT = (
    "what stays inside a node is left out; the all-reduce between the nodes joins one worker of each node, and is "
    "measured with all workers"
)
_LEFT_OUT = (
    "calls of a few bytes (gradient norms, losses) are left out: each takes about what the smallest message does"
)


class StepMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one kind and size.

    Attributes:
        collective: one of core.collective_test's COLLECTIVES.
        size_bytes: S as nccl-tests counts it.
        times: how many of them a step makes.
        what: what they carry, in a few words.
    """

    collective: str
    size_bytes: int
    times: int
    what: str


class StepMessages(msgspec.Struct, frozen=True, kw_only=True):
    """What one optimizer step sends between the nodes.

    Attributes:
        messages: its calls, in the order in which their kinds first go out.
        notes: where the truth is known to differ from them, a sentence each.
    """

    training: str
    messages: tuple[StepMessage, ...]
    notes: tuple[str, ...] = ()


class _Calls(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one collective: their sizes, each made `times` times a step."""

    collective: str
    sizes_bytes: tuple[int, ...]
    what: str
    times: int = 1


def step_messages(job: Job, model: Mapping[str, Any] | None, layout: Layout) -> StepMessages:
    """The calls of one optimizer step of a job, which do not depend on the backend.

    Args:
        job: the job.
        model: the model's config.json; None where nobody could read it.
        layout: the workers.

    Raises:
        JobError: what the job sends is not known.
    """
    if not isinstance(job, LlamaFactoryJob):
        raise JobError(
            "the messages of a script are not known before it runs",
            hint="name a LLaMA-Factory YAML: multinode nccl-test --like sft.yaml",
        )
    training = read_training(job, model)
    if training.strategy is Strategy.DDP:
        calls, notes = _ddp(job, training) if training.settings is None else _zero_0(training)
    elif training.settings is not None:
        stage_3 = training.strategy is Strategy.ZERO3
        calls, notes = (_zero_3 if stage_3 else _zero_1_and_2)(training, training.settings, layout)
    else:
        calls, notes = _fsdp(training, layout)
    return StepMessages(training=training.name, messages=_counted(calls), notes=(*notes, _LEFT_OUT))


def _counted(calls: Iterable[_Calls]) -> tuple[StepMessage, ...]:
    """Calls of one kind and size together."""
    counts: Counter[tuple[str, int, str]] = Counter()
    for one in calls:
        for size in one.sizes_bytes:
            counts[one.collective, size, one.what] += one.times
    return tuple(
        StepMessage(collective=collective, size_bytes=size, times=times, what=what)
        for (collective, size, what), times in counts.items()
        if size and times
    )


def _ddp(job: LlamaFactoryJob, training: Training) -> tuple[list[_Calls], tuple[str, ...]]:
    """Torch's DDP: all-reduces its buckets once a step, after the last micro-batch.

    It rebuilds them after the first iteration in the order in which gradients arrive. Where it looks for unused
    parameters it never does: then they are those of its first guess, the modules' order cut from the front.
    """
    width = training.load.gradient_bytes
    cap_mib = job.config.get("ddp_bucket_cap_mb") or _CAP_MIB
    if type(cap_mib) is not int or cap_mib < 1:
        raise JobError(
            f"{job.config_path}: ddp_bucket_cap_mb: {cap_mib!r} is not a size in MiB", hint="--set ddp_bucket_cap_mb=25"
        )
    caps = [cap_mib * _MIB] if cap_mib != _CAP_MIB else [_FIRST_CAP_BYTES, _CAP_MIB * _MIB]
    rebuilt = not _finds_unused(job, training) or job.config.get("ddp_static_graph") is True
    order = (arriving if rebuilt else registered)(training.shape, training.adapter)
    sizes = fill_past((one.elements * width for one in order), caps)
    calls = [_Calls(collective="all_reduce", sizes_bytes=sizes if rebuilt else sizes[::-1], what="gradient buckets")]
    return calls, ()


def _finds_unused(job: LlamaFactoryJob, training: Training) -> bool:
    """As transformers decides it: not with gradient checkpointing; LLaMA-Factory turns it off for LoRA."""
    said = job.config.get("ddp_find_unused_parameters")
    if isinstance(said, bool):
        return said
    return not training.lora and job.config.get("disable_gradient_checkpointing") is True


def _zero_0(training: Training) -> tuple[list[_Calls], tuple[str, ...]]:
    """DeepSpeed without ZeRO: the engine's own buckets of 5e8 elements, in the modules' order."""
    elements = [one.elements for one in registered(training.shape, training.adapter)]
    sizes = _bytes(fill_past(elements, [DeepSpeedConfig().reduce_bucket_elements or 0]), training.load.gradient_bytes)
    return [_Calls(collective="all_reduce", sizes_bytes=sizes, what="gradient buckets")], ()


def _zero_1_and_2(
    training: Training, settings: DeepSpeedConfig, layout: Layout
) -> tuple[list[_Calls], tuple[str, ...]]:
    """DeepSpeed all-reduces buckets of gradients, and gathers each group of updated parameters in one call.

    Stage 2 does so in every micro-batch, as gradients arrive; stage 1 once, a group after the other, unless
    overlap_comm has it act as they arrive too. `allgather_bucket_size` has no effect where the backend gathers into one
    tensor, which gloo and NCCL do.
    """
    load, hidden = training.load, training.shape.hidden
    groups = _groups(registered(training.shape, training.adapter))
    waits = training.strategy is Strategy.ZERO1 and not settings.overlap_comm
    order = [one for group in groups for one in group] if waits else arriving(training.shape, training.adapter)
    cap = _known(settings.reduce_bucket_elements, hidden * hidden)
    buckets = _bytes(fill_up_to((one.elements for one in order), cap), load.gradient_bytes)
    gathered = (_padded(sum(one.elements for one in group), _ALIGNMENT * layout.workers) for group in groups)
    reduced = _Calls(
        collective="all_reduce" if settings.multi_rank_allreduce else "broadcast",
        sizes_bytes=buckets,
        what="gradient buckets",
        times=1 if training.strategy is Strategy.ZERO1 else load.accumulation,
    )
    updated = _Calls(
        collective="all_gather",
        sizes_bytes=_bytes(gathered, load.parameter_bytes),
        what="updated parameters",
    )
    notes = [] if settings.multi_rank_allreduce else [_REDUCED_TO_OWNERS]
    if any(one.elements > cap for one in order):
        notes.append(_CUT_AT_OWNERS.format(cap=cap))
    return [reduced, updated], tuple(notes)


def _zero_3(training: Training, settings: DeepSpeedConfig, layout: Layout) -> tuple[list[_Calls], tuple[str, ...]]:
    """DeepSpeed gathers parameters before their use, reduce-scatters gradients, and keeps small parameters whole."""
    load, shape, n = training.load, training.shape, layout.workers
    hidden = shape.hidden
    # What transformers puts for `auto`.
    small = _known(settings.persistent_elements, 10 * hidden)
    prefetch = _known(settings.prefetch_elements, 9 * hidden * hidden // 10)
    parameters = [*registered(shape, None), *(registered(shape, training.adapter) if training.adapter else ())]
    large = [_padded(one.elements, n) for one in parameters if one.elements > small]
    kept = [_padded(one.elements, n) for one in parameters if one.elements <= small]
    trained = [one.elements for one in arriving(shape, training.adapter)]
    passes = 1 if sum(large) <= settings.live_elements else 2
    reduced = fill_up_to((_padded(one, n) for one in trained), _known(settings.reduce_bucket_elements, hidden * hidden))
    calls = [
        _Calls(
            collective="all_gather",
            sizes_bytes=_bytes(fill_past(large, [prefetch]), load.parameter_bytes),
            what="parameters before their use",
            times=passes * load.accumulation,
        ),
        _Calls(
            collective="reduce_scatter",
            sizes_bytes=_bytes(reduced, load.gradient_bytes),
            what="gradient buckets",
            times=load.accumulation,
        ),
        _Calls(
            collective="all_gather",
            sizes_bytes=_bytes(kept, load.parameter_bytes),
            what="small parameters after the step",
        ),
    ]
    return calls, (_FILLED, _STAY_WHOLE if passes == 1 else _GATHERED_TWICE)


def _fsdp(training: Training, layout: Layout) -> tuple[list[_Calls], tuple[str, ...]]:
    """FSDP: each layer is a unit, what is outside of the layers another, which stays whole until its backward pass."""
    hybrid = training.strategy is Strategy.HYBRID_SHARD
    load, per_node = training.load, layout.workers_per_node
    ranks = per_node if hybrid else layout.workers
    frozen, trained = _units(training)
    gathers = 1 if training.strategy is Strategy.SHARD_GRAD_OP else 2
    outer, layers = [_padded(frozen[0], ranks)], [_padded(frozen[1], ranks)] * training.shape.layers
    gradients = [_padded(one, ranks) for one in (*[trained[1]] * training.shape.layers, trained[0])]
    if hybrid:
        shares = _bytes((one // ranks for one in gradients), load.gradient_bytes)
        across = _Calls(collective="all_reduce", sizes_bytes=shares, what="shares of gradients")
        return [across], (_WRAPS_LAYERS, _INSIDE_LEFT_OUT)
    return [
        _Calls(
            collective="all_gather",
            sizes_bytes=_bytes((*outer, *layers * gathers), load.parameter_bytes),
            what="parameters of a layer",
            times=load.accumulation,
        ),
        _Calls(
            collective="reduce_scatter",
            sizes_bytes=_bytes(gradients, load.gradient_bytes),
            what="gradients of a layer",
            times=load.accumulation,
        ),
    ], (_WRAPS_LAYERS,)


def _units(training: Training) -> tuple[tuple[int, int], tuple[int, int]]:
    """Elements outside of the layers and in one of them: of all parameters, and of those that are trained."""
    shape, adapter = training.shape, training.adapter

    base, trained = _unit(shape, None), _unit(shape, adapter)
    return (base if adapter is None else (base[0] + trained[0], base[1] + trained[1])), trained


def _unit(shape: ModelShape, adapter: Adapter | None) -> tuple[int, int]:
    first, last = outer_gradients(shape, adapter)
    return _sum((*first, *last)), _sum(layer_gradients(shape, adapter))


def _sum(gradients: Iterable[Gradient]) -> int:
    return sum(one.elements for one in gradients)


def _groups(gradients: Iterable[Gradient]) -> list[list[Gradient]]:
    """The optimizer's: with weight decay, and without (transformers leaves biases and normalisations out of it)."""
    every = list(gradients)
    groups = [[one for one in every if one.matrix], [one for one in every if not one.matrix]]
    return [group for group in groups if group]


def _known(fixed: int | None, automatic: int) -> int:
    return automatic if fixed is None else fixed


def _padded(elements: int, multiple: int) -> int:
    return -(-elements // multiple) * multiple


def _bytes(elements: Iterable[int], width: int) -> tuple[int, ...]:
    return tuple(one * width for one in elements)
