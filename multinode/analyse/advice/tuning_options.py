"""Tuning options: what could be changed in a training: its settings, its strategy, its cluster. Judges no gain."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec

from multinode.analyse.advice.training_state import DEEPSPEED, Change, TrainingState, TuningOption
from multinode.analyse.collectives.traffic import Layout, Strategy
from multinode.analyse.job.memory_need import COUNTED
from multinode.analyse.prediction.break_even import beats_one, describe_link, on_one_node
from multinode.analyse.prediction.variants import vary
from multinode.core.job.deepspeed import DeepSpeedConfig, edit_deepspeed, parse_deepspeed, parse_deepspeed_edits
from multinode.errors import JobError, UsageError
from multinode.units import format_count, format_rate

__all__ = ["cluster_options", "setting_options"]

_BYTES_PER_GIB, _MIB = 1 << 30, 1 << 20
_FP32_BYTES, _HALF_BYTES = 4, 2
_MULTIPLES = (2, 4, 8)
_ROUNDED = {
    "fp16": "gradients are rounded to 11 bits; one above 65504 overflows",
    "bf16": "gradients are rounded to 8 bits",
}
# Casting to half and back takes time that nothing has measured.
_CAST_DOUBT = 0.05
# torch's DDP fills buckets of 25 MiB; four times that is where a slow network no longer feels the number of messages.
_DDP_BUCKET_BYTES, _LARGE_BUCKET_MIB = 25 * _MIB, 100
_FEW_CALLS = 2
_LORA_RANK = 8
# From a strategy that communicates much to those that communicate less; each makes the same steps, and costs memory.
_MOVES = {
    Strategy.ZERO3: (Strategy.ZERO2, Strategy.DDP),
    Strategy.ZERO2: (Strategy.ZERO1, Strategy.DDP),
    Strategy.ZERO1: (Strategy.DDP,),
    Strategy.FSDP: (Strategy.DDP,),
    Strategy.SHARD_GRAD_OP: (Strategy.DDP,),
    Strategy.HYBRID_SHARD: (Strategy.DDP,),
}
_REDUCTIONS = frozenset({"all_reduce", "reduce_scatter", "broadcast"})
_STAGE = {Strategy.ZERO1: 1, Strategy.ZERO2: 2}
# What cards and switches are sold with, Gbit/s.
_STANDARD_GBIT_PER_S = (1, 2.5, 5, 10, 25, 40, 100)
_MOST_LINKS = 4
_CLEARLY_FASTER = 1.2
_replace = msgspec.structs.replace


def setting_options(state: TrainingState) -> Iterator[TuningOption]:
    """Of the training's own settings, those that apply; in a script's, nothing but what the hook does is for a machine.

    Raises:
        ValueError: the strategy gathers all parameters, and how many there are is not known.
    """
    several = (_compress, _accumulate, _overlap, _larger_buckets) if state.scenario.layout.workers > 1 else ()
    for options in (*several, _larger_batch, _lora, _strategies):
        for option in options(state):
            written = option.change is not None and (option.change.overrides or option.change.deepspeed)
            yield _replace(option, change=None) if state.is_script and written else option


def _compress(state: TrainingState) -> Iterator[TuningOption]:
    """DDP's hook: only there, and only where gradients travel as fp32."""
    settings, load = state.settings, state.calibration.work.load
    wide = load.gradient_bytes == _FP32_BYTES and state.scenario.gradient_factor == 1
    if state.scenario.strategy is Strategy.DDP and settings.grad_compress is None and wide:
        dtype = "bf16" if settings.precision == "bf16" else "fp16"
        yield TuningOption(
            name=f"gradients as {dtype}",
            kind="gradients",
            after=state.with_(settings={"grad_compress": dtype}),
            change=Change(grad_compress=dtype),
            meaning=_ROUNDED[dtype],
            # On a slow network the copies of all buckets are on their way at once.
            extra_gib=load.trainable * _HALF_BYTES / _BYTES_PER_GIB,
            doubt=_CAST_DOUBT,
        )


