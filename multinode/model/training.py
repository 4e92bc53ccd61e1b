"""ShardedTraining: what a job trains, how the model is sharded, and the GPU memory that this needs.

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
from multinode.job.job import TrainingJob, set_options
from multinode.job.settings import PLAIN_STAGES, TrainingSettings, is_false, is_true
from multinode.model.memory import NF4_BITS, MicroBatch, StatePlacement, WorkerMemory, decoder_widths
from multinode.model.model_count import COUNTED_KEYS, UNCOUNTED
from multinode.model.model_size import ModelShape, lora_parameters, parse_model
from multinode.model.tensors import Adapter, ModelTensors, counted_model, tensors_of
from multinode.stats.unknown import Unknown
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Strategy, TrafficInputs

SMALL_RANK = TrainingSettings().lora_rank or 0
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
_HALF_TYPES = frozenset({"bfloat16", "float16"})
_LAYERS_CHECKPOINT_THEMSELVES = (4, 52)
_MEASURE_SIZES = "to measure sizes of your choice: multinode nccl-test -b 1M -e 64M"


class ShardedTraining(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a training that decides its traffic."""

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
        accumulated = f" and {self.accumulation} accumulation steps" if self.accumulation > 1 else ""
        return f"{self.strategy} with {'LoRA' if self.lora else 'full fine-tuning'}{accumulated}"


def read_training(
    job: TrainingJob, model: Mapping[str, Any] | None, transformers: str | None = None
) -> ShardedTraining:
    """What the job trains and how.

    `model` is its config.json, None if it could not be read; `transformers` the version on the nodes, None one whose
    layers checkpoint themselves.
    """
    config = job.arguments
    tensors, small_trainable = _read_tensors(job, model)
    settings = parse_deepspeed(job.deepspeed_text)
    strategy = _strategy(job, settings)
    half = any(is_true(config.get(key)) for key in ("bf16", "fp16", "pure_bf16"))
    # Adapters are kept in fp32.
    whole = not tensors.adapters and _loads_half(config, model)
    version = fsdp_version(config.get("fsdp_config"))
    load = TrafficInputs(
        parameters=tensors.parameters + tensors.adapters,
        trainable=tensors.trainable,
        parameter_bytes=_HALF_BYTES if half else _FP32_BYTES,
        gradient_bytes=_gradient_bytes(strategy, settings, half=half, loads_half=whole),
    )
    small = msgspec.structs.replace(
        load,
        trainable=small_trainable,
        gradient_bytes=_gradient_bytes(Strategy.DDP, None, half=half, loads_half=is_true(config.get("pure_bf16"))),
    )
    training = ShardedTraining(
        strategy=strategy,
        tensors=tensors,
        lora=tensors.adapters > 0,
        settings=settings,
        accumulation=job.settings.gradient_accumulation_steps or 1,
        load=load,
        small=small,
        recompute=not is_true(config.get("disable_gradient_checkpointing")),
        around=strategy in {Strategy.FSDP, Strategy.HYBRID_SHARD} and version == 1 and _is_around(config, transformers),
    )
    load = msgspec.structs.replace(load, gathers=_gathers(training, version), fsdp_version=version)
    return msgspec.structs.replace(training, load=load)


def _read_tensors(job: TrainingJob, model: Mapping[str, Any] | None) -> tuple[ModelTensors, int]:
    """The tensors, and the trained elements with an adapter: the job's, or one of rank SMALL_RANK."""
    counted = counted_model(model)
    if counted is not None:
        refuse_unknown(job, besides=COUNTED_KEYS)
        tensors = counted.tensors()
        adapted = tensors if tensors.adapters or counted.adapted is None else counted.adapted.tensors()
        return tensors, adapted.trainable
    shape = _read_shape(job, model)
    refuse_unknown(job)
    adapter, trainable = read_trained(job, shape)
    small = trainable if adapter is not None else lora_parameters(shape, SMALL_RANK, ("all",)) or 0
    return tensors_of(shape, adapter), small


