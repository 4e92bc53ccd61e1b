"""Options of a training's own settings: how gradients travel, accumulation, batch, overlap, buckets, LoRA. Pure.

What shares the model out is `strategy_options`, what concerns nodes and links `cluster_options`. Judges no gain.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from multinode.analyse.advice.training_state import Change, TrainingState, TuningOption, batch_edits, sample_bytes
from multinode.analyse.collectives.traffic import Strategy
from multinode.analyse.prediction.variants import vary
from multinode.errors import UsageError

__all__ = ["setting_options"]

_BYTES_PER_GIB = 1 << 30
_MIB = 1 << 20
_FP32_BYTES, _HALF_BYTES = 4, 2
_MULTIPLES = (2, 4, 8)
_REDUCED_ONCE = frozenset({Strategy.DDP, Strategy.ZERO1})
_DEEPSPEED = frozenset({Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3})
_ROUNDED = {
    "fp16": "gradients are rounded to 11 bits; one above 65504 overflows",
    "bf16": "gradients are rounded to 8 bits",
}
# Casting to half and back takes time that nothing has measured.
_CAST_DOUBT = 0.05
# torch's DDP fills buckets of 25 MiB; four times that is where a slow network no longer feels the number of messages.
_LARGE_BUCKET_MIB = 100
_FEW_CALLS = 2
_LORA_RANK = 8
_replace = msgspec.structs.replace


def setting_options(state: TrainingState) -> Iterator[TuningOption]:
    """Those that apply."""
    if state.scenario.layout.workers > 1:
        yield from _compress(state)
        yield from _accumulate(state)
        yield from _overlap(state)
        yield from _larger_buckets(state)
    yield from _larger_batch(state)
    yield from _lora(state)


def _compress(state: TrainingState) -> Iterator[TuningOption]:
    """DDP's hook: only there, and only where gradients travel as fp32."""
    settings, load = state.settings, state.calibration.work.load
    wide = load.gradient_bytes == _FP32_BYTES and state.scenario.gradient_factor == 1
    if state.scenario.strategy is not Strategy.DDP or settings.grad_compress is not None or not wide:
        return
    dtype = "bf16" if settings.precision == "bf16" else "fp16"
    yield TuningOption(
        name=f"gradients as {dtype}",
        kind="gradients",
        after=_replace(state, settings=_replace(settings, grad_compress=dtype), measured_samples_per_s=None),
        change=Change(grad_compress=dtype),
        meaning=_ROUNDED[dtype],
        # On a slow network the copies of all buckets are on their way at once.
        extra_gib=load.trainable * _HALF_BYTES / _BYTES_PER_GIB,
        doubt=_CAST_DOUBT,
    )


def _accumulate(state: TrainingState) -> Iterator[TuningOption]:
    helps = state.scenario.strategy in _REDUCED_ONCE
    for multiple in _MULTIPLES if helps else _MULTIPLES[1:2]:
        option = _accumulated(state, multiple)
        yield option if helps else _replace(option, remark=_reduced_always(state, option.after))


def _accumulated(state: TrainingState, multiple: int) -> TuningOption:
    accumulation = state.scenario.accumulation * multiple
    after = _replace(
        state,
        scenario=_replace(state.scenario, accumulation=accumulation),
        settings=_replace(state.settings, accumulation=accumulation),
        measured_samples_per_s=None,
    )
    change = Change(
        overrides=(f"gradient_accumulation_steps={accumulation}",),
        deepspeed=batch_edits(after),
    )
    return TuningOption(
        name=f"gradient accumulation {accumulation}",
        kind="accumulation",
        after=after,
        change=None if state.is_script else change,
        by_hand=f"{accumulation} micro-batches a step in your script, all but the last of them under no_sync()",
        meaning=_larger_global(state, multiple),
    )


def _reduced_always(before: TrainingState, after: TrainingState) -> str:
    strategy = before.scenario.strategy
    old, new = sample_bytes(before) / 1e6, sample_bytes(after) / 1e6
    engine = "DeepSpeed" if strategy in _DEEPSPEED else "FSDP"
    told = f"{old:.3g} MB a sample before and {new:.3g} MB after"
    if strategy is Strategy.ZERO2:
        told += ", less by the gathering of the updated parameters alone, which is once a step"
    return (
        f"under {strategy} accumulation does not cut the traffic of a sample as it does under DDP: {engine} reduces "
        f"the gradients of every micro-batch, {told}"
    )


