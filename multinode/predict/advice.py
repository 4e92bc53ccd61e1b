"""Advice: changes ranked by predicted gain, with their costs. Pure.

Calls `predict` for each option and the best pairs; the options come from elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from multinode.errors import UsageError
from multinode.figures.figure import Figure
from multinode.findings.finding import Finding
from multinode.findings.rule import RuleGroup
from multinode.job.job_files import Change
from multinode.levers.levers import Levers
from multinode.model.workload import JobSettings
from multinode.predict.back_test import BackTest
from multinode.predict.break_even import gain
from multinode.predict.forecast import PredictedScenario
from multinode.predict.step_efficiency import samples_ratio, step_efficiency
from multinode.predict.training_state import TrainingState, TuningOption
from multinode.predict.tuning_options import EFFECTS, cluster_options, per_step, script_ms, setting_options
from multinode.profile.summary_sheets import SMALLER
from multinode.records.invocation import Invocation
from multinode.stats.estimate import Bounds, Estimate, exactly
from multinode.traffic.step_calls import Strategy
from multinode.units import format_figure

# Kinds of settings that combine; at most one of each kind.
_COMBINED = frozenset({"gradients", "accumulation", "strategy", "overlap"})
_MOST_PAIRS = 2
# Maximum accumulation of a combination: beyond it, the optimization is a different one.
_ACCUMULATED = (1, 4)
NOTICEABLE = 0.05
"""Fraction of a step or gain that a user would notice."""
# A smaller gain is not listed, unless it shows what does not help.
_WORTH_A_LINE = 0.01
_ALWAYS = frozenset({"accumulation", "strategy", "gradients", "nodes"})


GAINS = RuleGroup("Advice: what a change gains")
_SPEED = GAINS.rule(
    "speed",
    about="the speed with and without the change",
    message="{then} samples/s instead of {now}",
    figures=("samples_per_s_now", "samples_per_s"),
)
_TRAFFIC = GAINS.rule(
    "traffic",
    about="traffic of a worker with and without the change",
    message="a worker sends {sent} MB per sample{was}; exposed communication is {exposed_share:.0%} of the step "
    "instead of {exposed_share_now:.0%}",
    figures=("sample_mb_now", "sample_mb", "exposed_share_now", "exposed_share"),
)
_DEALT = GAINS.rule(
    "dealt-samples",
    about="number of samples per worker, if samples are distributed by node speed",
    message="samples per step for each worker on {node}: {dealt} instead of {equal}",
    figures=("samples_now", "samples"),
)
_LARGER_SHARES = EFFECTS.rule(
    "larger-shares",
    about="samples distributed by node speed",
    message="faster nodes get larger micro-batches, which need more memory for activations",
)


NOTES = RuleGroup("Advice: delays that none of the predicted changes removes")
_LOADER_WAIT = NOTES.rule(
    "loader-wait",
    about="a step that waits for batches",
    message="a step waits {data_ms} ({share:.0%}) for batches",
    hint="try more data loader workers (--set dataloader_num_workers=4); the gain cannot be predicted",
    figures=("data_ms", "share"),
)
_SCRIPT_CALLS = NOTES.rule(
    "small-collectives",
    about="small collectives that the script calls in every step",
    message="the script calls {count} small collectives per step, which take {calls_ms} in total (one round trip "
    "each). They remain even if nodes average their parameters less often",
    hint=SMALLER,
    figures=("calls", "calls_ms"),
)
_STRAGGLER = NOTES.rule(
    "straggler",
    about="a node that the others wait for",
    message="the other nodes wait {late_ms} per step ({share:.0%}) for {node}; without this wait, the training would "
    "be up to {faster:.2f}x faster",
    hint="{fix!s}",
    figures=("late_ms", "share", "faster"),
)
# A node that still takes part delays the others by no more than this share of a step.
_MOST_WAIT = 0.9


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """One change and its effect."""

    name: str  # unique, for people: `gradient accumulation 4`
    kind: str  # the changed setting: `link`, `accumulation`, `nodes` and so on
    gain: Estimate  # samples/s over the current rate, predicted or measured
    measured: bool = False  # whether both rates were measured, so that nothing is predicted
    # samples/s over those of one node with the current settings; None if the training runs on one node
    against_one_node: Estimate | None = None
    # of averaging between nodes: steps of one node over its own to the same loss and per node, the most ever measured;
    # None of other changes
    step_efficiency: float | None = None
    # samples to the same loss over those of the current training, the fewest and the most measured
    samples_ratio: Bounds = (1.0, 1.0)
    outlook: PredictedScenario  # the predicted scenario
    memory_gib: float | None = None  # additional memory per worker, or less; None if unknown
    fits: bool | None = None  # whether it fits on the GPUs; None if unknown
    effects: tuple[Finding, ...] = ()  # on the training or its costs
    change: Change | None = None  # how multinode applies it; None if it needs manual work (a switch, a NIC)
    command: str = ""  # the exact command or YAML lines for a person
    why: tuple[Finding, ...] = ()  # its effects on speed and traffic, and other factors


CHANGE = Figure[str]("name", "change", about="change to the training job")


class Recommendations(msgspec.Struct, frozen=True, kw_only=True):
    """The document that `advise --json` prints."""

    schema: str = "multinode.advise/3"
    runs: tuple[str, ...] = ()  # ids of the stored runs that the predictions start from
    sources: tuple[str, ...] = ()  # doubts, one sentence each
    settings: JobSettings = JobSettings()  # of the current training
    today: PredictedScenario  # the current training, predicted
    measured_samples_per_s: float | None = None  # of the current training; None if not measured
    advice: tuple[Advice, ...]  # best first; changes that do not fit on the GPUs last
    notes: tuple[Finding, ...] = ()  # assumptions, and changes without a prediction
    back_test: BackTest | None = None  # of the model
    command: Invocation | None = None  # the command line of the training; None if nobody typed one


class RankedOption(NamedTuple):
    """An advice and its option."""

    advice: Advice
    option: TuningOption


def rank_options(today: TrainingState) -> tuple[RankedOption, ...]:
    """All applicable options and the best pairs, by predicted gain, largest first.

    One node costs nothing: if it is faster than the current training, only changes that are certainly faster rank above
    it. Changes that do not fit the GPUs come last.

    Raises:
        UsageError: the traffic of the current training is unknown.
    """
    try:
        options = [*setting_options(today), *cluster_options(today)]
        now = today.outlook()
        given = [_advice(today, now, option) for option in options]
        given += [_advice(today, now, pair) for pair in _best_pairs(today, options, given)]
        given.append(_balanced(today, now))
    except ValueError as error:
        raise UsageError(
            f"no advice is possible: {error}", hint="use a run whose model has a readable config.json"
        ) from error
    ranked = [option for option in given if option is not None]
    return tuple(
        sorted(
            ranked,
            key=lambda option: (
                option.advice.fits is False,
                _after_one_node(option, ranked),
                -option.advice.gain.value,
            ),
        )
    )


def _after_one_node(option: RankedOption, ranked: Sequence[RankedOption]) -> int:
    """0 above one node, 1 for it, 2 below it; all equal if it is no option or no faster than now."""
    alone = next((each for each in ranked if _is_one_node(each.option)), None)
    if alone is None or not pays(alone.advice):
        return 0
    if option is alone:
        return 1
    beside = against_one_node_to_a_loss(option.advice)
    return 0 if beside is not None and beside.low > 1 else 2


def pays(advice: Advice) -> bool:
    """Whether the gain is noticeable, of a measured one beyond the noise, and the change fits as far as known."""
    is_noise = advice.measured and advice.gain.low < 1
    gains = advice.gain.value >= 1 + NOTICEABLE and not is_noise
    return gains and advice.fits is not False and not is_late(advice)


def is_late(advice: Advice) -> bool:
    """Whether averaging reaches a loss certainly after one node, or not noticeably before the current training.

    Even if it saves as many steps as it ever did.
    """
    gains_speed_alone = gain_to_a_loss(advice) < 1 + NOTICEABLE <= advice.gain.value
    return advice.step_efficiency is not None and (gains_speed_alone or not may_beat_one_node(advice))


def gain_to_a_loss(advice: Advice) -> float:
    """Its gain at the fewest samples to the same loss that were measured."""
    return advice.gain.value / advice.samples_ratio[0]


def against_one_node_to_a_loss(advice: Advice) -> Estimate | None:
    """Its speed beside one node's, at the largest measured efficiency of its steps; None on one node."""
    beside, efficiency = advice.against_one_node, advice.step_efficiency
    return beside if beside is None or efficiency is None else exactly(efficiency) * beside


