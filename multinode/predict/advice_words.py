"""Advice in words: how a change is made, what else it changes, why it pays; and what the figures do not cover."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from multinode.job.memory_need import COUNTED
from multinode.predict.advice import NOTICEABLE, Advice, RankedOption
from multinode.predict.break_even import beats_one
from multinode.predict.forecast import PredictedScenario
from multinode.predict.needed_words import link_words
from multinode.predict.training_state import DEEPSPEED, TrainingState, TuningOption
from multinode.predict.tuning_options import lacking_nodes, repeated_calls, script_ms, short_nodes
from multinode.predict.words import scenario_with_words
from multinode.profile.summary_sheets import SMALLER
from multinode.traffic.traffic import Strategy
from multinode.units import format_count, format_rate

_NOTHING, _SAME = "nothing", "the training stays as it is"
_MIB = 1 << 20
_REDUCTIONS = frozenset({"all_reduce", "reduce_scatter", "broadcast"})
# Nobody waits for more than this part of a step for a node that still takes part.
_MOST_WAIT = 0.9
_ROUNDED = {
    "fp16": "gradients are rounded to 11 bits; one above 65504 overflows",
    "bf16": "gradients are rounded to 8 bits",
}

# What papers publish of the loss; none of it was measured here.
_APART = "another algorithm, whose loss may be worse: nodes train apart between averages"
_RISKS = {
    "averaging": f"{_APART}. Published: mini-batch SGD's rate for convex losses (Stich 2019, arXiv:1805.09767), a "
    "trade-off with accuracy for networks (Lin et al. 2020, arXiv:1808.07217)",
    "outer": f"{_APART}. Published: on par with synchronous training on C4, 8 workers (Douillard et al. 2023, "
    "arXiv:2311.08105)",
    "script": "without average_tokens_across_devices each worker's mean loss weighs alike, however many tokens it has",
}
_LOW_RANK = (
    "gradients are approximated, and the loss may be worse. Published: test accuracy on par with SGD for convolutional "
    "networks and LSTMs (Vogels et al. 2019, arXiv:1905.13727)"
)


def with_words(ranked: Sequence[RankedOption], now: PredictedScenario) -> tuple[Advice, ...]:
    """Every advice with its words; `now` is the training as it stands."""
    return tuple(
        msgspec.structs.replace(
            advice,
            outlook=scenario_with_words(advice.outlook),
            meaning=_meaning(option),
            command=_command(option),
            why=_why(now, option, advice.outlook),
        )
        for advice, option in ranked
    )


def advice_notes(today: TrainingState, now: PredictedScenario) -> tuple[str, ...]:
    """What the figures do not cover, a sentence each."""
    notes = list(today.calibration.notes)
    waiting = today.scenario.accumulation * today.calibration.costs.data_ms
    if waiting > NOTICEABLE * now.step_time_ms:
        notes.append(
            f"a step waits {waiting:.3g} ms ({waiting / now.step_time_ms:.0%}) for batches: more workers may load them "
            "(--set dataloader_num_workers=4); what that gives cannot be predicted"
        )
    calls_ms = script_ms(today)
    # They stay in every step where the rest of its communication becomes rare.
    if calls_ms > NOTICEABLE * (now.step_time_ms - now.parts.exposed_ms):
        notes.append(
            f"{_per_step(today)} small collectives of the script itself take {calls_ms:.3g} ms of a step, a round trip "
            f"each, also where nodes average less often; {SMALLER}"
        )
    notes += [
        f"the others wait {one.late_ms:.3g} ms per step ({one.share:.0%}) for {one.node}: {one.hint or one.cause}; "
        f"without that wait the training would be up to {1 / (1 - min(one.share, _MOST_WAIT)):.2f}x faster"
        for one in today.stragglers
    ]
    return tuple(notes)


def _command(option: TuningOption) -> str:
    """The options of `multinode launch`, or what a person does."""
    return option.change.options if option.change is not None else _BY_HAND[option.kind](option)


def _strategy_by_hand(option: TuningOption) -> str:
    stage = {Strategy.ZERO1: 1, Strategy.ZERO2: 2}.get(option.after.scenario.strategy)
    if stage is None:
        return "wrap the model in torch's DistributedDataParallel in your script"
    return f'"stage": {stage} under "zero_optimization" of your DeepSpeed JSON'


def _hostfile_by_hand(option: TuningOption) -> str:
    placed = option.after.scenario.layout
    if lacking_nodes(option.before, placed):
        return f"add a node like the others to the hostfile: {placed.nodes} in all"
    short, workers = short_nodes(option.before, placed), placed.workers_per_node
    which = f"node {short[0]}" if len(short) == 1 else f"nodes {', '.join(map(str, short))}"
    options = option.by_hand.options if option.by_hand is not None else ""
    return f"in the hostfile {workers} ids in gpus=, or slots={workers}, for {which}; then {options}"


def _link_by_hand(option: TuningOption) -> str:
    before, after = (format_rate(one.scenario.link.gbit_per_s) for one in (option.before, option.after))
    return f"NICs and a switch of {after} instead of {before}"


_BY_HAND: dict[str, Callable[[TuningOption], str]] = {
    "accumulation": lambda option: (
        f"{option.after.scenario.accumulation} micro-batches per step in your script, all but the last of them under "
        "no_sync()"
    ),
    "overlap": lambda _: '"overlap_comm": true under "zero_optimization" of your DeepSpeed JSON',
    "buckets": lambda option: (
        f"DistributedDataParallel(..., bucket_cap_mb={(option.after.scenario.bucket_bytes or 0) / _MIB:g})"
    ),
    "batch": lambda option: f"{option.after.scenario.per_device_batch:g} samples per micro-batch in your script",
    "script": lambda _: SMALLER,
    "strategy": _strategy_by_hand,
    "link": _link_by_hand,
    "nodes": _hostfile_by_hand,
}


def _meaning(option: TuningOption) -> str:
    """What it changes beside the speed."""
    if option.parts:
        meanings = [meaning for one in option.parts if (meaning := _meaning(one)) != _NOTHING]
        return "; ".join(meanings) or _NOTHING
    before, after = option.before.scenario, option.after.scenario
    if option.kind in _RISKS or option.kind == "gradients":
        sent = option.after.settings.grad_compress or "bf16"
        return _RISKS.get(option.kind) or _ROUNDED.get(sent, _LOW_RANK)
    if option.kind == "method":
        trainable = option.after.calibration.work.load.trainable
        return f"another training: an adapter of {trainable / 1e6:.3g} M parameters instead of the whole model"
    if option.kind == "link":
        return f"{_SAME}; the cost is NICs, a switch and cables; it cannot be tried from here"
    batch = _NOTHING
    if before.samples != after.samples:
        batch = f"global batch {after.samples:g} instead of {before.samples:g}"
    if option.kind in {"accumulation", "batch"}:
        return f"{batch}: fewer optimizer steps per epoch, and the learning rate may have to follow"
    free = option.kind == "nodes" and after.layout.nodes < before.layout.nodes
    return f"{_SAME if batch == _NOTHING else batch}; the other nodes are free for other work" if free else batch


def _why(now: PredictedScenario, option: TuningOption, then: PredictedScenario) -> str:
    """The same quantities before and after."""
    told = f"{then.samples_per_s:.3g} samples/s instead of {now.samples_per_s:.3g}"
    if then.nodes > 1:
        sent, before = (f"{one.sample_mb():.3g} MB" for one in (option.after, option.before))
        was = f" instead of {before}" if sent != before else ""
        told += (
            f"; a worker sends {sent} per sample{was}, and {_exposed(then):.0%} of the step is exposed communication "
            f"instead of {_exposed(now):.0%}"
        )
    # What accumulation alone does not cut, it may cut together with another strategy.
    parts = [one for one in option.parts if one.kind != "accumulation"] or ([] if option.parts else [option])
    remarks = [remark for one in parts if one.kind in _REMARKS and (remark := _REMARKS[one.kind](one))]
    return "; ".join([told, *remarks])


def _exposed(outlook: PredictedScenario) -> float:
    return outlook.parts.exposed_ms / outlook.step_time_ms


def _repeated(option: TuningOption) -> str:
    """Why accumulation does not cut the traffic where micro-batches communicate; else empty."""
    collectives, strategy = repeated_calls(option.before), option.before.scenario.strategy
    if not collectives:
        return ""
    engine = "DeepSpeed" if strategy in DEEPSPEED else "FSDP"
    gathers = ["gathers the parameters"] if "all_gather" in collectives else []
    reduces = ["reduces the gradients"] if _REDUCTIONS & set(collectives) else []
    told = f"{option.before.sample_mb():.3g} MB per sample before and {option.after.sample_mb():.3g} MB after"
    if strategy is Strategy.ZERO2:
        told += ", less only by the gathering of the updated parameters, once per step"
    return (
        f"under {strategy} accumulation does not cut the traffic of a sample as it does under DDP: {engine} "
        f"{' and '.join([*gathers, *reduces])} of every micro-batch, {told}"
    )


def _memory(option: TuningOption) -> str:
    """What it takes, and whether the GPUs have room for it, as far as that is known."""
    old, new, memory = option.before.memory_need(), option.after.memory_need(), option.before.gpu_memory
    if old is None or new is None:
        return "whether it fits a worker's memory is unknown, as the model's size is"
    needed = f"the model's states take {new.total_gib:.3g} GiB per worker instead of {old.total_gib:.3g} ({COUNTED})"
    if memory is None:
        return needed
    fit = "do not fit" if option.fits is False else "fit"
    told, expected = f"they {fit} a GPU of {memory.total_gib:.3g} GiB", option.expected_gib
    if memory.peak_gib is not None and expected is not None:
        return f"{needed}; with the activations that were measured, {expected:.3g} GiB, {told}"
    return f"{needed}; {told}" + (", if activations fit beside them" if fit == "fit" else "")


def _worth(option: TuningOption) -> str:
    """From which link on the nodes are worth it."""
    needed, asked = beats_one(option.before.calibration, option.before.scenario)
    workers = format_count(asked.layout.workers_per_node, "worker")
    above = needed.high is not None and needed.high < option.before.scenario.link.gbit_per_s
    told = f"break-even of {asked.layout.nodes} nodes with {workers} each against 1 node: {link_words(needed)}"
    return f"{told}, which this link is above" if above else told


def _full(option: TuningOption) -> str:
    before, after = option.before.scenario.layout, option.after.scenario.layout
    is_full = after.nodes == before.nodes and after.workers_per_node > before.workers_per_node
    return "assumes a device, or cores, for every worker" if is_full else ""


def _per_step(state: TrainingState) -> str:
    return f"{sum(call.times for call in state.calibration.script):.3g}"


# What the figures do not say.
_REMARKS: dict[str, Callable[[TuningOption], str]] = {
    "accumulation": _repeated,
    "overlap": lambda _: (
        "a single bucket as large as all gradients has nothing to overlap with: a smaller reduce_bucket_size helps"
    ),
    "buckets": lambda _: "fewer messages, which begin later",
    "batch": lambda _: "activations take about twice the memory",
    "strategy": _memory,
    "link": _worth,
    "nodes": _full,
    "script": lambda option: (
        f"{_per_step(option.after)} small collectives per step instead of {_per_step(option.before)}, a round trip each"
    ),
}