def _accumulate(state: TrainingState) -> Iterator[TuningOption]:
    calls = state.calibration.work.calls_of(state.scenario.strategy, state.scenario.layout)
    repeated = {call.collective for call in calls if call.per_micro_batch}
    for multiple in _MULTIPLES[1:2] if repeated else _MULTIPLES:
        more = {"accumulation": state.scenario.accumulation * multiple}
        after = state.with_(more, more)
        yield TuningOption(
            name=f"gradient accumulation {more['accumulation']}",
            kind="accumulation",
            after=after,
            change=Change(
                overrides=(f"gradient_accumulation_steps={more['accumulation']}",), deepspeed=after.batch_edits()
            ),
            by_hand=f"{more['accumulation']} micro-batches a step in your script, all but the last of them under "
            "no_sync()",
            meaning=_larger_global(state, multiple),
            remark=_repeated(repeated, state, after) if repeated else "",
        )


def _repeated(collectives: Collection[str], before: TrainingState, after: TrainingState) -> str:
    strategy = before.scenario.strategy
    engine = "DeepSpeed" if strategy in DEEPSPEED else "FSDP"
    gathers = ["gathers the parameters"] if "all_gather" in collectives else []
    reduces = ["reduces the gradients"] if _REDUCTIONS & set(collectives) else []
    told = f"{before.sample_mb():.3g} MB a sample before and {after.sample_mb():.3g} MB after"
    if strategy is Strategy.ZERO2:
        told += ", less by the gathering of the updated parameters alone, which is once a step"
    return (
        f"under {strategy} accumulation does not cut the traffic of a sample as it does under DDP: {engine} "
        f"{' and '.join([*gathers, *reduces])} of every micro-batch, {told}"
    )


def _overlap(state: TrainingState) -> Iterator[TuningOption]:
    deepspeed = state.deepspeed
    if deepspeed is not None and state.scenario.strategy in DEEPSPEED and not state.scenario.overlap:
        # A second buffer of a whole bucket (stage_1_and_2.py); without a known size of the bucket none is told.
        elements, width = deepspeed.reduce_bucket_elements, state.calibration.work.load.gradient_bytes
        on = {"overlap": True}
        yield TuningOption(
            name="overlap_comm",
            kind="overlap",
            after=state.with_(on, on, deepspeed=_replace(deepspeed, overlap_comm=True)),
            change=Change(deepspeed=("zero_optimization.overlap_comm=true",)),
            by_hand='"overlap_comm": true under "zero_optimization" of your DeepSpeed JSON',
            extra_gib=None if elements is None else elements * width / _BYTES_PER_GIB,
            remark="one bucket as large as all gradients has nothing to hide behind: a smaller reduce_bucket_size "
            "helps it",
        )


def _larger_buckets(state: TrainingState) -> Iterator[TuningOption]:
    """Where a step makes many calls, each of which costs a message's time."""
    scenario, work = state.scenario, state.calibration.work
    if scenario.strategy is not Strategy.DDP or scenario.bucket_bytes is not None:
        return
    calls = [call for call in work.calls_of(scenario.strategy, scenario.layout) if call.collective == "all_reduce"]
    if sum(call.times for call in calls) > _FEW_CALLS:
        yield TuningOption(
            name=f"buckets of {_LARGE_BUCKET_MIB} MiB",
            kind="buckets",
            after=state.with_({"bucket_bytes": _LARGE_BUCKET_MIB * _MIB}),
            change=Change(overrides=(f"ddp_bucket_cap_mb={_LARGE_BUCKET_MIB}",)),
            by_hand=f"DistributedDataParallel(..., bucket_cap_mb={_LARGE_BUCKET_MIB})",
            remark="fewer messages, which begin later",
        )


def _larger_batch(state: TrainingState) -> Iterator[TuningOption]:
    batch = state.scenario.per_device_batch * 2
    after = state.with_({"per_device_batch": batch}, {"per_device_batch": int(batch)})
    change = Change(overrides=(f"per_device_train_batch_size={batch:g}",), deepspeed=after.batch_edits())
    yield TuningOption(
        name=f"per-device batch {batch:g}",
        kind="batch",
        after=after,
        # Of a batch that is no whole number none was asked for.
        change=change if batch == int(batch) else None,
        by_hand=f"{batch:g} samples a micro-batch in your script",
        meaning=_larger_global(state, 2),
        extra_gib=None,
        remark="activations take about twice the memory",
    )