def _overlap(state: TrainingState) -> Iterator[TuningOption]:
    deepspeed, load = state.deepspeed, state.calibration.work.load
    if deepspeed is None or state.scenario.strategy not in _DEEPSPEED or state.scenario.overlap:
        return
    # A second buffer of a whole bucket (stage_1_and_2.py); without a known size of the bucket none is told.
    elements = deepspeed.reduce_bucket_elements
    extra = None if elements is None else elements * load.gradient_bytes / _BYTES_PER_GIB
    after = _replace(
        state,
        scenario=_replace(state.scenario, overlap=True),
        settings=_replace(state.settings, overlap=True),
        deepspeed=_replace(deepspeed, overlap_comm=True),
        measured_samples_per_s=None,
    )
    yield TuningOption(
        name="overlap_comm",
        kind="overlap",
        after=after,
        change=None if state.is_script else Change(deepspeed=("zero_optimization.overlap_comm=true",)),
        by_hand='"overlap_comm": true under "zero_optimization" of your DeepSpeed JSON',
        extra_gib=extra,
        remark="one bucket as large as all gradients has nothing to hide behind: a smaller reduce_bucket_size helps it",
    )


def _larger_buckets(state: TrainingState) -> Iterator[TuningOption]:
    """Where a step makes many calls, each of which costs a message's time."""
    scenario, work = state.scenario, state.calibration.work
    if scenario.strategy is not Strategy.DDP or scenario.bucket_bytes is not None:
        return
    calls = [call for call in work.calls_of(scenario.strategy, scenario.layout) if call.collective == "all_reduce"]
    if sum(call.times for call in calls) <= _FEW_CALLS:
        return
    size = _LARGE_BUCKET_MIB * _MIB
    yield TuningOption(
        name=f"buckets of {_LARGE_BUCKET_MIB} MiB",
        kind="buckets",
        after=_replace(state, scenario=_replace(scenario, bucket_bytes=size), measured_samples_per_s=None),
        change=None if state.is_script else Change(overrides=(f"ddp_bucket_cap_mb={_LARGE_BUCKET_MIB}",)),
        by_hand=f"DistributedDataParallel(..., bucket_cap_mb={_LARGE_BUCKET_MIB})",
        remark="fewer messages, which begin later",
    )


def _larger_batch(state: TrainingState) -> Iterator[TuningOption]:
    batch = state.scenario.per_device_batch * 2
    after = _replace(
        state,
        scenario=_replace(state.scenario, per_device_batch=batch),
        settings=_replace(state.settings, per_device_batch=int(batch)),
        measured_samples_per_s=None,
    )
    change = Change(overrides=(f"per_device_train_batch_size={batch:g}",), deepspeed=batch_edits(after))
    yield TuningOption(
        name=f"per-device batch {batch:g}",
        kind="batch",
        # Of a batch that is no whole number none was asked for.
        after=after,
        change=None if state.is_script or batch != int(batch) else change,
        by_hand=f"{batch:g} samples a micro-batch in your script",
        meaning=_larger_global(state, 2),
        extra_gib=None,
        remark="activations take about twice the memory",
    )


def _lora(state: TrainingState) -> Iterator[TuningOption]:
    settings, subject = state.settings, state.subject
    if settings.method != "full" or subject is None or state.is_script:
        return
    try:
        calibration = vary(state.calibration, subject, strategy=state.scenario.strategy, method=f"lora:{_LORA_RANK}")
    except UsageError:
        # Of a model whose shape is not known nothing can be told.
        return
    trainable = calibration.work.load.trainable
    yield TuningOption(
        name=f"LoRA of rank {_LORA_RANK}",
        kind="method",
        after=_replace(
            state,
            calibration=calibration,
            settings=_replace(settings, method="lora", lora_rank=_LORA_RANK),
            measured_samples_per_s=None,
        ),
        change=Change(overrides=("finetuning_type=lora", f"lora_rank={_LORA_RANK}")),
        meaning=f"another training: an adapter of {trainable / 1e6:.3g} M parameters instead of the whole model",
    )


def _larger_global(state: TrainingState, multiple: int) -> str:
    samples = state.scenario.samples
    return (
        f"global batch {samples * multiple:g} instead of {samples:g}: fewer optimizer steps an epoch, and the learning "
        "rate may have to follow"
    )