def _read_shape(job: TrainingJob, model: Mapping[str, Any] | None) -> ModelShape:
    name = job.arguments.get("model_name_or_path")
    if model is None:
        raise JobError(
            f"{job.config_path}: the message sizes depend on {name}, whose config.json could not be read",
            hint="name a directory with config.json, here or on the nodes: "
            f"{set_options(job, model_name_or_path='DIRECTORY')}; {_MEASURE_SIZES}",
        )
    shape = parse_model(model)
    if shape is None:
        kind, reason = model.get("model_type"), model.get(UNCOUNTED)
        why = f"no node could build the model: {reason}" if reason else "the model was not built on a node"
        raise JobError(
            f"{job.config_path}: the number of parameters of {name} is unknown: its model_type is {kind!r}, and {why}",
            hint=_MEASURE_SIZES,
        )
    return shape


def refuse_unknown(job: TrainingJob, *, besides: Collection[str] = ()) -> None:
    """Reject methods that are not modeled here.

    Keys of `besides` do not matter to the caller.

    Raises:
        JobError: the job has such a key, or a stage other than pre-training and supervised fine-tuning.
    """
    config = job.arguments
    key = next((key for key in _UNKNOWN_KEYS if config.get(key) and key not in besides), None)
    if key is None and job.settings.stage not in PLAIN_STAGES:
        key = "stage"
    if key is None and job.settings.gradient_accumulation_steps is None:
        key = "gradient_accumulation_steps"
    if key is not None:
        raise _unknown(job, key)


def _strategy(job: TrainingJob, settings: DeepSpeedConfig | None) -> Strategy:
    fsdp = job.arguments.get("fsdp")
    if job.arguments.get("deepspeed") is not None:
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


