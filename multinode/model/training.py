"""ShardedTraining: what a LLaMA-Factory job trains, how the model is sharded, and the GPU memory that this needs.

Reads the given job and config.json. The cost of the traffic is not judged here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from multinode.errors import JobError
from multinode.job.deepspeed import DeepSpeedConfig, parse_deepspeed
from multinode.job.engines.accelerate import fsdp_version
from multinode.job.job import PLAIN_STAGES, LlamaFactoryJob, LlamaFactorySettings
from multinode.model.model_count import COUNTED_KEYS, UNCOUNTED
from multinode.model.model_size import ModelShape, lora_parameters, parse_model
from multinode.model.tensors import Adapter, ModelTensors, counted_model, tensors_of
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Strategy, TrafficInputs
from multinode.units import GIB

SMALL_RANK = LlamaFactorySettings().lora_rank or 0
"""Default rank of an adapter."""
# Keys that change what is trained or sent in ways not modeled here.
_UNKNOWN_KEYS = (
    "additional_target",
    "adapter_name_or_path",
    "quantization_bit",
    "use_dora",
    "use_galore",
    "use_apollo",
    "use_badam",
    "use_llama_pro",
    "use_ray",
    "use_kt",
    "use_mca",
    "resize_vocab",
    "new_special_tokens",
    "add_tokens",
    "tensor_parallel_size",
)
_FSDP = {
    "full_shard": Strategy.FSDP,
    "shard_grad_op": Strategy.SHARD_GRAD_OP,
    "hybrid_shard": Strategy.HYBRID_SHARD,
}
_FP32_BYTES, _HALF_BYTES = 4, 2
_LAYERS_CHECKPOINT_THEMSELVES = (4, 52)
_MEASURE_SIZES = "you can also measure your own sizes: multinode nccl-test -b 1M -e 64M"


class ShardedTraining(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a LLaMA-Factory training that decides its traffic."""

    strategy: Strategy
    tensors: ModelTensors
    lora: bool = False  # whether adapters are trained instead of the whole model
    settings: DeepSpeedConfig | None = None  # of DeepSpeed; None without it
    accumulation: int = 1  # micro-batches per optimizer step
    load: TrafficInputs
    # what DDP would move with its adapter, or with one of rank SMALL_RANK if the whole model is trained
    small: TrafficInputs
    recompute: bool = True  # whether activations are recomputed, LLaMA-Factory's default
    # whether reentrant checkpointing wraps FSDP's units, which then gather for its forward pass, too
    around: bool = False

    @property
    def name(self) -> str:
        """In a few words."""
        accumulated = f", {self.accumulation} accumulation steps" if self.accumulation > 1 else ""
        return f"{self.strategy} with {'LoRA' if self.lora else 'full fine-tuning'}{accumulated}"


def read_training(
    job: LlamaFactoryJob, model: Mapping[str, Any] | None, transformers: str | None = None
) -> ShardedTraining:
    """What the job trains and how.

    `model` is its config.json, None if it could not be read; `transformers` the version on the nodes, None one whose
    layers checkpoint themselves.
    """
    config = job.config
    tensors, small_trainable = _read_tensors(job, model)
    settings = parse_deepspeed(job.deepspeed_text)
    strategy = _strategy(job, settings)
    half = any(config.get(key) is True for key in ("bf16", "fp16", "pure_bf16"))
    version = fsdp_version(config.get("fsdp_config"))
    load = TrafficInputs(
        parameters=tensors.parameters + tensors.adapters,
        trainable=tensors.trainable,
        parameter_bytes=_HALF_BYTES if half else _FP32_BYTES,
        gradient_bytes=_gradient_bytes(strategy, config, settings, half=half),
    )
    small = msgspec.structs.replace(
        load,
        trainable=small_trainable,
        gradient_bytes=_gradient_bytes(Strategy.DDP, config, None, half=half),
    )
    training = ShardedTraining(
        strategy=strategy,
        tensors=tensors,
        lora=tensors.adapters > 0,
        settings=settings,
        accumulation=job.settings.gradient_accumulation_steps or 1,
        load=load,
        small=small,
        recompute=config.get("disable_gradient_checkpointing") is not True,
        around=strategy in {Strategy.FSDP, Strategy.HYBRID_SHARD} and version == 1 and _is_around(config, transformers),
    )
    load = msgspec.structs.replace(load, gathers=_gathers(training, version), fsdp_version=version)
    return msgspec.structs.replace(training, load=load)