def _lora(state: TrainingState) -> Iterator[TuningOption]:
    if state.settings.method != "full" or state.subject is None or state.is_script:
        return
    try:
        calibration = vary(
            state.calibration, state.subject, strategy=state.scenario.strategy, method=f"lora:{_LORA_RANK}"
        )
    except UsageError:
        # Of a model whose shape is not known nothing can be told.
        return
    trainable = calibration.work.load.trainable
    yield TuningOption(
        name=f"LoRA of rank {_LORA_RANK}",
        kind="method",
        after=state.with_(settings={"method": "lora", "lora_rank": _LORA_RANK}, calibration=calibration),
        change=Change(overrides=("finetuning_type=lora", f"lora_rank={_LORA_RANK}")),
        meaning=f"another training: an adapter of {trainable / 1e6:.3g} M parameters instead of the whole model",
    )


def _larger_global(state: TrainingState, multiple: int) -> str:
    samples = state.scenario.samples
    return (
        f"global batch {samples * multiple:g} instead of {samples:g}: fewer optimizer steps an epoch, and the learning "
        "rate may have to follow"
    )


def _strategies(state: TrainingState) -> Iterator[TuningOption]:
    """The moves that may pay."""
    today = state.scenario.strategy
    for strategy in _MOVES.get(today, ()) if state.scenario.layout.workers > 1 else ():
        # ZeRO-1 and ZeRO-2 send alike unless micro-batches are accumulated.
        if strategy is Strategy.ZERO1 and state.scenario.accumulation == 1:
            continue
        if strategy in _STAGE:
            change = Change(deepspeed=(f"zero_optimization.stage={_STAGE[strategy]}",))
            by_hand = f'"stage": {_STAGE[strategy]} under "zero_optimization" of your DeepSpeed JSON'
        else:
            change = Change(overrides=("deepspeed=null",) if today in DEEPSPEED else ("fsdp=null", "fsdp_config=null"))
            by_hand = "wrap the model in torch's DistributedDataParallel in your script"
        try:
            after = _under(state, strategy, change)
        except UsageError:
            # Nobody can tell what it would send.
            continue
        option = TuningOption(
            name=f"{strategy} instead of {today}", kind="strategy", after=after, change=change, by_hand=by_hand
        )
        yield _replace(option, remark=_memory(state, option))


def _under(state: TrainingState, strategy: Strategy, change: Change) -> TrainingState:
    calibration, scenario = state.calibration, {"strategy": strategy, "overlap": state.scenario.overlap}
    deepspeed = None if strategy is Strategy.DDP else _edited(state, change)
    if state.subject is not None:
        calibration = vary(calibration, state.subject, strategy=strategy)
    if strategy is Strategy.DDP:
        known = strategy in calibration.work.calls
        scenario |= {"bucket_bytes": None if known else _DDP_BUCKET_BYTES, "overlap": True}
    elif deepspeed is not None:
        scenario["overlap"] = deepspeed.overlap_comm
    settings = {"strategy": str(strategy), "overlap": scenario["overlap"]}
    return state.with_(scenario, settings, calibration=calibration, deepspeed=deepspeed)


def _edited(state: TrainingState, change: Change) -> DeepSpeedConfig | None:
    """Its DeepSpeed JSON with the change: what it leaves out, stage 3 has otherwise than stage 2."""
    job = state.subject.job if state.subject is not None else None
    if job is None or job.deepspeed_text is None:
        return state.deepspeed
    try:
        return parse_deepspeed(edit_deepspeed(job.deepspeed_text, parse_deepspeed_edits(change.deepspeed)))
    except JobError:
        return state.deepspeed


