"""Strategy: how the model is sharded over the workers, from their description and their calls. Pure.

If the calls contradict the description, the calls win.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from multinode.profile.calls import SeenCall, WorkerCalls, busiest_worker, last_models
from multinode.profile.observed import Observed
from multinode.records.samples import AveragingSample, ModelSample, WorkerSample
from multinode.traffic.step_calls import Strategy

# Below these shares of a step's bytes, calls are not part of the strategy: a metric, an evaluation, a checkpoint.
_TRIFLE = 0.02
_MOST = 0.5
# Full sharding gathers each unit for the forward and the backward pass; the outermost only once.
_GATHERED_ONCE = 1.05
_GATHERED_TWICE = 1.3
# Traffic of a rendezvous, logs and metrics stays far below.
_UNSEEN_BYTES = 1 << 20


class Recognised(msgspec.Struct, frozen=True, kw_only=True):
    """How the model is sharded over the workers."""

    name: str  # in words
    silence: str = ""  # why the workers do not communicate, an error for the user to fix; empty if they do
    strategy: Strategy | None = None  # the known strategy, if it is one
    fsdp_version: int | None = None  # 1 or 2; None without FSDP


class _Sent(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per step of the busiest worker by op, and the number of calls."""

    bytes_by_op: dict[str, float]
    count_by_op: dict[str, float]
    total: float

    def has(self, *ops: str) -> bool:
        """Whether these are part of the strategy."""
        return self.part(*ops) > _TRIFLE

    def part(self, *ops: str) -> float:
        """Share of all bytes."""
        return sum(self.bytes_by_op.get(op, 0.0) for op in ops) / self.total if self.total else 0.0


def recognise_strategy(
    observed: Observed, calls: Mapping[int, WorkerCalls], nic_bytes: float | None = None
) -> Recognised:
    """The strategy, from the last description of the lowest rank, and the calls of all.

    Args:
        observed: the run.
        calls: from `read_calls`.
        nic_bytes: NIC traffic per step, which also shows unrecorded calls (of compiled code).
    """
    averaging = observed.averaging
    if observed.world_size <= 1 or averaging is not None:
        return Recognised(name=_averaged(averaging) if averaging is not None else "one worker")
    model = model_of(observed)
    described = _as_told(model) if model else None
    silence = _why_silent(observed, calls, wrapped=described is not None)
    if silence:
        return _silent(silence, nic_bytes)
    worker = busiest_worker(calls.values())
    sent = _sent(worker.calls) if worker else None
    if sent is None:
        return _unseen(described, calls)
    if model is None or described is None:
        return _by_calls(calls, sent)
    if _is_fsdp(model):
        model = msgspec.structs.replace(model, accumulation=model.accumulation or _seen_accumulation(observed))
        return _fsdp(model, sent, hybrid=_is_hybrid(observed, calls))
    return _contradicted(described, sent) if _contradicts(described.strategy, sent) else described


def _averaged(averaging: AveragingSample) -> str:
    kind = "local SGD" if averaging.outer_lr is None else "DiLoCo"
    every = "step" if averaging.every == 1 else f"{averaging.every} steps"
    return f"{kind}: DDP inside each node, {averaging.nodes} nodes averaged every {every}"


def model_of(observed: Observed) -> ModelSample | None:
    """The last description of the lowest rank that has one."""
    return next(iter(last_models(observed).values()), None)


def _why_silent(observed: Observed, calls: Mapping[int, WorkerCalls], *, wrapped: bool) -> str:
    sizes = {worker.world_size for worker in observed.of(WorkerSample)}
    if sizes and max(sizes) < observed.world_size:
        return f"each of several training jobs has {max(sizes)} of the {observed.world_size} workers"
    if any(worker.odd for worker in calls.values()) or len(calls) < observed.world_size:
        # Unreadable calls may be the communicating ones.
        return ""
    groups = _groups(calls)
    if not groups:
        # A wrapper of a distributed model communicates, even from C++ or compiled code, where nothing is recorded.
        return "" if wrapped else "no worker communicates with another: each trains alone"
    if len(observed.nodes) > 1 and not any(_crosses(observed, group) for group in groups):
        return "no call crosses nodes: each node trains alone"
    return ""


def _silent(silence: str, nic_bytes: float | None) -> Recognised:
    if nic_bytes is not None and nic_bytes > _UNSEEN_BYTES:
        carried = f"a NIC carried {nic_bytes / 1e6:.1f} MB per step"
        return Recognised(name=f"unknown: apparently {silence}, but {carried}")
    return Recognised(name=f"no communication: {silence}", silence=silence)


def _unseen(described: Recognised | None, calls: Mapping[int, WorkerCalls]) -> Recognised:
    if described is None or not calls:
        return described or Recognised(name="unknown")
    return msgspec.structs.replace(described, name=f"{described.name}, calls not recorded")


def _crosses(observed: Observed, group: frozenset[int]) -> bool:
    return sum(1 for node in observed.nodes if not group.isdisjoint(node.ranks)) > 1


def _sent(calls: Iterable[SeenCall]) -> _Sent | None:
    sizes: dict[str, float] = defaultdict(float)
    counts: dict[str, float] = defaultdict(float)
    for call in calls:
        if not call.is_small and call.ranks > 1:
            sizes[call.op] += call.asked_bytes
            counts[call.op] += call.count
    total = sum(sizes.values())
    return _Sent(bytes_by_op=sizes, count_by_op=counts, total=total) if total else None


