"""Tuning options: what could be changed in a training: its settings, its strategy, its cluster. Judges no gain."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from multinode.analyse.advice.training_state import (
    Change,
    TrainingState,
    TuningOption,
    batch_edits,
    expected_gib,
    fits,
    need_of,
    options_of,
    sample_bytes,
)
from multinode.analyse.collectives.traffic import Layout, Strategy
from multinode.analyse.job.memory_need import COUNTED
from multinode.analyse.prediction.break_even import beats, on_one_node
from multinode.analyse.prediction.predict import predict
from multinode.analyse.prediction.variants import vary
from multinode.core.job.deepspeed import DeepSpeedConfig, edit_deepspeed, parse_deepspeed, parse_deepspeed_edits
from multinode.errors import JobError, UsageError
from multinode.units import format_rate

__all__ = ["cluster_options", "setting_options", "strategy_options"]

_BYTES_PER_GIB = 1 << 30
_MIB = 1 << 20
_FP32_BYTES, _HALF_BYTES = 4, 2
_MULTIPLES = (2, 4, 8)
_REDUCED_ONCE = frozenset({Strategy.DDP, Strategy.ZERO1})
_DEEPSPEED = frozenset({Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3})
_ROUNDED = {
    "fp16": "gradients are rounded to 11 bits; one above 65504 overflows",
    "bf16": "gradients are rounded to 8 bits",
}
# Casting to half and back takes time that nothing has measured.
_CAST_DOUBT = 0.05
# torch's DDP fills buckets of 25 MiB; four times that is where a slow network no longer feels the number of messages.
_LARGE_BUCKET_MIB = 100
_FEW_CALLS = 2
_LORA_RANK = 8
_replace = msgspec.structs.replace


def setting_options(state: TrainingState) -> Iterator[TuningOption]:
    """Those that apply."""
    if state.scenario.layout.workers > 1:
        yield from _compress(state)
        yield from _accumulate(state)
        yield from _overlap(state)
        yield from _larger_buckets(state)
    yield from _larger_batch(state)
    yield from _lora(state)


def _compress(state: TrainingState) -> Iterator[TuningOption]:
    """DDP's hook: only there, and only where gradients travel as fp32."""
    settings, load = state.settings, state.calibration.work.load
    wide = load.gradient_bytes == _FP32_BYTES and state.scenario.gradient_factor == 1
    if state.scenario.strategy is not Strategy.DDP or settings.grad_compress is not None or not wide:
        return
    dtype = "bf16" if settings.precision == "bf16" else "fp16"
    yield TuningOption(
        name=f"gradients as {dtype}",
        kind="gradients",
        after=_replace(state, settings=_replace(settings, grad_compress=dtype), measured_samples_per_s=None),
        change=Change(grad_compress=dtype),
        meaning=_ROUNDED[dtype],
        # On a slow network the copies of all buckets are on their way at once.
        extra_gib=load.trainable * _HALF_BYTES / _BYTES_PER_GIB,
        doubt=_CAST_DOUBT,
    )


def _accumulate(state: TrainingState) -> Iterator[TuningOption]:
    helps = state.scenario.strategy in _REDUCED_ONCE
    for multiple in _MULTIPLES if helps else _MULTIPLES[1:2]:
        option = _accumulated(state, multiple)
        yield option if helps else _replace(option, remark=_reduced_always(state, option.after))


def _accumulated(state: TrainingState, multiple: int) -> TuningOption:
    accumulation = state.scenario.accumulation * multiple
    after = _replace(
        state,
        scenario=_replace(state.scenario, accumulation=accumulation),
        settings=_replace(state.settings, accumulation=accumulation),
        measured_samples_per_s=None,
    )
    change = Change(
        overrides=(f"gradient_accumulation_steps={accumulation}",),
        deepspeed=batch_edits(after),
    )
    return TuningOption(
        name=f"gradient accumulation {accumulation}",
        kind="accumulation",
        after=after,
        change=None if state.is_script else change,
        by_hand=f"{accumulation} micro-batches a step in your script, all but the last of them under no_sync()",
        meaning=_larger_global(state, multiple),
    )


def _reduced_always(before: TrainingState, after: TrainingState) -> str:
    strategy = before.scenario.strategy
    old, new = sample_bytes(before) / 1e6, sample_bytes(after) / 1e6
    engine = "DeepSpeed" if strategy in _DEEPSPEED else "FSDP"
    told = f"{old:.3g} MB a sample before and {new:.3g} MB after"
    if strategy is Strategy.ZERO2:
        told += ", less by the gathering of the updated parameters alone, which is once a step"
    return (
        f"under {strategy} accumulation does not cut the traffic of a sample as it does under DDP: {engine} reduces "
        f"the gradients of every micro-batch, {told}"
    )


