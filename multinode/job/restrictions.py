"""What a job's own settings do not allow: unequal numbers of workers, averaging, balance, compressed gradients. Pure.

With unequal numbers, workers that are grouped by node would be in groups that span nodes, or left over: the job hangs,
or fails in its first collective.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from multinode.cluster.cluster import Cluster
from multinode.decoding import decode_json
from multinode.errors import UsageError
from multinode.job.engines.engine import Engine
from multinode.job.job import PLAIN_STAGES, Job, LlamaFactoryJob
from multinode.levers.balance import deal_step

if TYPE_CHECKING:
    from multinode.job.launch_options import LaunchOptions

_FEWER = "use --workers-per-node {}, or equal slots= in the hostfile"
# As accelerate numbers FSDP's strategies, and as it and the Trainer name them.
_HYBRID = frozenset({"4", "5", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2"})
_SHARDING_VARIABLE = "FSDP_SHARDING_STRATEGY"
# Of LLaMA-Factory, the Trainer, DeepSpeed and accelerate (tensor parallelism; groups that repeat the shards), Megatron.
_SIZES = (
    *("tensor_parallel_size", "tp_size", "autotp_size", "parallelism_config_tp_size", "tensor_model_parallel_size"),
    "parallelism_config_dp_replicate_size",
)


def node_groups_of(job: Job, accelerate: Mapping[str, Any], env: Mapping[str, str]) -> str | None:
    """The setting, in words; None where nothing says so. What a script sets by itself, not by its options, is not seen.

    `accelerate` is the user's configuration, `env` the variables that the user sets for the job.
    """
    if env.get(_SHARDING_VARIABLE, "").upper() in _HYBRID:
        return f"{_SHARDING_VARIABLE}={env[_SHARDING_VARIABLE]}"
    if isinstance(job, LlamaFactoryJob):
        return _of_llamafactory(job)
    return _of_options(job.argv) or _of_deepspeed(job.deepspeed_text) or _of_accelerate(accelerate)


def _of_llamafactory(job: LlamaFactoryJob) -> str | None:
    config = job.config
    fsdp = config.get("fsdp")
    if isinstance(fsdp, str) and _HYBRID & set(fsdp.upper().split()):
        return f"fsdp: {fsdp}"
    sharding = _group(config, "fsdp_config").get("sharding_strategy")
    if str(sharding).upper() in _HYBRID:
        return f"fsdp_config: sharding_strategy: {sharding}"
    return _group_size(config) or _of_deepspeed(job.deepspeed_text)


def _of_options(argv: Sequence[str]) -> str | None:
    """Of a script's options, as the Trainer and Megatron name them."""
    for word, following in itertools.pairwise((*argv, "")):
        name, has_value, value = word.partition("=")
        key, value = name.lstrip("-").replace("-", "_"), value if has_value else following
        is_size = key in _SIZES and value.isdecimal() and int(value) > 1
        if name.startswith("-") and (is_size or (key == "fsdp" and _HYBRID & set(value.upper().split()))):
            return f"{name} {value}"
    return None


def _of_accelerate(config: Mapping[str, Any]) -> str | None:
    sharding = _group(config, "fsdp_config").get("fsdp_sharding_strategy")
    if str(sharding).upper() in _HYBRID:
        return f"fsdp_sharding_strategy: {sharding}"
    if config.get("distributed_type") == "MEGATRON_LM":
        return "distributed_type: MEGATRON_LM"
    return next(filter(None, (_group_size(_group(config, name)) for name in config)), None)


