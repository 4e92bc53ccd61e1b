"""DeepSpeed JSON: the settings that matter across nodes, and edits for one run.

Reads and writes no files. The keys that DeepSpeed knows are listed here, so that a misspelled key is found before any
node is asked: DeepSpeed ignores an unknown key at the top level and rejects one in `zero_optimization` on every worker.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from multinode.decoding import decode_json
from multinode.errors import JobError
from multinode.job.job import TrainingJob, parse_assignment

_Job = TypeVar("_Job")

_MOST_STAGE = 3
_BUCKET_ELEMENTS = 500_000_000
_PREFETCH_ELEMENTS = 50_000_000
_PERSISTENT_ELEMENTS = 100_000
_REUSE_ELEMENTS = 1_000_000_000
# Keys that the Trainer compares with its own arguments (transformers, HfTrainerDeepSpeedConfig).
_COMPARED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "fp16.enabled",
    "bf16.enabled",
    "optimizer.params.lr",
    "optimizer.params.weight_decay",
)
_DTYPE_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4, "bfp16": 2, "bfloat16": 2, "half": 2, "float32": 4}


_OPTION = "--deepspeed-set"
_DOTTED = re.compile(r"\w+(?:\.\w+)*", re.ASCII)
_STAGE = ("zero_optimization", "stage")
HPZ_WORKERS = "zero_hpz_partition_size"
"""The key under `zero_optimization` that shares a second copy of the parameters among so many workers."""

# From DeepSpeed 0.19.8 (constants and `DeepSpeedZeroConfig`), plus the keys of 0.14.0 and 0.16.9.
_ZERO = "zero_optimization"
_TOP = """
    activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comet comms_logger communication_data_type
    compile compression_training csv_monitor curriculum_learning data_efficiency data_types dataloader_drop_last
    datastates_ckpt disable_allgather disable_python_gc dump_state eigenvalue elasticity expert_parallel flops_profiler
    fp16 gradient_accumulation_steps gradient_allreduce_op gradient_clipping gradient_predivide_factor graph_harvesting
    hybrid_engine log_level managed_gradient_accumulation memory_breakdown nebula optimizer pipeline prescale_gradients
    progressive_layer_drop scheduler seq_parallel_communication_data_type sequence_parallel_size sparse_attention
    sparse_gradients steps_per_print tensor_parallel tensorboard timers torch_autocast train_batch_size
    train_micro_batch_size_per_gpu use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb
    weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
"""
_IN_ZERO = """
    allgather_bucket_size allgather_partitions compute_grad_norm contiguous_gradients cpu_offload cpu_offload_param
    cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks ignore_unused_parameters leaf_module
    legacy_stage1 load_from_fp32_weights log_trace_cache_warnings memory_efficient_linear
    mics_hierarchical_params_gather mics_shard_size offload_optimizer offload_param overlap_comm override_module_apply
    parameter_alignment pipeline_loading_checkpoint reduce_bucket_size reduce_scatter round_robin_gradients
    save_muon_momentum_buffer_in_memory stage stage3_allgather_sequential stage3_gather_16bit_weights_on_model_save
    stage3_gather_fp16_weights_on_model_save stage3_max_live_parameters stage3_max_reuse_distance
    stage3_model_persistence_threshold stage3_module_granularity_threshold stage3_param_persistence_threshold
    stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params sub_group_size use_multi_rank_bucket_allreduce
    zenflow zero_hpz_partition_size zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights
    zeropp_loco_param
"""


class DeepSpeedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A DeepSpeed configuration."""

    stage: int = 0  # ZeRO stage, 0 to 3
    # values, by dotted key, of settings that the Trainer also has arguments for and that are not `auto`
    fixed: dict[str, int | float | bool] = {}
    names_train_batch_size: bool = False  # whether train_batch_size is set, even to `auto`
    offload_optimizer: str | None = None  # `cpu` or `nvme`; None without offload
    offload_parameters: str | None = None  # `cpu` or `nvme`; None without offload
    # whether gradients are reduced during the backward pass; DeepSpeed's default is stage == 3
    overlap_comm: bool = False
    reduce_bucket_elements: int | None = _BUCKET_ELEMENTS  # elements per reduction; None leaves it to the Trainer
    allgather_bucket_elements: int | None = _BUCKET_ELEMENTS  # per all-gather; None: the Trainer's
    # whether stages 1 and 2 all-reduce a bucket although each worker needs only its part
    multi_rank_allreduce: bool = True
    # parameters that stage 3 prefetches; None leaves it to the Trainer
    prefetch_elements: int | None = _PREFETCH_ELEMENTS
    # stage 3 keeps parameters up to this size whole on each worker; None leaves it to the Trainer
    persistent_elements: int | None = _PERSISTENT_ELEMENTS
    reuse_elements: int = _REUSE_ELEMENTS  # stage 3 keeps a parameter that is reused within this many elements
    communication_bytes: int | None = None  # bytes per gradient element on the wire; None if the JSON does not say
    hpz_workers: int = 1  # of ZeRO++: workers that share a second copy of the parameters; 1 without
    quantized_weights: bool = False  # of ZeRO++: whether parameters are sent in int8
    quantized_gradients: bool = False  # of ZeRO++: whether gradients are sent in int4


