"""What a DeepSpeed JSON says, as far as it matters across nodes. Judges nothing; how it is launched is an engine's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from multinode.decoding import decode_json

__all__ = ["DeepSpeedConfig", "parse_deepspeed"]

_MOST_STAGE = 3
_BUCKET_ELEMENTS = 500_000_000
_PREFETCH_ELEMENTS = 50_000_000
_PERSISTENT_ELEMENTS = 100_000
_LIVE_ELEMENTS = 1_000_000_000
# Keys whose values the Trainer compares with its own arguments (transformers, HfTrainerDeepSpeedConfig).
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


class DeepSpeedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A DeepSpeed configuration.

    Attributes:
        stage: of ZeRO, 0 to 3.
        fixed: values by dotted key of those that the Trainer has arguments for, where they are not left to it (`auto`).
        names_train_batch_size: whether train_batch_size stands in it, be it as `auto`.
        offload_optimizer: where the optimizer's state goes: `cpu`, `nvme`; None is nowhere.
        offload_parameters: where the parameters go, likewise.
        overlap_comm: whether gradients are reduced while others are computed; DeepSpeed's default is stage == 3.
        reduce_bucket_elements: elements that are reduced at once; None is left to the Trainer.
        allgather_bucket_elements: elements that are gathered at once, likewise.
        multi_rank_allreduce: whether stages 1 and 2 reduce a bucket to all workers, where each needs its part alone.
        prefetch_elements: elements of parameters that stage 3 gathers at once; None is left to the Trainer.
        persistent_elements: parameters of up to so many elements are whole on each worker in stage 3, likewise.
        live_elements: elements of parameters that stage 3 leaves whole between their uses.
        communication_bytes: of one element of a gradient on the wire; None where the JSON does not say.
    """

    stage: int = 0
    fixed: dict[str, int | float | bool] = {}
    names_train_batch_size: bool = False
    offload_optimizer: str | None = None
    offload_parameters: str | None = None
    overlap_comm: bool = False
    reduce_bucket_elements: int | None = _BUCKET_ELEMENTS
    allgather_bucket_elements: int | None = _BUCKET_ELEMENTS
    multi_rank_allreduce: bool = True
    prefetch_elements: int | None = _PREFETCH_ELEMENTS
    persistent_elements: int | None = _PERSISTENT_ELEMENTS
    live_elements: int = _LIVE_ELEMENTS
    communication_bytes: int | None = None


def parse_deepspeed(text: str) -> DeepSpeedConfig | None:
    """The configuration; None where the text is no JSON object. A value of the wrong kind counts as absent."""
    try:
        data = decode_json(text, dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None
    zero = _mapping(data, "zero_optimization")
    stage = zero.get("stage")
    stage = stage if type(stage) is int and 0 <= stage <= _MOST_STAGE else 0
    overlap = zero.get("overlap_comm")
    live = _elements(zero, "stage3_max_live_parameters", _LIVE_ELEMENTS)
    dtype = data.get("communication_data_type")
    values = {key: _look_up(data, key) for key in _COMPARED}
    return DeepSpeedConfig(
        stage=stage,
        fixed={key: value for key, value in values.items() if isinstance(value, int | float)},
        names_train_batch_size="train_batch_size" in data,
        offload_optimizer=_device(zero, "offload_optimizer"),
        offload_parameters=_device(zero, "offload_param"),
        overlap_comm=overlap if isinstance(overlap, bool) else stage == _MOST_STAGE,
        reduce_bucket_elements=_elements(zero, "reduce_bucket_size", _BUCKET_ELEMENTS),
        allgather_bucket_elements=_elements(zero, "allgather_bucket_size", _BUCKET_ELEMENTS),
        multi_rank_allreduce=zero.get("use_multi_rank_bucket_allreduce") is not False,
        prefetch_elements=_elements(zero, "stage3_prefetch_bucket_size", _PREFETCH_ELEMENTS),
        persistent_elements=_elements(zero, "stage3_param_persistence_threshold", _PERSISTENT_ELEMENTS),
        live_elements=_LIVE_ELEMENTS if live is None else live,
        communication_bytes=_DTYPE_BYTES.get(dtype) if isinstance(dtype, str) else None,
    )


def _look_up(data: Mapping[str, Any], dotted: str) -> Any:
    *groups, key = dotted.split(".")
    for group in groups:
        data = _mapping(data, group)
    return data.get(key)


def _mapping(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = data.get(key)
    return found if isinstance(found, dict) else {}


def _device(zero: Mapping[str, Any], key: str) -> str | None:
    device = _mapping(zero, key).get("device")
    return device if isinstance(device, str) and device != "none" else None


def _elements(zero: Mapping[str, Any], key: str, default: int) -> int | None:
    size = zero.get(key, default)
    # People write 5e8, which JSON reads as a float.
    if not isinstance(size, int | float) or isinstance(size, bool) or not 0 <= size < float("inf"):
        return None
    return int(size)