def _overlap(state: TrainingState) -> Iterator[TuningOption]:
    deepspeed, load = state.deepspeed, state.calibration.work.load
    if deepspeed is None or state.scenario.strategy not in _DEEPSPEED or state.scenario.overlap:
        return
    # A second buffer of a whole bucket (stage_1_and_2.py); without a known size of the bucket none is told.
    elements = deepspeed.reduce_bucket_elements
    extra = None if elements is None else elements * load.gradient_bytes / _BYTES_PER_GIB
    after = _replace(
        state,
        scenario=_replace(state.scenario, overlap=True),
        settings=_replace(state.settings, overlap=True),
        deepspeed=_replace(deepspeed, overlap_comm=True),
        measured_samples_per_s=None,
    )
    yield TuningOption(
        name="overlap_comm",
        kind="overlap",
        after=after,
        change=None if state.is_script else Change(deepspeed=("zero_optimization.overlap_comm=true",)),
        by_hand='"overlap_comm": true under "zero_optimization" of your DeepSpeed JSON',
        extra_gib=extra,
        remark="one bucket as large as all gradients has nothing to hide behind: a smaller reduce_bucket_size helps it",
    )


def _larger_buckets(state: TrainingState) -> Iterator[TuningOption]:
    """Where a step makes many calls, each of which costs a message's time."""
    scenario, work = state.scenario, state.calibration.work
    if scenario.strategy is not Strategy.DDP or scenario.bucket_bytes is not None:
        return
    calls = [call for call in work.calls_of(scenario.strategy, scenario.layout) if call.collective == "all_reduce"]
    if sum(call.times for call in calls) <= _FEW_CALLS:
        return
    size = _LARGE_BUCKET_MIB * _MIB
    yield TuningOption(
        name=f"buckets of {_LARGE_BUCKET_MIB} MiB",
        kind="buckets",
        after=_replace(state, scenario=_replace(scenario, bucket_bytes=size), measured_samples_per_s=None),
        change=None if state.is_script else Change(overrides=(f"ddp_bucket_cap_mb={_LARGE_BUCKET_MIB}",)),
        by_hand=f"DistributedDataParallel(..., bucket_cap_mb={_LARGE_BUCKET_MIB})",
        remark="fewer messages, which begin later",
    )


def _larger_batch(state: TrainingState) -> Iterator[TuningOption]:
    batch = state.scenario.per_device_batch * 2
    after = _replace(
        state,
        scenario=_replace(state.scenario, per_device_batch=batch),
        settings=_replace(state.settings, per_device_batch=int(batch)),
        measured_samples_per_s=None,
    )
    change = Change(overrides=(f"per_device_train_batch_size={batch:g}",), deepspeed=batch_edits(after))
    yield TuningOption(
        name=f"per-device batch {batch:g}",
        kind="batch",
        # Of a batch that is no whole number none was asked for.
        after=after,
        change=None if state.is_script or batch != int(batch) else change,
        by_hand=f"{batch:g} samples a micro-batch in your script",
        meaning=_larger_global(state, 2),
        extra_gib=None,
        remark="activations take about twice the memory",
    )


def _lora(state: TrainingState) -> Iterator[TuningOption]:
    settings, subject = state.settings, state.subject
    if settings.method != "full" or subject is None or state.is_script:
        return
    try:
        calibration = vary(state.calibration, subject, strategy=state.scenario.strategy, method=f"lora:{_LORA_RANK}")
    except UsageError:
        # Of a model whose shape is not known nothing can be told.
        return
    trainable = calibration.work.load.trainable
    yield TuningOption(
        name=f"LoRA of rank {_LORA_RANK}",
        kind="method",
        after=_replace(
            state,
            calibration=calibration,
            settings=_replace(settings, method="lora", lora_rank=_LORA_RANK),
            measured_samples_per_s=None,
        ),
        change=Change(overrides=("finetuning_type=lora", f"lora_rank={_LORA_RANK}")),
        meaning=f"another training: an adapter of {trainable / 1e6:.3g} M parameters instead of the whole model",
    )


def _larger_global(state: TrainingState, multiple: int) -> str:
    samples = state.scenario.samples
    return (
        f"global batch {samples * multiple:g} instead of {samples:g}: fewer optimizer steps an epoch, and the learning "
        "rate may have to follow"
    )


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


# What cards and switches are sold with, Gbit/s.
_STANDARD_GBIT_PER_S = (1, 2.5, 5, 10, 25, 40, 100)
_MOST_LINKS = 4
_CLEARLY_FASTER = 1.2
_OWN_CORES = "each worker is taken to have a device, or cores, of its own"