def _of_deepspeed(text: str | None) -> str | None:
    try:
        data = decode_json(text or "", dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None
    zero = _group(data, "zero_optimization")
    for key in ("zero_hpz_partition_size", "mics_shard_size"):
        if _is_count(zero.get(key)):
            return f"{key}: {zero[key]}"
    if zero.get("zero_quantized_gradients") is True:
        return "zero_quantized_gradients: true"
    return _group_size(_group(data, "tensor_parallel"))


def _group_size(group: Mapping[str, Any]) -> str | None:
    return next((f"{key}: {group[key]}" for key in _SIZES if _is_count(group.get(key))), None)


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 1


def _group(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = data.get(key)
    return value if isinstance(value, dict) else {}


def refuse_options(options: LaunchOptions, job: Job, engine: Engine, speeds: Sequence[float]) -> None:
    """Refuse options that are known not to work with a job; the workers check the rest before their first step.

    `speeds` are of each rank, by `options.balance`.

    Raises:
        UsageError: the workers are not instrumented, the gradients cannot be compressed, the parameters cannot be
            averaged between nodes, or the samples cannot be dealt out by speed.
    """
    sender, averaging, balance = gradient_sender(job, engine), options.averaging, options.balance
    if options.nccl_inspector:
        _require_instrumentation("--nccl-inspector", options)
    if options.trace_steps is not None:
        _require_instrumentation("--trace", options)
    if options.grad_compress is not None:
        _refuse_compression(options.grad_compress, sender, options)
    if averaging is not None:
        _require_instrumentation(averaging.option, options)
        if options.grad_compress is not None:
            raise UsageError(
                f"{averaging.option} keeps gradients on their node, where --grad-compress {options.grad_compress} "
                "would compress them",
                hint="use --sync-dtype fp16 for the data between nodes",
            )
        _require_ddp(averaging.option, sender)
        _refuse(averaging.option, _why_not_averaged(job) if isinstance(job, LlamaFactoryJob) else None)
        if engine.accelerate.get("mixed_precision") == "fp16":
            raise UsageError(f"{averaging.option}: a node whose fp16 gradients overflow would skip a step alone")
    if balance is not None:
        if averaging is not None:
            raise UsageError(f"{balance.option}: with {averaging.option} nodes do not wait for each other in each step")
        _require_instrumentation(balance.option, options)
        _require_ddp(balance.option, sender, why=", which may communicate in every micro-batch")
        _refuse(balance.option, _why_not_balanced(job, speeds) if isinstance(job, LlamaFactoryJob) else None)


def _refuse(option: str, reason: tuple[str, str] | None) -> None:
    if reason is not None:
        raise UsageError(f"{option}: {reason[0]}", hint=reason[1])


def _require_instrumentation(option: str, options: LaunchOptions, hint: str | None = None) -> None:
    if not options.profile:
        raise UsageError(f"{option} needs the instrumentation, which --no-profile disables", hint=hint)


def _require_ddp(option: str, sender: str | None, *, why: str = "", or_else: str = "") -> None:
    """Refuse an option of DDP where something else sends the gradients.

    `why` it cannot be combined with it; `or_else` is an alternative.
    """
    if sender is not None:
        raise UsageError(
            f"{option} works with DDP only; this job uses {sender}{why}",
            hint=f"{or_else}train with DDP: --set deepspeed=null, --set fsdp=null",
        )


def _why_not_balanced(job: LlamaFactoryJob, speeds: Sequence[float]) -> tuple[str, str] | None:
    config, settings = job.config, job.settings
    if config.get("streaming") is True:
        return "streaming: true reads an IterableDataset, whose samples cannot be dealt out", "streaming: false"
    if settings.stage not in PLAIN_STAGES or config.get("use_asft_loss") is True:
        named = "use_asft_loss" if config.get("use_asft_loss") is True else f"stage: {settings.stage}"
        return f"{named} has a loss of its own, and what its mean is taken of is unknown", "stage: sft or pt"
    batch = settings.per_device_train_batch_size
    if len(set(step_shares(job, speeds) or range(2))) == 1:
        return (
            f"micro-batches of {batch} cannot be split finer: each worker gets the same samples",
            "a larger per_device_train_batch_size, and gradient_accumulation_steps as many times smaller",
        )
    return None


def step_shares(job: Job, speeds: Sequence[float]) -> tuple[int, ...] | None:
    """Samples of each worker in a step; None where the job's files do not say."""
    batch = job.settings.per_device_train_batch_size if isinstance(job, LlamaFactoryJob) else None
    accumulation = job.settings.gradient_accumulation_steps if isinstance(job, LlamaFactoryJob) else None
    return deal_step(batch * len(speeds), speeds, accumulation) if batch and accumulation else None


def _why_not_averaged(job: LlamaFactoryJob) -> tuple[str, str] | None:
    config = job.config
    if config.get("fp16") is True:
        return "with fp16 loss scaling, a node whose gradients overflow would skip a step alone", "bf16: true"
    optim = str(config.get("optim") or "")
    layered = [name for name in ("galore_layerwise", "apollo_layerwise", "use_badam") if config.get(name) is True]
    if layered or "lomo" in optim or "layerwise" in optim:
        return (
            f"{layered[0] if layered else optim} updates parameters individually, without an optimizer step",
            "another optimizer",
        )
    return None


def refuse_unequal(
    job: Job, accelerate: Mapping[str, Any], env: Mapping[str, str], cluster: Cluster, workers: Sequence[int]
) -> None:
    """Reject these numbers of workers, which are unequal, if the job groups the workers by node.

    Raises:
        UsageError: it does.
    """
    setting = node_groups_of(job, accelerate, env)
    if setting is not None:
        counts = ", ".join(f"{node.name} has {count}" for node, count in zip(cluster.nodes, workers, strict=True))
        raise UsageError(
            f"{setting} groups the workers of a node, but the nodes have different numbers of workers ({counts})",
            hint=_FEWER.format(min(workers)),
        )


_KINDS = ("fp16", "bf16")
_POWER_SGD = re.compile(r"powersgd(?::([1-9]\d{0,2})(?::\d{1,6})?)?", re.ASCII)
_USUAL_RANK = 4
# accelerate's names for setups in which DDP does not send the gradients.
_NOT_DDP = frozenset({"DEEPSPEED", "FSDP", "MEGATRON_LM"})


def power_sgd_rank(kind: str) -> int | None:
    """The rank in `powersgd[:RANK[:START]]`; None for other compressions."""
    match = _POWER_SGD.fullmatch(kind)
    return None if match is None else int(match[1] or _USUAL_RANK)


def _refuse_compression(kind: str, sender: str | None, options: LaunchOptions) -> None:
    option = f"--grad-compress {kind}"
    if kind not in _KINDS and power_sgd_rank(kind) is None:
        kinds = f"one of {', '.join(_KINDS)}, powersgd, powersgd:RANK, powersgd:RANK:START"
        raise UsageError(f"{option}: unknown compression", hint=kinds)
    hint = "remove --no-profile; the records also show whether gradients were compressed"
    _require_instrumentation(option, options, hint=hint)
    _require_ddp(
        option,
        sender,
        or_else="use communication_data_type in the DeepSpeed JSON or the reduce dtype of FSDP's mixed precision; or ",
    )


def gradient_sender(job: Job, engine: Engine) -> str | None:
    """What sends the gradients instead of DDP, by the job's own files; None if they name nothing."""
    if isinstance(job, LlamaFactoryJob):
        if job.config.get("deepspeed"):
            return "DeepSpeed"
        if job.config.get("fsdp"):
            return "FSDP"
    kind = engine.accelerate.get("distributed_type")
    return f"accelerate with {kind}" if kind in _NOT_DDP else None
