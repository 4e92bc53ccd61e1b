"""What a job's own settings do not allow: unequal numbers of workers, and levers that need what it lacks. Pure.

With unequal numbers, workers that are grouped by node would be in groups that span nodes, or left over: the job hangs,
or fails in its first collective.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from multinode.cluster.cluster import Cluster
from multinode.decoding import decode_json
from multinode.errors import UsageError
from multinode.job.engines.engine import Engine
from multinode.job.job import Job, ScriptJob, set_options
from multinode.job.settings import PLAIN_STAGES, is_true
from multinode.levers.lever import Lever, Need, Quality

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
    own = _of_options(job.argv) if isinstance(job, ScriptJob) else _of_arguments(job.arguments)
    return own or _of_deepspeed(job.deepspeed_text) or _of_accelerate(accelerate)


def _of_arguments(config: Mapping[str, Any]) -> str | None:
    fsdp = config.get("fsdp")
    if isinstance(fsdp, str) and _HYBRID & set(fsdp.upper().split()):
        return f"fsdp: {fsdp}"
    sharding = _group(config, "fsdp_config").get("sharding_strategy")
    if str(sharding).upper() in _HYBRID:
        return f"fsdp_config: sharding_strategy: {sharding}"
    return _group_size(config)


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


def refuse_options(options: LaunchOptions, job: Job, engine: Engine) -> None:
    """Refuse options that are known not to work with a job; the workers check the rest before their first step.

    Raises:
        UsageError: the workers are not instrumented, or the job lacks what a lever needs.
    """
    if options.observation.nccl_inspector:
        _require_instrumentation("--nccl-inspector", options)
    if options.observation.trace is not None:
        _require_instrumentation("--trace", options)
    options.levers.refuse_pairs()
    for lever in options.levers:
        for need in lever.needs:
            if need.quality == "instrumentation":
                _require_instrumentation(lever.option, options, need.hint)
            elif need.quality == "ddp":
                _require_ddp(lever, need, _no_ddp(job, engine))
            else:
                _require(lever, need, _LACKS[need.quality](job, engine))


def _require_instrumentation(option: str, options: LaunchOptions, hint: str = "") -> None:
    if not options.observation.profile:
        raise UsageError(
            f"{option} needs the instrumentation, which --no-profile disables", hint=hint or "remove --no-profile"
        )


class _Lack(NamedTuple):
    found: str  # the setting
    hint: str  # one that has the quality


def _require_ddp(lever: Lever, need: Need, lack: _Lack | None) -> None:
    if lack is not None:
        raise UsageError(
            f"{lever.option} works with DDP only; this job uses {lack.found}{need.why}",
            hint=f"{need.hint}train with DDP: {lack.hint}",
        )


def _require(lever: Lever, need: Need, lack: _Lack | None) -> None:
    if lack is not None:
        raise UsageError(f"{lever.option}: {need.why.format(found=lack.found)}", hint=f"{need.hint}{lack.hint}")


def _loss_scaling(job: Job, engine: Engine) -> _Lack | None:
    if is_true(job.arguments.get("fp16")):
        return _Lack("fp16: true", f"use {set_options(job, fp16=False, bf16=True)}")
    if engine.accelerate.get("mixed_precision") == "fp16":
        return _Lack("mixed_precision: fp16", "set mixed_precision: bf16 in accelerate's configuration")
    return None


def _no_optimizer_step(job: Job, _: Engine) -> _Lack | None:
    config = job.arguments
    optim = str(config.get("optim") or "")
    layered = [name for name in ("galore_layerwise", "apollo_layerwise", "use_badam") if is_true(config.get(name))]
    if layered or "lomo" in optim or "layerwise" in optim:
        return _Lack(layered[0] if layered else optim, "use another optimizer")
    return None


def _iterable_dataset(job: Job, _: Engine) -> _Lack | None:
    if not is_true(job.arguments.get("streaming")):
        return None
    return _Lack(f"{job.own_name('streaming')}: true", f"use {set_options(job, streaming=False)}")


def _loss_of_its_own(job: Job, _: Engine) -> _Lack | None:
    if is_true(job.arguments.get("use_asft_loss")):
        return _Lack("use_asft_loss", f"use {set_options(job, use_asft_loss=False)}")
    stage = job.settings.stage
    return None if stage is None or stage in PLAIN_STAGES else _Lack(f"stage: {stage}", "use stage: sft or pt")


_LACKS: Mapping[Quality, Callable[[Job, Engine], _Lack | None]] = {
    "no_loss_scaling": _loss_scaling,
    "optimizer_step": _no_optimizer_step,
    "map_dataset": _iterable_dataset,
    "mean_loss": _loss_of_its_own,
}
"""What of a job's settings lacks a quality; None if nothing is known to."""


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


# accelerate's names for setups in which DDP does not send the gradients.
_NOT_DDP = frozenset({"DEEPSPEED", "FSDP", "MEGATRON_LM"})


def gradient_sender(job: Job, engine: Engine) -> str | None:
    """What sends the gradients instead of DDP, by the job's own files; None if they name nothing."""
    lack = _no_ddp(job, engine)
    return lack.found if lack is not None else None


def _no_ddp(job: Job, engine: Engine) -> _Lack | None:
    for key, name in (("deepspeed", "DeepSpeed"), ("fsdp", "FSDP")):
        if job.arguments.get(key):
            return _Lack(name, set_options(job, **{key: None}))
    kind = engine.accelerate.get("distributed_type")
    if kind in _NOT_DDP:
        return _Lack(f"accelerate with {kind}", "set distributed_type: MULTI_GPU in accelerate's configuration")
    return None
