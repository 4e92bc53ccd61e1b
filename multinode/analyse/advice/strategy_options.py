"""Options of the strategy: from one that communicates much to one that communicates less, where memory allows it. Pure.

Every move makes the same steps; what it costs is memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from multinode.analyse.advice.training_state import Change, TrainingState, TuningOption, expected_gib, fits, need_of
from multinode.analyse.collectives.traffic import Strategy
from multinode.analyse.job.memory_need import COUNTED
from multinode.analyse.prediction.variants import vary
from multinode.core.job.deepspeed import DeepSpeedConfig, parse_deepspeed
from multinode.core.job.deepspeed_edit import edit_deepspeed, parse_deepspeed_edits
from multinode.errors import JobError, UsageError

__all__ = ["strategy_options"]

_MIB = 1 << 20
_DDP_BUCKET_BYTES = 25 * _MIB
_MOVES = {
    Strategy.ZERO3: (Strategy.ZERO2, Strategy.DDP),
    Strategy.ZERO2: (Strategy.ZERO1, Strategy.DDP),
    Strategy.ZERO1: (Strategy.DDP,),
    Strategy.FSDP: (Strategy.DDP,),
    Strategy.SHARD_GRAD_OP: (Strategy.DDP,),
    Strategy.HYBRID_SHARD: (Strategy.DDP,),
}
_STAGE = {Strategy.ZERO1: 1, Strategy.ZERO2: 2}
_SHARDED = frozenset({Strategy.FSDP, Strategy.SHARD_GRAD_OP, Strategy.HYBRID_SHARD})
_replace = msgspec.structs.replace


def strategy_options(state: TrainingState) -> Iterator[TuningOption]:
    """The moves that may pay."""
    today = state.scenario.strategy
    if state.scenario.layout.workers == 1:
        return
    for strategy in _MOVES.get(today, ()):
        # ZeRO-1 and ZeRO-2 send alike unless micro-batches are accumulated.
        if strategy is Strategy.ZERO1 and state.scenario.accumulation == 1:
            continue
        change = _change(today, strategy)
        after = _after(state, strategy, change)
        if after is None:
            continue
        option = TuningOption(
            name=f"{strategy} instead of {today}",
            kind="strategy",
            after=after,
            change=None if state.is_script else change,
            by_hand=_by_hand(strategy),
        )
        yield _replace(option, remark=_memory(state, option))


def _after(state: TrainingState, strategy: Strategy, change: Change) -> TrainingState | None:
    """None where nobody can tell what it would send."""
    calibration, scenario = state.calibration, _replace(state.scenario, strategy=strategy)
    deepspeed = None if strategy is Strategy.DDP else _edited(state, change)
    if state.subject is not None:
        try:
            calibration = vary(calibration, state.subject, strategy=strategy)
        except UsageError:
            return None
    if strategy is Strategy.DDP:
        known = strategy in calibration.work.calls
        scenario = _replace(scenario, bucket_bytes=None if known else _DDP_BUCKET_BYTES, overlap=True)
    elif deepspeed is not None:
        scenario = _replace(scenario, overlap=deepspeed.overlap_comm)
    return _replace(
        state,
        calibration=calibration,
        scenario=scenario,
        settings=_replace(state.settings, strategy=str(strategy), overlap=scenario.overlap),
        deepspeed=deepspeed,
        measured_samples_per_s=None,
    )


def _edited(state: TrainingState, change: Change) -> DeepSpeedConfig | None:
    """Its DeepSpeed JSON with the change: what it leaves out, stage 3 has otherwise than stage 2."""
    job = state.subject.job if state.subject is not None else None
    if job is None or job.deepspeed_text is None:
        return state.deepspeed
    try:
        return parse_deepspeed(edit_deepspeed(job.deepspeed_text, parse_deepspeed_edits(change.deepspeed)))
    except JobError:
        return state.deepspeed


def _change(today: Strategy, strategy: Strategy) -> Change:
    if strategy in _STAGE:
        return Change(deepspeed=(f"zero_optimization.stage={_STAGE[strategy]}",))
    if today in _SHARDED:
        return Change(overrides=("fsdp=null", "fsdp_config=null"))
    return Change(overrides=("deepspeed=null",))


def _by_hand(strategy: Strategy) -> str:
    if strategy in _STAGE:
        return f'"stage": {_STAGE[strategy]} under "zero_optimization" of your DeepSpeed JSON'
    return "wrap the model in torch's DistributedDataParallel in your script"


def _memory(before: TrainingState, option: TuningOption) -> str:
    """What it takes, and whether the GPUs have room for it, as far as that can be told."""
    old, new, memory = need_of(before), need_of(option.after), before.gpu_memory
    if old is None or new is None:
        return "whether a worker's memory holds it is not known: the model's size is not"
    needed = f"the model's states take {new.total_gib:.3g} GiB of a worker instead of {old.total_gib:.3g} ({COUNTED})"
    if memory is None:
        return needed
    fit = "do not fit" if fits(before, option) is False else "fit"
    told = f"they {fit} a GPU of {memory.total_gib:.3g} GiB"
    expected = expected_gib(before, option)
    if memory.peak_gib is not None and expected is not None:
        return f"{needed}; with the activations that were measured, {expected:.3g} GiB, {told}"
    return f"{needed}; {told}" + (", if activations find room beside them" if fit == "fit" else "")