class DeepSpeedEdit(msgspec.Struct, frozen=True, kw_only=True):
    """One value to set: its path (groups, then key) and plain JSON data."""

    path: tuple[str, ...]
    value: Any


def parse_deepspeed(text: str | None) -> DeepSpeedConfig | None:
    """The configuration; None if there is no text or no JSON object. A value of the wrong type counts as absent."""
    try:
        data = decode_json(text or "", dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None
    zero = _mapping(data, "zero_optimization")
    stage = zero.get("stage")
    stage = stage if type(stage) is int and 0 <= stage <= _MOST_STAGE else 0
    overlap = zero.get("overlap_comm")
    reuse = _elements(zero, "stage3_max_reuse_distance", _REUSE_ELEMENTS)
    dtype = data.get("communication_data_type")
    values = {key: _look_up(data, key) for key in _COMPARED}
    return DeepSpeedConfig(
        stage=stage,
        fixed={key: value for key, value in values.items() if isinstance(value, int | float)},
        names_train_batch_size="train_batch_size" in data,
        offload_optimizer=_device(_look_up(zero, "offload_optimizer.device")),
        offload_parameters=_device(_look_up(zero, "offload_param.device")),
        overlap_comm=overlap if isinstance(overlap, bool) else stage == _MOST_STAGE,
        reduce_bucket_elements=_elements(zero, "reduce_bucket_size", _BUCKET_ELEMENTS),
        allgather_bucket_elements=_elements(zero, "allgather_bucket_size", _BUCKET_ELEMENTS),
        multi_rank_allreduce=zero.get("use_multi_rank_bucket_allreduce") is not False,
        prefetch_elements=_elements(zero, "stage3_prefetch_bucket_size", _PREFETCH_ELEMENTS),
        persistent_elements=_elements(zero, "stage3_param_persistence_threshold", _PERSISTENT_ELEMENTS),
        reuse_elements=_REUSE_ELEMENTS if reuse is None else reuse,
        communication_bytes=_DTYPE_BYTES.get(dtype) if isinstance(dtype, str) else None,
        hpz_workers=max(1, _elements(zero, HPZ_WORKERS, 1) or 1),
        quantized_weights=zero.get("zero_quantized_weights") is True,
        quantized_gradients=zero.get("zero_quantized_gradients") is True,
    )


def parse_deepspeed_edits(texts: Iterable[str]) -> tuple[DeepSpeedEdit, ...]:
    """Parse `a.b=value` edits; values are YAML, which includes JSON."""
    return tuple(_parse_edit(text) for text in texts)


def edit_deepspeed(text: str, edits: Iterable[DeepSpeedEdit]) -> str:
    """The JSON with the edits applied in order; missing groups are created.

    Keys of stage 3 stay when the stage is lowered: DeepSpeed accepts them at every stage and ignores them, except for a
    partial offload, which it rejects (release 0.19.8).

    Raises:
        JobError: a path leads through a value, would overwrite a group, or names an unknown key.
    """
    edits = tuple(edits)
    try:
        data = decode_json(text, dict[str, Any]) if edits else {}
        for edit in edits:
            _set(data, edit)
        return _render(data) if edits else text
    except RecursionError:
        raise JobError("the DeepSpeed JSON is nested too deeply to be edited") from None


def fixed_edits(config: DeepSpeedConfig, *, per_device_batch: int, accumulation: int, workers: int) -> tuple[str, ...]:
    """The edits that a JSON with fixed batch sizes needs, as `parse_deepspeed_edits` reads them.

    The Trainer refuses to start if the JSON contradicts it; `auto` and absent values need no edit.

    `per_device_batch` are samples per worker per micro-batch, `accumulation` micro-batches per step.
    """
    wanted = {
        "train_micro_batch_size_per_gpu": per_device_batch,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": per_device_batch * accumulation * workers,
    }
    return tuple(f"{key}={value}" for key, value in wanted.items() if config.fixed.get(key, value) != value)


def fit_batch(job: _Job, workers: int) -> _Job:
    """The job with the fixed batch sizes of its DeepSpeed JSON adapted to the YAML and the number of workers.

    Unchanged if the JSON fixes nothing, if there is no JSON, or if the YAML's own values cannot be read.
    """
    if not isinstance(job, TrainingJob):
        return job
    text = job.deepspeed_text
    config = parse_deepspeed(text)
    batch, accumulation = job.settings.per_device_train_batch_size, job.settings.gradient_accumulation_steps
    if config is None or text is None or batch is None or accumulation is None:
        return job
    edits = fixed_edits(config, per_device_batch=batch, accumulation=accumulation, workers=workers)
    if not edits:
        return job
    return msgspec.structs.replace(job, deepspeed_text=edit_deepspeed(text, parse_deepspeed_edits(edits)))


def diff_deepspeed(before: str, after: str, source: str) -> str:
    """The changes as a unified diff that ignores formatting; empty without changes."""
    old, new = (_render(decode_json(text, dict[str, Any])).splitlines() for text in (before, after))
    return "\n".join(
        difflib.unified_diff(old, new, fromfile=source, tofile=source, tofiledate="for this run only", lineterm="")
    )


def require_known(path: Sequence[str], groups: int) -> None:
    """Reject a new key that DeepSpeed does not read.

    `groups` is how many of the path's groups exist.

    Raises:
        JobError: the key is unknown; the message suggests a similar one.
    """
    for depth, known_keys in enumerate((_TOP.split(), _IN_ZERO.split() if path[0] == _ZERO else ())):
        if known_keys and groups <= depth < len(path) and path[depth] not in known_keys:
            group = f"{_ZERO}." if depth else ""
            near = difflib.get_close_matches(path[depth], known_keys, n=1)
            raise JobError(
                f"{_OPTION} {group}{path[depth]}: neither DeepSpeed nor the JSON has this key",
                hint=f"did you mean {group}{near[0]}?"
                if near
                else "if it is a key of another DeepSpeed release, add it to the JSON",
            )


def _parse_edit(text: str) -> DeepSpeedEdit:
    name, value = parse_assignment(_OPTION, text, "zero_optimization.overlap_comm=true", _DOTTED)
    path = tuple(name.split("."))
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        raise JobError(
            f"{_OPTION} {name}: not a JSON value", hint=f"use a number, text, true, false or null: {_OPTION} {name}=5"
        ) from None
    if path == _STAGE and (type(value) is not int or not 0 <= value <= _MOST_STAGE):
        raise JobError(f"{_OPTION} {name}: {json.dumps(value)} is not a ZeRO stage", hint="use 0, 1, 2 or 3")
    return DeepSpeedEdit(path=path, value=value)


def _set(group: dict[str, Any], edit: DeepSpeedEdit, depth: int = 0) -> None:
    (name, *inner), dotted = edit.path[depth:], ".".join(edit.path[: depth + 1])
    if name not in group:
        require_known(edit.path, depth)
    section = group.get(name)
    if inner and isinstance(section, dict):
        _set(section, edit, depth + 1)
        return
    if inner and section is not None:
        raise JobError(
            f"{_OPTION} {'.'.join(edit.path)}: {dotted} is {json.dumps(section)} in the JSON, not a group",
            hint=f"set {_OPTION} {dotted}=VALUE",
        )
    value = edit.value
    for key in reversed(inner):
        value = {key: value}
    if isinstance(section, dict) and not (value is None or isinstance(value, dict)):
        raise JobError(
            f"{_OPTION} {dotted}={json.dumps(value)}: {dotted} is a group in the JSON, whose keys would be lost",
            hint=f"set one of its keys: {_OPTION} {dotted}.KEY=VALUE",
        )
    group[name] = value


def _render(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def _look_up(data: Mapping[str, Any], dotted: str) -> Any:
    *groups, key = dotted.split(".")
    for group in groups:
        data = _mapping(data, group)
    return data.get(key)


def _mapping(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = data.get(key)
    return value if isinstance(value, dict) else {}


def _device(device: Any) -> str | None:
    return device if isinstance(device, str) and device != "none" else None


def _elements(zero: Mapping[str, Any], key: str, default: int) -> int | None:
    size = zero.get(key, default)
    # JSON reads 5e8 as a float.
    if not isinstance(size, int | float) or isinstance(size, bool) or not 0 <= size < float("inf"):
        return None
    return int(size)