def may_beat_one_node(advice: Advice) -> bool:
    """Whether it may reach a loss before one node does, allowing for the error of the prediction."""
    beside = against_one_node_to_a_loss(advice)
    return beside is None or beside.high >= 1


def is_one_node(advice: Advice) -> bool:
    """Whether it is the current training on one node."""
    return advice.kind == "nodes" and advice.outlook.nodes == 1


def shortlist(advice: Sequence[Advice], most: int) -> tuple[Advice, ...]:
    """The best changes of each kind, at most this many."""
    kinds: set[str] = set()
    kept: list[Advice] = []
    for candidate in advice:
        is_new = not candidate.kind or candidate.kind not in kinds
        if is_new and len(kept) < most:
            kept.append(candidate)
        kinds.add(candidate.kind)
    return tuple(kept)


def _advice(today: TrainingState, now: PredictedScenario, option: TuningOption) -> RankedOption | None:
    ratio, beside = _gain(today, option), _beside_one_node(today, option)
    if ratio.value < 1 + _WORTH_A_LINE and option.kind not in _ALWAYS:
        return None
    then = option.after.outlook()
    averaging = option.change.levers.averaging if option.change is not None else None
    advice = Advice(
        name=option.name,
        kind=option.kind,
        gain=ratio,
        measured=_is_measured(today, option),
        against_one_node=beside,
        step_efficiency=step_efficiency(averaging)[1] if averaging is not None else None,
        samples_ratio=samples_ratio(option.before.settings.levers.averaging, option.after.settings.levers.averaging),
        outlook=then,
        memory_gib=option.more_memory_gib,
        fits=option.fits,
        effects=option.effects,
        change=option.change,
        command=option.change.options if option.change is not None else option.person,
        why=tuple(_why(now, option, then)),
    )
    return RankedOption(advice, option)


