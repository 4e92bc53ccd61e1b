"""Whether a training fits a memory, and the first change that makes it fit. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from multinode.job.job_files import Change
from multinode.model.memory import NF4_BITS, WorkerMemory
from multinode.traffic.step_calls import Strategy, TrafficInputs

USABLE = 0.95
"""Fraction of a GPU's memory that a training may be expected to fill: fragments take their part."""
_ZERO3 = 3
_SHORTEST_TOKENS = 256
_QUANTISED = "quantization_bit=4"


class Remedy(NamedTuple):
    """A change, and the training with it."""

    change: Change
    memory: WorkerMemory


def first_that_fits(
    memory: WorkerMemory, budget_gib: float, *, accumulation: int, small: TrafficInputs | None = None
) -> Change | None:
    """The first change after which the training fits; None if none does.

    Smaller micro-batches, checkpointing and sharding leave the training as it is: first each alone, then as many as it
    takes. Then an adapter, quantization and shorter samples: each alone, then after all the others.

    Args:
        memory: of the training.
        budget_gib: memory of a worker.
        accumulation: micro-batches per step, of which a smaller batch needs more.
        small: what an adapter trains; None if it is unknown.
    """
    change, left = Change(), memory
    samples_a_step = memory.batch.samples * accumulation
    for find in (partial(_same_training, samples_a_step=samples_a_step), partial(_other_training, small=small)):
        for remedy in find(memory):
            if fits(remedy.memory, budget_gib):
                return remedy.change
        while (further := next(find(left), None)) is not None:
            change, left = _joined(change, further.change), further.memory
            if fits(left, budget_gib):
                return change
    return None


def fits(memory: WorkerMemory, budget_gib: float) -> bool:
    """Whether the training is expected to fit."""
    peak = memory.peak()
    return peak is not None and peak.needed.value <= USABLE * budget_gib


def _joined(change: Change, further: Change) -> Change:
    """Both, with one value for each setting."""
    joined = change.joined(further)
    kept = (
        {setting.partition("=")[0]: setting for setting in settings}
        for settings in (joined.overrides, joined.deepspeed)
    )
    overrides, deepspeed = (tuple(settings.values()) for settings in kept)
    return replace(joined, overrides=overrides, deepspeed=deepspeed)


def _same_training(memory: WorkerMemory, *, samples_a_step: int) -> Iterator[Remedy]:
    batch = memory.batch
    for samples in _halves(batch.samples, 1):
        steps = samples_a_step // samples
        overrides = (f"per_device_train_batch_size={samples}", f"gradient_accumulation_steps={steps}")
        yield Remedy(Change(overrides=overrides), replace(memory, batch=replace(batch, samples=samples)))
    if not batch.recompute:
        change = Change(overrides=("disable_gradient_checkpointing=false",))
        yield Remedy(change, replace(memory, batch=replace(batch, recompute=True)))
    stage = memory.strategy.stage
    if memory.strategy.engine == "DeepSpeed" and stage is not None and stage < _ZERO3 and memory.layout.workers > 1:
        for higher in range(stage + 1, _ZERO3 + 1):
            deepspeed = replace(memory.deepspeed, stage=higher) if memory.deepspeed is not None else None
            sharded = replace(memory, strategy=Strategy.of_stage(higher), deepspeed=deepspeed)
            yield Remedy(Change(deepspeed=(f"zero_optimization.stage={higher}",)), sharded)


def _other_training(memory: WorkerMemory, *, small: TrafficInputs | None) -> Iterator[Remedy]:
    batch, load, as_adapter = memory.batch, memory.load, "finetuning_type=lora"
    quantised = replace(memory.placement, frozen_bits=NF4_BITS, whole_frozen=memory.widths.outside)
    # DeepSpeed does not shard what bitsandbytes has quantized.
    can_quantise = memory.placement.frozen_bits is None and not memory.strategy.gathers
    if batch.adapted is None and small is not None and load.parameters is not None:
        adapted = replace(load, parameters=load.parameters + small.trainable, trainable=small.trainable)
        lora = replace(memory, load=adapted, batch=replace(batch, adapted=("all",)))
        yield Remedy(Change(overrides=(as_adapter,)), lora)
        if can_quantise:
            yield Remedy(Change(overrides=(as_adapter, _QUANTISED)), replace(lora, placement=quantised))
    elif batch.adapted is not None and can_quantise:
        yield Remedy(Change(overrides=(_QUANTISED,)), replace(memory, placement=quantised))
    for tokens in _halves(batch.tokens, _SHORTEST_TOKENS):
        shorter = replace(memory, batch=replace(batch, tokens=tokens))
        yield Remedy(Change(overrides=(f"cutoff_len={tokens}",)), shorter)


def _halves(value: int, least: int) -> Iterator[int]:
    while value // 2 >= least:
        value //= 2
        yield value