def _read_tensors(job: LlamaFactoryJob, model: Mapping[str, Any] | None) -> tuple[ModelTensors, int]:
    """The tensors, and the trained elements with an adapter: the job's, or one of rank SMALL_RANK."""
    counted = counted_model(model)
    if counted is not None:
        refuse_unknown(job, besides=COUNTED_KEYS)
        tensors = counted.tensors()
        return tensors, tensors.trainable if tensors.adapters else counted.small or tensors.trainable
    shape = _read_shape(job, model)
    refuse_unknown(job)
    adapter, trainable = read_trained(job, shape)
    small = trainable if adapter is not None else lora_parameters(shape, SMALL_RANK, ("all",)) or 0
    return tensors_of(shape, adapter), small


def _read_shape(job: LlamaFactoryJob, model: Mapping[str, Any] | None) -> ModelShape:
    name = job.config.get("model_name_or_path")
    if model is None:
        raise JobError(
            f"{job.config_path}: the message sizes depend on {name}, whose config.json could not be read",
            hint="name a directory with config.json, here or on the nodes: --set model_name_or_path=DIRECTORY; "
            + _MEASURE_SIZES,
        )
    shape = parse_model(model)
    if shape is None:
        kind, reason = model.get("model_type"), model.get(UNCOUNTED)
        why = f"no node could build it: {reason}" if reason else "no node was asked to build it"
        raise JobError(
            f"{job.config_path}: the number of parameters of {name} is unknown: its model_type is {kind!r}, and {why}",
            hint=_MEASURE_SIZES,
        )
    return shape


def refuse_unknown(job: LlamaFactoryJob, *, besides: Collection[str] = ()) -> None:
    """Reject methods that are not modeled here.

    Keys of `besides` do not matter to the caller.

    Raises:
        JobError: the job has such a key, or a stage other than pre-training and supervised fine-tuning.
    """
    config = job.config
    key = next((key for key in _UNKNOWN_KEYS if config.get(key) and key not in besides), None)
    if key is None and job.settings.stage not in PLAIN_STAGES:
        key = "stage"
    if key is None and job.settings.gradient_accumulation_steps is None:
        key = "gradient_accumulation_steps"
    if key is not None:
        raise _unknown(job, key)


def _strategy(job: LlamaFactoryJob, settings: DeepSpeedConfig | None) -> Strategy:
    fsdp = job.config.get("fsdp")
    if job.config.get("deepspeed") is not None:
        if settings is None or fsdp:
            raise _unknown(job, "fsdp" if fsdp else "deepspeed")
        return deepspeed_strategy(settings)
    if not fsdp:
        return Strategy.DDP
    strategy = named_fsdp(fsdp)
    if strategy is None:
        raise _unknown(job, "fsdp")
    return strategy


def deepspeed_strategy(settings: DeepSpeedConfig) -> Strategy:
    """That of a DeepSpeed configuration."""
    is_hpz = settings.stage == Strategy.ZERO3_HPZ.stage and settings.hpz_workers > 1
    return Strategy.ZERO3_HPZ if is_hpz else Strategy.of_stage(settings.stage)


def named_fsdp(fsdp: object) -> Strategy | None:
    """FSDP's sharding strategy from the words of the YAML; None if they do not say."""
    words = fsdp.split() if isinstance(fsdp, str) else fsdp if isinstance(fsdp, list) else []
    return next((_FSDP[word] for word in words if isinstance(word, str) and word in _FSDP), None)