def cluster_options(state: TrainingState) -> Iterator[TuningOption]:
    """Those that apply."""
    nodes = state.scenario.layout.nodes
    if nodes > 1:
        yield from _faster_links(state)
        yield _on_nodes(state, 1)
        yield from _full(state)
    if nodes > 2:  # noqa: PLR2004 - one fewer than two is one node, which is there already
        yield _on_nodes(state, nodes - 1)
    # Without a network that was measured or stated, nothing is known of a second node.
    if nodes > 1 or len(state.slots) > 1:
        yield _on_nodes(state, nodes + 1)


def _faster_links(state: TrainingState) -> Iterator[TuningOption]:
    link = state.scenario.link
    faster = [rate for rate in _STANDARD_GBIT_PER_S if rate > link.gbit_per_s * _CLEARLY_FASTER]
    worth = _worth(state)
    for rate in faster[:_MOST_LINKS]:
        scenario = _replace(state.scenario, link=_replace(link, gbit_per_s=float(rate)))
        told = format_rate(rate)
        yield TuningOption(
            name=f"a link of {told}",
            kind="link",
            after=_replace(state, scenario=scenario, measured_samples_per_s=None),
            by_hand=f"cards and a switch of {told} instead of {format_rate(link.gbit_per_s)}",
            meaning="nothing; the price of cards, a switch and cables",
            remark=worth,
        )


def _worth(state: TrainingState) -> str:
    """From which link on the nodes are worth it."""
    one = predict(state.calibration, on_one_node(state.calibration, state.scenario))
    nodes, workers = state.scenario.layout.nodes, one.scenario.layout.workers
    needed = beats(state.calibration, state.scenario, one)
    told = f"one with {workers} workers" if workers > state.scenario.layout.workers_per_node else "one"
    if needed.value is None:
        return f"{nodes} nodes beat {told} on no link"
    if needed.value >= state.scenario.link.gbit_per_s:
        return f"{nodes} nodes beat {told} from {format_rate(needed.value)} on"
    return f"{nodes} nodes beat {told} from {format_rate(needed.value)} on, which this link is above"


def _full(state: TrainingState) -> Iterator[TuningOption]:
    """Every node with as many workers as one node is known to have."""
    layout = state.scenario.layout
    workers = on_one_node(state.calibration, state.scenario).layout.workers
    if workers > layout.workers_per_node:
        placed = Layout(nodes=layout.nodes, workers_per_node=workers)
        yield _placed(state, placed, f"{workers} workers on each node", remark=_OWN_CORES)


def _on_nodes(state: TrainingState, nodes: int) -> TuningOption:
    """More nodes or fewer as they are; one alone has all the workers that it is known to have."""
    layout = state.scenario.layout
    if nodes == 1:
        return _placed(state, on_one_node(state.calibration, state.scenario).layout, "one node alone", remark="")
    placed = Layout(nodes=nodes, workers_per_node=layout.workers_per_node)
    return _placed(state, placed, f"{nodes} nodes", remark="")


def _placed(state: TrainingState, placed: Layout, name: str, *, remark: str) -> TuningOption:
    layout = state.scenario.layout
    before, after = (layout.workers * _samples_a_worker(state), placed.workers * _samples_a_worker(state))
    meaning = "nothing" if before == after else f"global batch {after:g} instead of {before:g}"
    compressed = state.settings.grad_compress
    then = _replace(
        state,
        scenario=_replace(state.scenario, layout=placed),
        # A single worker has nobody to send gradients to, and on one node they pass no network.
        settings=_replace(state.settings, grad_compress=compressed if placed.nodes > 1 else None),
        measured_samples_per_s=None,
    )
    changed = Change(
        deepspeed=batch_edits(then),
        nodes=placed.nodes if placed.nodes != layout.nodes else None,
        workers_per_node=placed.workers_per_node if placed.workers_per_node != layout.workers_per_node else None,
    )
    by_hand = _in_the_hostfile(state, placed, changed)
    return TuningOption(
        name=name,
        kind="nodes",
        after=then,
        change=None if by_hand else changed,
        by_hand=by_hand,
        meaning=meaning + ("; the other nodes are free for other work" if placed.nodes < layout.nodes else ""),
        remark=remark,
    )


def _in_the_hostfile(state: TrainingState, placed: Layout, change: Change) -> str:
    """What has to be written there before the options can be followed; empty where nothing has to."""
    if placed.nodes > max(state.scenario.layout.nodes, len(state.slots)):
        return f"a node more in the hostfile, as the others: {placed.nodes} in all"
    workers, slots = placed.workers_per_node, state.slots[: placed.nodes]
    short = [rank for rank, count in enumerate(slots) if count is not None and count < workers]
    if not short:
        return ""
    which = f"node {short[0]}" if len(short) == 1 else f"nodes {', '.join(map(str, short))}"
    return f"in the hostfile {workers} ids in gpus=, or slots={workers}, for {which}; then {options_of(change)}"


def _samples_a_worker(state: TrainingState) -> float:
    return state.scenario.per_device_batch * state.scenario.accumulation
