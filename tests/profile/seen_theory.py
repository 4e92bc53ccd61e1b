"""Seen theory: the bytes that a step of the recognised strategy should send, to hold what was called against. Pure.

The table of strategies is `traffic`'s; which strategy it is, `traffic.strategy` says.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

import msgspec

from multinode.profile.calls import read_calls
from multinode.profile.observed import Observed
from multinode.profile.strategy import model_of, recognise_strategy
from multinode.records.samples import ModelSample
from multinode.traffic.algorithms import Layout, worker_factor
from multinode.traffic.step_calls import Call, Strategy, TrafficInputs, strategy_calls

__all__ = ["Theory", "theory", "worker_bytes"]

_WIDTHS = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
    "int8": 1,
}
_HALVING_HOOKS = ("fp16", "bf16")
# DDP's own all-reduce, written as a hook.
_PLAIN_HOOKS = {"", "allreduce", "allreduce_hook"}
# Of ZeRO++: parameters and gradients travel quantized, or parameters inside the node alone.
_ZERO_PLUS_PLUS = ("zero_quantized_weights", "zero_quantized_gradients")
_GATHERING = {Strategy.ZERO3, Strategy.FSDP, Strategy.SHARD_GRAD_OP, Strategy.HYBRID_SHARD}
_ABSURD_BYTES = 1 << 60
_ABSURD_ACCUMULATION = 1 << 20


class Theory(msgspec.Struct, frozen=True, kw_only=True):
    """What a step of a strategy should send."""

    calls: tuple[Call, ...] = ()  # its collectives
    # that one worker sends, by busbw's factors, as `BytesPerStep.calls` is; None has a `reason`
    bytes_per_step: float | None = None
    reason: str = ""  # why there is none


class _Unknown(Exception):
    """What the theory needs is not known; says what."""


def theory(observed: Observed) -> Theory:
    """The bytes that a worker sends in a step, by the table of strategies."""
    if observed.world_size <= 1:
        return Theory(bytes_per_step=0.0)
    recognised, model = recognise_strategy(observed, read_calls(observed)), model_of(observed)
    if recognised.strategy is None:
        return Theory(reason=f"no theory is known of this strategy: {recognised.name}")
    if model is None:
        return Theory(reason="no worker told the size of its model")
    try:
        calls = _calls(recognised.strategy, model, observed)
        accumulation = 1 if recognised.strategy in {Strategy.DDP, Strategy.ZERO1} else _accumulation(model, observed)
    except _Unknown as unknown:
        return Theory(reason=str(unknown))
    return Theory(calls=calls, bytes_per_step=worker_bytes(calls, _layout(observed), accumulation))


def _calls(strategy: Strategy, model: ModelSample, observed: Observed) -> tuple[Call, ...]:
    """Sizes are given in bytes, as dtypes may be mixed: each byte counts as an element."""
    if model.wrapper == "deepspeed":
        _refuse_unlike(model)
    load = TrafficInputs(
        parameters=_bytes(model.dtypes, model.settings.get("param_dtype")) if strategy in _GATHERING else None,
        trainable=_gradient_bytes(model),
        parameter_bytes=1,
        gradient_bytes=1,
        fsdp_version=2 if model.wrapper == "fsdp2" else 1,
    )
    first, *others = strategy_calls(strategy, load, _layout(observed))
    if strategy in {Strategy.ZERO1, Strategy.ZERO2}:
        updated = _bytes(model.trainable_dtypes, None)
        return first, msgspec.structs.replace(others[0], size_bytes=float(updated))
    if strategy is Strategy.ZERO3 and _fits_whole(model):
        return msgspec.structs.replace(first, times=1.0), *others
    return first, *others


def _refuse_unlike(model: ModelSample) -> None:
    """DeepSpeed's settings that change what it sends from what the table says."""
    settings = model.settings
    if any(settings.get(name) for name in _ZERO_PLUS_PLUS) or (settings.get("zero_hpz_partition_size") or 1) != 1:
        raise _Unknown("no theory is known of DeepSpeed's ZeRO++")
    if settings.get("use_multi_rank_bucket_allreduce") is False:
        raise _Unknown("no theory is known of DeepSpeed with use_multi_rank_bucket_allreduce off")


def _fits_whole(model: ModelSample) -> bool:
    """Whether ZeRO-3 leaves all parameters whole from the forward to the backward pass, and gathers them once."""
    distance = model.settings.get("stage3_max_reuse_distance")
    return isinstance(distance, int | float) and not isinstance(distance, bool) and distance >= 2 * model.parameters


def _gradient_bytes(model: ModelSample) -> int:
    """Of the gradients that are trained, in the dtype in which they travel."""
    hook = str(model.settings.get("comm_hooks") or "").lower()
    if hook not in _PLAIN_HOOKS:
        if not any(name in hook for name in _HALVING_HOOKS) or "powersgd" in hook:
            raise _Unknown("what DDP's communication hook sends is not known")
        return _bytes(model.trainable_dtypes, "bfloat16")
    if model.wrapper == "deepspeed":
        return _bytes(model.trainable_dtypes, model.settings.get("communication_dtype"))
    # FSDP reduces in the dtype that it computes in, unless it is told another one.
    named = model.settings.get("reduce_dtype") or model.settings.get("param_dtype")
    return _bytes(model.trainable_dtypes, named)


def _bytes(dtypes: Mapping[str, int], named: str | float | None) -> int:
    """Bytes of so many parameters by dtype; all in the dtype that is named, where one is."""
    size = 0
    for dtype, count in dtypes.items():
        width = _WIDTHS.get(str(named or dtype))
        if width is None:
            raise _Unknown("the dtype in which parameters or gradients travel is not known")
        size += width * count
    if not 0 < size < _ABSURD_BYTES:
        raise _Unknown("how many parameters there are is not known")
    return size


def _accumulation(model: ModelSample, observed: Observed) -> int:
    """K, by the framework's word or else by the forward passes that were seen."""
    seen = [one.micro_steps for step in observed.counted_steps for one in step.values() if one.micro_steps]
    told = model.accumulation or (round(statistics.median(seen)) if seen else 0)
    if not 0 < told < _ABSURD_ACCUMULATION:
        raise _Unknown("how many micro-batches a step has is not known")
    return told


def _layout(observed: Observed) -> Layout:
    """As many workers on each node; where that is not so, as if each were alone on one."""
    counts = {len(node.ranks) for node in observed.nodes}
    if len(counts) == 1:
        return Layout(nodes=len(observed.nodes), workers_per_node=counts.pop())
    return Layout(nodes=observed.world_size)


def worker_bytes(calls: Iterable[Call], layout: Layout, accumulation: int = 1, *, gloo: bool = False) -> float:
    """Bytes that one worker sends in these, and receives as many: times x factor(op, ranks) x S, rings throughout.

    Args:
        calls: of a step.
        layout: the workers.
        accumulation: micro-batches per step.
        gloo: whether gloo makes them, whose reduce-scatter moves as much as an all-reduce.
    """
    return sum(
        call.times_in(accumulation)
        * worker_factor("gloo" if gloo else "nccl", call.collective, call.ranks(layout))
        * call.size_bytes
        for call in calls
    )