def fsdp_word(strategy: Strategy) -> str:
    """What the YAML's `fsdp` calls a strategy of FSDP."""
    return next(word for word, named in _FSDP.items() if named is strategy)


def read_trained(job: LlamaFactoryJob, shape: ModelShape) -> tuple[Adapter | None, int]:
    """The adapter (None if the whole model is trained) and the number of trained parameters.

    Raises:
        JobError: what is trained is unknown.
    """
    kind, rank, targets = job.settings.finetuning_type, job.settings.lora_rank, job.settings.lora_target or ""
    if kind == "full":
        return None, shape.parameters
    if kind != "lora":
        raise _unknown(job, "finetuning_type")
    if rank is None:
        raise _unknown(job, "lora_rank")
    names = tuple(name.strip() for name in targets.split(",")) if targets else ()
    trainable = lora_parameters(shape, rank, names)
    if trainable is None:
        raise _unknown(job, "lora_target")
    return Adapter(rank=rank, targets=names), trainable


def _is_around(config: Mapping[str, Any], transformers: str | None) -> bool:
    """Whether checkpointing is reentrant (LLaMA-Factory's default) and the model's loop calls FSDP's units through it.

    Since transformers 4.52 each layer checkpoints inside its unit (transformers#37223).
    """
    is_reentrant = (
        config.get("disable_gradient_checkpointing") is not True and config.get("use_reentrant_gc") is not False
    )
    version = re.match(r"(\d+)\.(\d+)", transformers or "")
    return is_reentrant and version is not None and (int(version[1]), int(version[2])) < _LAYERS_CHECKPOINT_THEMSELVES


def zero_3_gathers(settings: DeepSpeedConfig, model: ModelTensors, *, recompute: bool) -> tuple[int, int]:
    """Elements that a micro-batch gathers only once (the last ones), and how often it gathers the others.

    ZeRO-3 releases a parameter after use unless it is used again within `stage3_max_reuse_distance` elements (DeepSpeed
    0.19.8, partitioned_param_coordinator.py, `__params_to_release`). Between a parameter's uses in the forward and the
    backward pass, each pass uses everything behind it; activation checkpointing adds a third pass, and uses each layer
    again before its backward pass. `stage3_max_live_parameters` limits only what is prefetched.
    """
    layers = [layer.base for layer in reversed(model.layers)]
    kept = 0
    for unit in (model.outside.base - model.table, *layers, model.table):
        # The parameters used between the two uses are those behind it, which are kept then, too.
        if (3 if recompute else 2) * kept >= settings.reuse_elements:
            break
        kept += unit
    else:
        # An adapter, too.
        kept = max(kept, settings.reuse_elements)
    return kept, 3 if recompute and settings.reuse_elements < max(layers, default=0) else 2


def _gathers(training: ShardedTraining, version: int) -> float | None:
    """Gathers per micro-batch; None takes the strategy's usual number.

    FSDP keeps what is outside the layers for the backward pass. Version 2 would, too, but accelerate tells it to
    reshard that as well.
    """
    model, parameters = training.tensors, training.load.parameters or 0
    if training.settings is not None and training.strategy.gathers:
        kept, again = zero_3_gathers(training.settings, model, recompute=training.recompute)
        # A tied embedding that was released is gathered again for the output layer.
        tied = model.table if model.tied and kept < parameters else 0
        return again - (again - 1) * min(1.0, kept / parameters) + tied / parameters
    if training.strategy in {Strategy.FSDP, Strategy.HYBRID_SHARD} and version == 1:
        again = 3 if training.around else 2
        return again - (again - 1) * model.outside.base / parameters
    return None


def _gradient_bytes(strategy: Strategy, config: dict[str, Any], settings: DeepSpeedConfig | None, *, half: bool) -> int:
    """Bytes per element on the wire: LLaMA-Factory trains in fp32 under DDP; DeepSpeed and FSDP send half precision."""
    if settings is not None and settings.communication_bytes is not None:
        return settings.communication_bytes
    if settings is None and strategy is Strategy.DDP:
        return _HALF_BYTES if config.get("pure_bf16") is True else _FP32_BYTES
    return _HALF_BYTES if half else _FP32_BYTES