def _balanced(today: TrainingState, now: PredictedScenario) -> RankedOption | None:
    """Samples by the nodes' speed: what that gives was found where the run was summed up, and not by the model."""
    balance = today.balance
    if balance is None:
        return None
    levers = today.settings.levers
    is_ddp = today.scenario.strategy is Strategy.DDP and levers.beside(Levers(balance=balance.balance)) == levers
    if not is_ddp or levers.balance is not None or balance.gain.value < 1 + _WORTH_A_LINE:
        return None
    balanced = balance.gain
    change = Change(levers=Levers(balance=balance.balance))
    option = TuningOption(
        name="samples by speed",
        kind="balance",
        before=today,
        after=today.with_(),
        change=change,
        extra_gib=None,
        effects=(_LARGER_SHARES.found(None),),
    )
    beside = _beside_one_node(today, option)
    then = msgspec.structs.replace(
        now,
        step_time_ms=now.step_time_ms / balanced.value,
        samples_per_s=now.samples_per_s * balanced,
    )
    paces = (
        _DEALT.found(
            speed.node,
            dealt=format_figure(speed.balanced_samples),
            samples=speed.balanced_samples,
            equal=format_figure(speed.samples),
            samples_now=speed.samples,
        )
        for speed in balance.nodes
    )
    advice = Advice(
        name=option.name,
        kind=option.kind,
        gain=balanced,
        against_one_node=beside * balanced if beside is not None else None,
        outlook=then,
        fits=option.fits,
        effects=option.effects,
        change=change,
        command=change.options,
        why=(_speed(now, then), *paces),
    )
    return RankedOption(advice, option)


def _why(now: PredictedScenario, option: TuningOption, then: PredictedScenario) -> Iterator[Finding]:
    yield _speed(now, then)
    if then.nodes > 1:
        after_mb, before_mb = option.after.sample_mb(), option.before.sample_mb()
        sent, before = format_figure(after_mb), format_figure(before_mb)
        yield _TRAFFIC.found(
            None,
            sent=sent,
            sample_mb=after_mb,
            was=f" instead of {before} MB" if sent != before else "",
            sample_mb_now=before_mb,
            exposed_share=_exposed(then),
            exposed_share_now=_exposed(now),
        )
    # Accumulation may help together with another strategy.
    parts = [part for part in option.parts if part.kind != "accumulation"] or ([] if option.parts else [option])
    for part in parts:
        yield from part.remarks(part)


def _speed(now: PredictedScenario, then: PredictedScenario) -> Finding:
    before, after = now.samples_per_s.value, then.samples_per_s.value
    return _SPEED.found(
        None,
        now=format_figure(before),
        samples_per_s_now=before,
        then=format_figure(after),
        samples_per_s=after,
    )


def _exposed(outlook: PredictedScenario) -> float:
    return outlook.parts.exposed_ms / outlook.step_time_ms