def _memory(before: TrainingState, option: TuningOption) -> str:
    """What it takes, and whether the GPUs have room for it, as far as that can be told."""
    old, new, memory = before.memory_need(), option.after.memory_need(), before.gpu_memory
    if old is None or new is None:
        return "whether a worker's memory holds it is not known: the model's size is not"
    needed = f"the model's states take {new.total_gib:.3g} GiB of a worker instead of {old.total_gib:.3g} ({COUNTED})"
    if memory is None:
        return needed
    fit = "do not fit" if option.fits(before) is False else "fit"
    told = f"they {fit} a GPU of {memory.total_gib:.3g} GiB"
    expected = option.expected_gib(before)
    if memory.peak_gib is not None and expected is not None:
        return f"{needed}; with the activations that were measured, {expected:.3g} GiB, {told}"
    return f"{needed}; {told}" + (", if activations find room beside them" if fit == "fit" else "")


def cluster_options(state: TrainingState) -> Iterator[TuningOption]:
    """A faster link, a node more or fewer, one node alone, every node full: those that apply. Most take a person."""
    layout = state.scenario.layout
    nodes, workers = layout.nodes, layout.workers_per_node
    alone = on_one_node(state.calibration, state.scenario).layout
    if nodes > 1:
        yield from _faster_links(state)
        yield _placed(state, alone, "one node alone")
        if alone.workers > workers:
            full = Layout(nodes=nodes, workers_per_node=alone.workers)
            remark = "each worker is taken to have a device, or cores, of its own"
            yield _placed(state, full, f"{alone.workers} workers on each node", remark)
    # One fewer than two is one node; and without a network that was measured or stated nothing is known of a second.
    fewer = (nodes - 1,) if nodes > 2 else ()  # noqa: PLR2004
    more = (nodes + 1,) if nodes > 1 or len(state.slots) > 1 else ()
    for count in (*fewer, *more):
        yield _placed(state, Layout(nodes=count, workers_per_node=workers), f"{count} nodes")


def _faster_links(state: TrainingState) -> Iterator[TuningOption]:
    link = state.scenario.link
    faster = [rate for rate in _STANDARD_GBIT_PER_S if rate > link.gbit_per_s * _CLEARLY_FASTER]
    worth = _worth(state)
    for rate in faster[:_MOST_LINKS]:
        told = format_rate(rate)
        yield TuningOption(
            name=f"a link of {told}",
            kind="link",
            after=state.with_({"link": _replace(link, gbit_per_s=float(rate))}),
            by_hand=f"cards and a switch of {told} instead of {format_rate(link.gbit_per_s)}",
            meaning="nothing; the price of cards, a switch and cables",
            remark=worth,
        )


def _worth(state: TrainingState) -> str:
    """From which link on the nodes are worth it."""
    needed, asked = beats_one(state.calibration, state.scenario)
    workers = format_count(asked.layout.workers_per_node, "worker")
    above = needed.high is not None and needed.high < state.scenario.link.gbit_per_s
    told = f"break-even of {asked.layout.nodes} nodes with {workers} each against one: {describe_link(needed)}"
    return f"{told}, which this link is above" if above else told


def _placed(state: TrainingState, placed: Layout, name: str, remark: str = "") -> TuningOption:
    scenario, layout = state.scenario, state.scenario.layout
    before, after = (one.workers * scenario.per_device_batch * scenario.accumulation for one in (layout, placed))
    meaning = "nothing" if before == after else f"global batch {after:g} instead of {before:g}"
    # A single worker has nobody to send gradients to, and on one node they pass no network.
    compressed = state.settings.grad_compress if placed.nodes > 1 else None
    then = state.with_({"layout": placed}, {"grad_compress": compressed})
    change = Change(
        deepspeed=then.batch_edits(),
        nodes=placed.nodes if placed.nodes != layout.nodes else None,
        workers_per_node=placed.workers_per_node if placed.workers_per_node != layout.workers_per_node else None,
    )
    by_hand = _in_the_hostfile(state, placed, change)
    return TuningOption(
        name=name,
        kind="nodes",
        after=then,
        change=None if by_hand else change,
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
    return f"in the hostfile {workers} ids in gpus=, or slots={workers}, for {which}; then {change.options}"