def _unknown(job: LlamaFactoryJob, key: str) -> JobError:
    setting = f"{key}: {job.config[key]}" if key in job.config else key
    return JobError(
        f"{job.config_path}: the compute and traffic of a training with {setting} are unknown", hint=_MEASURE_SIZES
    )


COUNTED = "parameters, gradients, Adam states and DDP buckets, without activations"
_ADAM_BYTES = 2 * _FP32_BYTES


class StatePlacement(msgspec.Struct, frozen=True, kw_only=True):
    """Where the training states are kept."""

    half: bool = False  # whether the training computes in bf16 or fp16
    frozen_bits: int | None = None  # per frozen parameter; None is 16 in half precision, otherwise 32
    optimizer_elsewhere: bool = False  # whether the optimizer states are in host memory or on disk
    parameters_elsewhere: bool = False  # likewise


class MemoryNeed(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one worker, in GiB."""

    parameters_gib: float  # trained and frozen
    gradients_gib: float  # of the trained parameters
    optimizer_gib: float  # Adam's two moments, and DeepSpeed's fp32 copy
    buckets_gib: float = 0.0  # into which DDP copies the gradients

    @property
    def total_gib(self) -> float:
        """The sum."""
        return self.parameters_gib + self.gradients_gib + self.optimizer_gib + self.buckets_gib


def memory_need(
    strategy: Strategy, load: TrafficInputs, layout: Layout, placement: StatePlacement
) -> MemoryNeed | None:
    """Memory of the states; None if the number of parameters is unknown.

    With T trained and F frozen parameters on n workers, in bytes, as the engines keep them:
    - DDP: 4T, gradients 4T, Adam 8T, buckets 4T (torch copies gradients into buckets unless it uses views).
      LLaMA-Factory and autocast keep trained parameters in fp32.
    - ZeRO-1 in half: 2T, gradients 2T, (4 + 8)T/n (Rajbhandari et al. 2020); in fp32 4T and 4T. ZeRO-2: gradients
    /n.
      ZeRO-3: parameters /n as well, frozen ones included.
    - ZeRO-3 hpZ: as ZeRO-3, and all parameters once more over the workers of a node.
    - FSDP: 4T, 4T and 8T, all /n, frozen parameters too; SHARD_GRAD_OP keeps the parameters whole; hybrid shard
      divides by the workers of a node.
    """
    if load.parameters is None:
        return None
    workers = layout.workers_per_node if strategy is Strategy.HYBRID_SHARD else layout.workers
    trained, frozen = load.trainable, max(0, load.parameters - load.trainable)
    deepspeed = strategy.engine == "DeepSpeed"
    width = _HALF_BYTES if deepspeed and placement.half else _FP32_BYTES
    frozen_bits = placement.frozen_bits or 8 * (_HALF_BYTES if placement.half else _FP32_BYTES)
    parameters = trained * width + frozen * frozen_bits / 8
    optimizer = trained * (_ADAM_BYTES + (_FP32_BYTES if deepspeed else 0))
    kept = 0.0 if placement.parameters_elsewhere else parameters / (workers if strategy.shards_parameters else 1)
    if strategy is Strategy.ZERO3_HPZ:
        kept += parameters / layout.workers_per_node
    return MemoryNeed(
        parameters_gib=kept / GIB,
        gradients_gib=trained * width / (workers if strategy.shards_gradients else 1) / GIB,
        optimizer_gib=0.0
        if placement.optimizer_elsewhere
        else optimizer / (1 if strategy is Strategy.DDP else workers) / GIB,
        buckets_gib=trained * width / GIB if strategy is Strategy.DDP and layout.workers > 1 else 0.0,
    )