def _as_told(model: ModelSample) -> Recognised | None:
    if model.wrapper == "ddp":
        return Recognised(name="DDP", strategy=Strategy.DDP)
    if model.zero_stage is not None:
        strategy = _of_stage(model, model.zero_stage)
        name = "DDP (DeepSpeed's ZeRO-0)" if strategy is Strategy.DDP else strategy.value
        return Recognised(name=name, strategy=strategy)
    return _fsdp(model, None, hybrid=False) if _is_fsdp(model) else None


def _of_stage(model: ModelSample, stage: int) -> Strategy:
    hpz = model.settings.get("zero_hpz_partition_size")
    if stage == Strategy.ZERO3_HPZ.stage and type(hpz) is int and hpz > 1:
        return Strategy.ZERO3_HPZ
    return Strategy.of_stage(stage) if stage in range(4) else Strategy.DDP


def _is_fsdp(model: ModelSample) -> bool:
    return model.wrapper in {"fsdp", "fsdp2"}


def _fsdp(model: ModelSample, sent: _Sent | None, *, hybrid: bool) -> Recognised:
    family, version = ("FSDP2", 2) if model.wrapper == "fsdp2" else ("FSDP", 1)
    sharding = str(model.settings.get("sharding_strategy") or "").upper()
    if hybrid or (sent is None and "HYBRID" in sharding):
        name = f"{family} (hybrid shard)"
        return Recognised(name=name, strategy=Strategy.HYBRID_SHARD, fsdp_version=version)
    if sharding == "NO_SHARD":
        return Recognised(name=f"{family} (NO_SHARD, as DDP)", strategy=Strategy.DDP)
    if sent is not None and not sent.has("all_gather"):
        return _contradicted(Recognised(name=family), sent)
    reshards = model.settings.get("reshard_after_forward")
    if type(reshards) is int:
        return Recognised(name=f"{family} (reshards to {reshards} workers)", fsdp_version=version)
    kept = reshards is False
    seen = None if sent is None else _stays_whole(model, sent)
    stays = kept if seen is None else seen
    contradiction = "" if stays is kept else " according to its calls, but not to the model"
    return Recognised(
        name=f"{family} ({'SHARD_GRAD_OP' if stays else 'full shard'}){contradiction}",
        strategy=Strategy.SHARD_GRAD_OP if stays else Strategy.FSDP,
        fsdp_version=version,
    )


def _contradicted(described: Recognised, sent: _Sent) -> Recognised:
    return Recognised(name=f"custom collectives ({_ops(sent)}), but {described.name} according to the model")


def _stays_whole(model: ModelSample, sent: _Sent) -> bool | None:
    """Whether parameters stay gathered from the forward to the backward pass, by the number of calls.

    None if that is inconclusive: with accumulation, gradients may be reduced less often than parameters are gathered,
    and frozen units have no gradients.
    """
    scattered = sent.count_by_op.get("reduce_scatter", 0.0)
    if not scattered or (model.accumulation or 1) > 1 or model.trainable != model.parameters:
        return None
    ratio = sent.count_by_op.get("all_gather", 0.0) / scattered
    return True if ratio <= _GATHERED_ONCE else False if ratio >= _GATHERED_TWICE else None


def _seen_accumulation(observed: Observed) -> int | None:
    return (
        max((record.micro_steps or 0 for step in observed.counted_steps for record in step.values()), default=0) or None
    )


def _is_hybrid(observed: Observed, calls: Mapping[int, WorkerCalls]) -> bool:
    sharded, reduced = (
        {group for group in _groups(calls, op) if len(group) < observed.world_size}
        for op in ("reduce_scatter", "all_reduce")
    )
    return bool(sharded) and any(all(len(across & group) <= 1 for group in sharded) for across in reduced)


def _groups(calls: Mapping[int, WorkerCalls], op: str = "") -> set[frozenset[int]]:
    """The ranks of groups of several workers that make calls of this op, or of any, which are not small."""
    return {
        frozenset(ranks)
        for worker in calls.values()
        for ranks, mine in worker.by_group.items()
        if len(ranks) > 1 and any(not call.is_small and op in {call.op, ""} for call in mine)
    }


def _contradicts(strategy: Strategy | None, sent: _Sent) -> bool:
    if strategy is Strategy.DDP:
        return sent.part("all_reduce", "reduce") < _MOST and not sent.part("broadcast") > _MOST
    if strategy is not None and strategy.stage == Strategy.ZERO3.stage:
        return not sent.has("all_gather")
    return not (sent.has("all_gather", "broadcast") and sent.has("all_reduce", "reduce", "reduce_scatter"))


def _by_calls(calls: Mapping[int, WorkerCalls], sent: _Sent) -> Recognised:
    reducer = sum(call.asked_bytes for worker in calls.values() for call in worker.calls if call.source == "ddp")
    if reducer and sent.part("all_reduce") > 1 - _TRIFLE:
        return Recognised(name="DDP", strategy=Strategy.DDP)
    return Recognised(name=f"custom collectives ({_ops(sent)})")


def _ops(sent: _Sent) -> str:
    ops = sorted((op for op in sent.bytes_by_op if sent.has(op)), key=lambda op: -sent.bytes_by_op[op])
    return " and ".join(ops)