def read_trained(job: TrainingJob, shape: ModelShape) -> tuple[Adapter | None, int]:
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
    is_reentrant = not is_true(config.get("disable_gradient_checkpointing")) and not is_false(
        config.get("use_reentrant_gc")
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


def _loads_half(config: Mapping[str, Any], model: Mapping[str, Any] | None) -> bool:
    """Whether the trained parameters themselves are kept in half precision; `auto` is the type of the checkpoint."""
    dtype = config.get("torch_dtype")
    if dtype == "auto":
        dtype = (model or {}).get("dtype") or (model or {}).get("torch_dtype")
    return is_true(config.get("pure_bf16")) or dtype in _HALF_TYPES


def _gradient_bytes(strategy: Strategy, settings: DeepSpeedConfig | None, *, half: bool, loads_half: bool) -> int:
    """Bytes per element on the wire: DDP sends gradients as their parameters are; DeepSpeed and FSDP half precision."""
    if settings is not None and settings.communication_bytes is not None:
        return settings.communication_bytes
    if settings is None and strategy is Strategy.DDP:
        return _HALF_BYTES if loads_half else _FP32_BYTES
    return _HALF_BYTES if half else _FP32_BYTES


def _unknown(job: TrainingJob, key: str) -> JobError:
    name = job.own_name(key)
    setting = f"{name}: {job.arguments[key]}" if key in job.arguments else name
    return JobError(
        f"{job.config_path}: the compute and traffic of training with {setting} are unknown", hint=_MEASURE_SIZES
    )


_EIGHT_BITS = "8bit"
_SINGLE_QUANTISATION_BITS = 4.5
# Of a group of quantized weights the scale has 16 bits, and the zero point as many as a weight.
_SCALE_BITS, _GROUP = 16, 128
_GPTQ, _AWQ = "gptq", "awq"
# Code that replaces the model's, or optimizers whose states are not counted.
_UNCOUNTED_MEMORY = ("use_unsloth", "use_unsloth_gc", "use_badam", "use_galore", "use_apollo", "use_muon")


def worker_memory(
    job: TrainingJob, training: ShardedTraining, model: Mapping[str, Any], layout: Layout
) -> WorkerMemory | Unknown:
    """What decides the memory of one of the job's workers, with samples as long as `cutoff_len`.

    Args:
        job: the job.
        training: what it trains, as `read_training` has it.
        model: its config.json.
        layout: the workers.
    """
    config, settings, widths = job.arguments, job.settings, decoder_widths(model)
    samples, tokens = settings.per_device_train_batch_size, settings.cutoff_len
    optimizer = str(config.get("optim") or "adamw_torch")
    foreign = next((key for key in _UNCOUNTED_MEMORY if config.get(key)), None)
    if foreign is not None or "adamw" not in optimizer:
        return Unknown(f"the memory of training with {foreign or f'optim: {optimizer}'} is unknown")
    if widths is None or samples is None or tokens is None:
        return Unknown("config.json does not have the model's widths, or the YAML has no batch size or sequence length")
    pure, targets = is_true(config.get("pure_bf16")), settings.lora_target or "all"
    return WorkerMemory(
        strategy=training.strategy,
        load=training.load,
        layout=layout,
        placement=_placement(job, training, model, outside=widths.outside, pure=pure),
        widths=widths,
        batch=MicroBatch(
            samples=samples,
            tokens=tokens,
            recompute=training.recompute,
            eager=config.get("flash_attn") == "disabled",
            adapted=tuple(name.strip() for name in targets.split(",")) if training.lora else None,
            dropout=bool(settings.lora_dropout),
            autocast=not pure and training.strategy.engine != "DeepSpeed",
            fused_loss=is_true(config.get("enable_liger_kernel")),
            varied=job.synthetic is None and not (is_true(config.get("packing")) or settings.stage == "pt"),
        ),
        deepspeed=training.settings,
    )


def _placement(
    job: TrainingJob, training: ShardedTraining, model: Mapping[str, Any], *, outside: int, pure: bool
) -> StatePlacement:
    config, sharing = job.arguments, training.settings if training.strategy.engine == "DeepSpeed" else None
    own = model.get("quantization_config")
    method = own.get("quant_method") if isinstance(own, Mapping) else None
    quantised = _own_bits(own) if isinstance(own, Mapping) and method in {_GPTQ, _AWQ} else _asked_bits(config)
    return StatePlacement(
        half=any(is_true(config.get(key)) for key in ("bf16", "fp16", "pure_bf16")),
        frozen_bits=quantised,
        whole_layer=method == _GPTQ,
        whole_frozen=outside if quantised is not None else 0,
        trained_bytes=_HALF_BYTES if pure else None,
        moment_bytes=1 if _EIGHT_BITS in str(config.get("optim")) else None,
        optimizer_elsewhere=sharing is not None and sharing.offload_optimizer is not None,
        # Below stage 3 each worker keeps them whole, and DeepSpeed ignores `offload_param`.
        parameters_elsewhere=sharing is not None
        and sharing.offload_parameters is not None
        and training.strategy.shards_parameters,
    )


def _own_bits(quantization: Mapping[str, Any]) -> float | None:
    """Bits per weight of a checkpoint that is quantized itself."""
    bits, group = quantization.get("bits"), quantization.get("group_size")
    if type(bits) is not int or bits <= 0:
        return None
    size = group if type(group) is int and group > 0 else _GROUP
    return bits + (_SCALE_BITS + bits) / size


def _asked_bits(config: Mapping[str, Any]) -> float | None:
    """Bits per weight of what the job quantizes with bitsandbytes."""
    bits = config.get("quantization_bit")
    if type(bits) is not int or bits <= 0:
        return None
    four = _SINGLE_QUANTISATION_BITS if is_false(config.get("double_quantization")) else NF4_BITS
    return four if bits == 4 else float(bits)  # noqa: PLR2004