def _gain(today: TrainingState, option: TuningOption) -> Estimate:
    then, now = option.after.prediction(), today.prediction()
    ratio = gain(then, now, measured=today.measured_samples_per_s, doubt=option.doubt)
    if not today.measured_samples_per_s:
        return ratio
    if _is_measured(today, option) and today.single_samples_per_s:
        if (seen := today.single_gain) is not None:
            return seen
        value, off = today.single_samples_per_s / today.measured_samples_per_s, 1 + max(then.error, now.error)
        return Estimate(value=value, low=value / off, high=value * off)
    off = today.prediction().samples_per_s / today.measured_samples_per_s
    return Estimate(value=ratio.value, low=min(ratio.low, ratio.value * off), high=max(ratio.high, ratio.value * off))


def _beside_one_node(today: TrainingState, option: TuningOption) -> Estimate | None:
    if today.scenario.layout.nodes == 1:
        return None
    if _is_one_node(option):
        return exactly(1.0)
    alone = next(option for option in cluster_options(today) if _is_one_node(option))
    then, now = option.after.prediction(), alone.after.prediction()
    measured = now.samples_per_s if _is_measured(today, alone) else None
    return gain(then, now, measured=measured, doubt=option.doubt)


def _is_one_node(option: TuningOption) -> bool:
    return option.kind == "nodes" and option.after.scenario.layout.nodes == 1


def _is_measured(today: TrainingState, option: TuningOption) -> bool:
    after, single = option.after.scenario, today.calibration
    return (
        None not in {today.measured_samples_per_s, today.single_samples_per_s}
        and option.kind == "nodes"
        and (after.layout, after.per_device_batch, after.accumulation)
        == (single.layout, single.per_device_batch, single.accumulation)
    )


def _best_pairs(
    today: TrainingState, options: Sequence[TuningOption], alone: Sequence[RankedOption | None]
) -> list[TuningOption]:
    gains = {ranked.advice.name: ranked.advice.gain.value for ranked in alone if ranked is not None}
    pairs: dict[frozenset[str], tuple[float, TuningOption]] = {}
    for first in options:
        if not _combines(first):
            continue
        for second in setting_options(first.after):
            names = frozenset({first.name, second.name})
            if names in pairs or second.kind == first.kind or not _combines(second):
                continue
            pair = _paired(first, second)
            ratio = _gain(today, pair).value
            better = ratio > max(gains.get(name, 1.0) for name in names) * (1 + _WORTH_A_LINE)
            if better and ratio >= 1 + _WORTH_A_LINE and pair.fits is not False:
                pairs[names] = ratio, pair
    return [pair for _, pair in sorted(pairs.values(), key=lambda pair: -pair[0])[:_MOST_PAIRS]]


def _combines(option: TuningOption) -> bool:
    more = option.after.scenario.accumulation / option.before.scenario.accumulation
    return option.kind in _COMBINED and option.change is not None and more in _ACCUMULATED


def _paired(first: TuningOption, second: TuningOption) -> TuningOption:
    extra = None if first.extra_gib is None or second.extra_gib is None else first.extra_gib + second.extra_gib
    return TuningOption(
        name=f"{first.name} + {second.name}",
        kind="pair",
        before=first.before,
        after=second.after,
        change=(first.change or Change()).joined(second.change or Change()),
        extra_gib=extra,
        doubt=(1 + first.doubt) * (1 + second.doubt) - 1,
        parts=(first, second),
        effects=(*first.effects, *second.effects),
    )


def advice_notes(today: TrainingState, now: PredictedScenario) -> Iterator[Finding]:
    """What makes the current training slower, and no predicted change removes.

    Args:
        today: the current training.
        now: it, predicted.
    """
    waiting_ms = today.scenario.accumulation * today.calibration.costs.data_ms
    if waiting_ms > NOTICEABLE * now.step_time_ms:
        yield _LOADER_WAIT.found(None, data_ms=waiting_ms, share=waiting_ms / now.step_time_ms)
    calls_ms = script_ms(today)
    # They remain in every step, even if other communication becomes rare.
    if calls_ms > NOTICEABLE * (now.step_time_ms - now.parts.exposed_ms):
        calls = per_step(today)
        yield _SCRIPT_CALLS.found(None, calls=calls, count=format_figure(calls), calls_ms=calls_ms)
    for straggler in today.stragglers:
        yield _STRAGGLER.found(
            straggler.node,
            late_ms=straggler.late_ms,
            share=straggler.share,
            fix=straggler.hint or "",
            faster=1 / (1 - min(straggler.share, _MOST_WAIT)),
        )
