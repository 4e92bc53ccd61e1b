"""Tuning: runs of each change beside the unchanged job and one node alone, judged by loss or speed. Pure.

Runs of one seed have the same data in the same order, and are compared with each other.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from multinode.findings.finding import Finding, message_of
from multinode.findings.rule import Rule, RuleGroup
from multinode.stats.estimate import Estimate, of_repeats, ratio
from multinode.tune.trial import (
    Candidate,
    CandidateTrial,
    Judge,
    LeftOut,
    LossOf,
    LossPoint,
    TrialRun,
    at_best_rate,
    end_loss,
    first_seed_losses,
    loss_after,
    loss_of_all,
    points_of,
    samples_to,
)
from multinode.units import format_count

SAME_LOSS = 0.005
"""Losses that differ by less than this part are equal: what rounding of gradients alone changes."""
SOONER = 0.05
"""Of a time that was measured once, what is more than noise."""

# Beyond so many times as many steps, in powers of two, nothing is said of what a gap becomes.
_MOST_DOUBLINGS, _TENS = 4, 10

LossVerdict = Literal["same", "better", "worse", "diverged"]
Outcome = Literal["change", "inconclusive", "one_node", "baseline", "unjudged", "undecided"]


class TriedRate(msgspec.Struct, frozen=True, kw_only=True):
    """A learning rate and the loss at the end of its run of the first seed; None where it diverged."""

    learning_rate: float
    loss: float | None


class TunedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate and what was measured of it; None is unknown."""

    candidate: Candidate
    state: str
    why: Finding | None = None  # it, or a repeat of it, has no figures
    run_ids: tuple[str, ...] = ()
    # with the variation over the seeds, like every Estimate here; with one seed, the interval is empty
    samples_per_s: Estimate | None = None
    samples: int | None = None  # of a run that is judged by loss
    loss: Estimate | None = None  # at the end
    gain: Estimate | None = None  # samples/s relative to the unchanged job, seed by seed
    gain_error: float | None = None  # predicted gain divided by measured gain, minus 1; None without a prediction
    is_covered: bool | None = None  # whether it is within the predicted interval; None without a prediction
    against_baseline: Estimate | None = None  # its loss over that of the unchanged job, seed by seed
    # `worse` is beyond noise and more than rounding changes, with one seed more than rounding changes
    loss_verdict: LossVerdict | None = None
    # of the unchanged job, after which its loss is no longer worse, if the gap goes on closing as over the second
    # half; None where it is not worse, or the gap does not close
    needs_steps: int | None = None
    # after which it is as good as the unchanged job at its end, within what rounding changes; None where a seed
    # did not reach it
    samples_to_loss: Estimate | None = None
    time_to_loss_s: Estimate | None = None  # training to that loss, without start-up, warm-up and evaluations
    reached: int = 0  # seeds that reached it
    # time of one node alone over its own: to that loss, or by speed for as many samples
    sooner: Estimate | None = None
    # that time over the unchanged job's
    sooner_than_baseline: Estimate | None = None
    learning_rate: float | None = None  # that its runs have; the best of `rates` where several were tried
    rates: tuple[TriedRate, ...] = ()


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """What `tune --json` prints; `tuning.json`."""

    schema: str = "multinode.tuning/3"
    run_id: str
    job: str  # in a few words
    judged_by: Judge = "loss"
    sources: tuple[str, ...] = ()  # runs of the unchanged job that the predictions are from; empty for its own
    samples: int | None = None  # of a run of the unchanged job, where it is judged by loss
    steps: int = 0  # of a run of the unchanged job
    seeds: int = 1  # runs of each candidate that were asked for
    learning_rates: tuple[float, ...] = ()  # that the first seed was trained with; empty where all have the job's own
    # what the losses are of: `held-out` data, or the `training` data as logged; empty where there are none
    loss_of: LossOf = ""
    # the unchanged job, one node alone, then the candidates in the order of their prediction
    rows: tuple[TunedRow, ...] = ()
    left_out: tuple[LeftOut, ...] = ()  # what is not tried
    # `change`: a change is recommended; `inconclusive`: one may be better; `one_node`, `baseline`: none is better than
    # that; `unjudged`: nothing can be judged; `undecided`: only the unchanged job is measured
    outcome: Outcome = "unjudged"
    recommended: str | None = None  # label of the row; None where none is
    best: str | None = None  # label of the change that comes first by its mean; None where none reached the loss
    budget_s: float | None = None  # that was given; `spent_s` of it is used, also by earlier calls of the same command
    spent_s: float = 0.0
    waiting: int = 0  # runs that did not fit the budget, or are not yet made
    needed_s: float | None = None  # that these take, by the prediction; None where nothing is known
    verdict: Finding | None = None  # None of a plan
    file: str = ""  # the winner as `launch --with` takes it; empty where there is none

    def row(self, label: str | None) -> TunedRow | None:
        """The row of this label."""
        return next((row for row in self.rows if row.candidate.label == label), None)


class _Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run; None is unknown, of a loss that it diverged."""

    samples_per_s: float
    loss: float | None
    to_loss: float | None
    time_s: float | None  # to the loss, or by speed of a sample


_BySeed = dict[int, _Figures]


def plan(tuning: Tuning, candidates: Iterable[Candidate]) -> Tuning:
    """With a row for each that waits for its runs; nothing is judged."""
    rows = tuple(TunedRow(candidate=candidate, state="waiting") for candidate in candidates)
    return msgspec.structs.replace(tuning, rows=rows, loss_of="", outcome="unjudged", recommended=None, best=None)


def judge(tuning: Tuning, trials: Sequence[CandidateTrial]) -> Tuning:
    """With its rows, what their losses are of, and which of them is recommended.

    Args:
        tuning: what was asked for.
        trials: the unchanged job first, then one node alone, then the candidates.
    """
    runs = [run for trial in trials for run in trial.runs]
    loss_of = loss_of_all(runs) if tuning.judged_by == "loss" else ""
    tried = [_tried_rates(trial) for trial in trials]
    trials = [at_best_rate(trial) for trial in trials]
    ends = {run.seed: end_loss(run, loss_of) for run in trials[0].runs}
    targets = {seed: loss * (1 + SAME_LOSS) for seed, loss in ends.items() if loss is not None}
    by_speed = tuning.judged_by == "speed"
    figures = [
        {run.seed: _speed_of(run) if by_speed else _figures_of(run, loss_of, targets) for run in trial.runs}
        for trial in trials
    ]
    rows = tuple(
        msgspec.structs.replace(
            _row(trial, mine, figures[0], figures[1], loss_of),
            rates=rates,
        )
        for trial, mine, rates in zip(trials, figures, tried, strict=True)
    )
    rows = tuple(
        msgspec.structs.replace(row, needs_steps=_needs_steps(trial, trials[0], loss_of, tuning.steps))
        if row.loss_verdict == "worse"
        else row
        for row, trial in zip(rows, trials, strict=True)
    )
    outcome, recommended, best = _choose(rows)
    judged = msgspec.structs.replace(
        tuning, loss_of=loss_of, rows=rows, outcome=outcome, recommended=recommended, best=best
    )
    return msgspec.structs.replace(judged, verdict=_verdict(judged))


def _figures_of(run: TrialRun, loss_of: LossOf, targets: dict[int, float]) -> _Figures:
    target = targets.get(run.seed)
    to_loss = samples_to(points_of(run, loss_of), target) if target is not None else None
    return _Figures(
        samples_per_s=run.samples_per_s,
        loss=end_loss(run, loss_of),
        to_loss=to_loss,
        time_s=None if to_loss is None else to_loss / run.samples_per_s,
    )


def _speed_of(run: TrialRun) -> _Figures:
    return _Figures(samples_per_s=run.samples_per_s, loss=None, to_loss=None, time_s=1 / run.samples_per_s)


def _row(trial: CandidateTrial, mine: _BySeed, baseline: _BySeed, alone: _BySeed, loss_of: LossOf) -> TunedRow:
    beside = _ratio(mine, baseline, lambda figures: figures.loss)
    time_s = _estimate(figures.time_s for figures in mine.values())
    diverged = bool(loss_of) and any(figures.loss is None for figures in mine.values())
    gain, predicted = _ratio(mine, baseline, lambda figures: figures.samples_per_s), trial.candidate.predicted_gain
    both = (gain, predicted) if gain is not None and predicted is not None else None
    return TunedRow(
        candidate=trial.candidate,
        state=trial.state,
        why=trial.why,
        run_ids=tuple(run.run_id for run in trial.runs),
        samples_per_s=_estimate(figures.samples_per_s for figures in mine.values()),
        samples=max(
            (round(points[-1].samples) for run in trial.runs if (points := points_of(run, loss_of))), default=None
        ),
        loss=_estimate(figures.loss for figures in mine.values()),
        gain=gain,
        gain_error=both[1].value / both[0].value - 1 if both is not None else None,
        is_covered=both[1].low <= both[0].value <= both[1].high if both is not None else None,
        against_baseline=beside,
        loss_verdict="diverged" if diverged else _loss_verdict(beside),
        samples_to_loss=_estimate(figures.to_loss for figures in mine.values()),
        time_to_loss_s=time_s if loss_of else None,
        reached=sum(figures.to_loss is not None for figures in mine.values()),
        sooner=_ratio(alone, mine, lambda figures: figures.time_s) if time_s is not None else None,
        sooner_than_baseline=_ratio(baseline, mine, lambda figures: figures.time_s) if time_s is not None else None,
        learning_rate=trial.runs[0].learning_rate if trial.runs else None,
    )


def _tried_rates(trial: CandidateTrial) -> tuple[TriedRate, ...]:
    losses = first_seed_losses(trial.runs)
    return tuple(TriedRate(learning_rate=rate, loss=loss) for rate, loss in losses.items()) if len(losses) > 1 else ()


def _estimate(values: Iterable[float | None]) -> Estimate | None:
    all_values = list(values)
    measured = [value for value in all_values if value is not None]
    if not measured or len(measured) < len(all_values):
        return None
    return of_repeats(measured) if len(measured) > 1 else Estimate(value=measured[0], low=measured[0], high=measured[0])


def _ratio(above: _BySeed, below: _BySeed, figure: Callable[[_Figures], float | None]) -> Estimate | None:
    seeds = sorted(above.keys() & below.keys())
    pairs = [(figure(above[seed]), figure(below[seed])) for seed in seeds]
    tops, bottoms = (_estimate(pair[side] for pair in pairs) for side in (0, 1))
    if tops is None or bottoms is None or min(tops.low, bottoms.low) <= 0:
        return None
    return ratio(tops, bottoms)


def _loss_verdict(beside: Estimate | None) -> LossVerdict | None:
    if beside is None:
        return None
    if beside.low > 1 and beside.value > 1 + SAME_LOSS:
        return "worse"
    return "better" if beside.high < 1 and beside.value < 1 - SAME_LOSS else "same"


def _needs_steps(trial: CandidateTrial, baseline: CandidateTrial, loss_of: LossOf, steps: int) -> int | None:
    """By a power law of the steps, through the gaps at the half and at the end."""
    references = {run.seed: points_of(run, loss_of) for run in baseline.runs}
    pairs = [(points_of(run, loss_of), references.get(run.seed)) for run in trial.runs]
    gaps = [(_gap(points, other, 1 / 2), _gap(points, other, 1.0)) for points, other in pairs if points and other]
    halves, ends = ([gap for gap in side if gap is not None] for side in zip(*gaps, strict=True)) if gaps else ([], [])
    if len(halves) < len(trial.runs) or len(ends) < len(trial.runs) or not trial.runs:
        return None
    half, end = statistics.fmean(halves), statistics.fmean(ends)
    if end <= SAME_LOSS or half <= end:
        return None
    needed = (math.log(end) - math.log(SAME_LOSS)) / (math.log(half) - math.log(end))
    return math.ceil(steps * 2.0**needed / _TENS) * _TENS if needed <= _MOST_DOUBLINGS else None


def _gap(points: Sequence[LossPoint], other: Sequence[LossPoint], part: float) -> float | None:
    """The loss over another one, minus 1, each after this part of its run: their rates have decayed as far."""
    mine, theirs = (loss_after(each, part * each[-1].samples) for each in (points, other))
    return None if mine is None or theirs is None else mine / theirs - 1


def _choose(rows: Sequence[TunedRow]) -> tuple[Outcome, str | None, str | None]:
    baseline, alone, *changes = rows
    if baseline.sooner_than_baseline is None:
        return "unjudged", None, None
    able = [
        row for row in changes if row.sooner_than_baseline is not None and row.loss_verdict not in {"worse", "diverged"}
    ]
    able.sort(key=lambda row: -_least(row, lambda gain: gain.value))
    best = able[0].candidate.label if able else None
    sure = [row for row in able if _is_sooner(row)]
    if sure:
        return "change", sure[0].candidate.label, best
    if able and _least(able[0], lambda gain: gain.value) > 1:
        return "inconclusive", None, best
    others = (alone, *changes)
    if any(row.state == "waiting" for row in others) and not any(row.run_ids for row in others):
        return "undecided", None, None
    is_sooner = alone.sooner_than_baseline is not None and alone.sooner_than_baseline.value > 1
    return ("one_node", alone.candidate.label, best) if is_sooner else ("baseline", baseline.candidate.label, best)


def _is_sooner(row: TunedRow) -> bool:
    repeated = _is_repeated(row)
    return _least(row, lambda gain: gain.low if repeated else gain.value) > (1 if repeated else 1 + SOONER)


def _least(row: TunedRow, end: Callable[[Estimate], float]) -> float:
    return min((end(gain) for gain in (row.sooner, row.sooner_than_baseline) if gain is not None), default=0.0)


_VERDICTS = RuleGroup("Verdict of tune")
_GAIN_FIGURES = ("change", "sooner")
_CHANGE = _VERDICTS.rule(
    "change",
    about="a change that is better by more than the noise",
    message="Recommended: {change}. {gain}.{waiting}",
    figures=_GAIN_FIGURES,
)
_CHANGE_ONCE = _VERDICTS.rule(
    "change-once",
    about="a change that is better in a single run",
    message="Recommended: {change}. {gain}. Only one {repeat} was measured, so the variation between {repeat}s is "
    "unknown.{waiting}",
    figures=_GAIN_FIGURES,
)
_MAYBE = _VERDICTS.rule(
    "inconclusive",
    about="a change that may be better",
    message="Inconclusive: {change} may be better; {gain}. To measure more {repeat}s, use --seeds.{waiting}",
    figures=_GAIN_FIGURES,
)
_MAYBE_ONCE = _VERDICTS.rule(
    "inconclusive-once",
    about="a change that is slightly better in a single run",
    message="Inconclusive: with {change}, {gain}, but only one {repeat} was measured. To measure more {repeat}s, use "
    "--seeds.{waiting}",
    figures=_GAIN_FIGURES,
)
_ONE_NODE = _VERDICTS.rule(
    "one-node",
    about="one node is better than every change",
    message="Train on one node: {gain}, and {others}.{waiting}",
    figures=("sooner",),
)
_BASELINE = _VERDICTS.rule(
    "baseline",
    about="no change is better than the unchanged job",
    message="Keep the training as it is{at}: {others}.{waiting}",
)
_UNDECIDED = _VERDICTS.rule(
    "undecided",
    about="only the unchanged job has been measured",
    message="No recommendation yet: only the unchanged job has been measured.{waiting}",
)
_NO_FIGURES = _VERDICTS.rule(
    "no-figures",
    about="the unchanged job has no figures",
    message="No recommendation: the unchanged job has no figures ({reason}).",
    figures=("reason",),
)
_NO_LOSS = _VERDICTS.rule(
    "no-loss",
    about="runs that recorded no loss",
    message="No recommendation: not every run recorded a loss, and the speed alone is not enough for a recommendation.",
)
_DIVERGED = _VERDICTS.rule(
    "diverged",
    about="the unchanged job diverged",
    message="No recommendation: the unchanged job diverged, so there is no target loss.",
)


def _verdict(tuning: Tuning) -> Finding:
    baseline = tuning.rows[0]
    unmeasured = sum(row.state == "waiting" for row in tuning.rows)
    waiting = f" {format_count(unmeasured, 'change')} not yet measured." if unmeasured else ""
    changed = tuning.row(tuning.recommended if tuning.outcome == "change" else tuning.best)
    if tuning.outcome in {"change", "inconclusive"} and changed is not None:
        return _judge_change(tuning, changed, waiting)
    if tuning.outcome == "one_node":
        gain = tuning.rows[1].sooner_than_baseline
        return _ONE_NODE.found(
            None,
            gain=_gain_of_one_node(tuning, gain.text("faster") if gain is not None else "faster"),
            sooner=gain.value if gain is not None else None,
            others=_no_change(tuning),
            waiting=waiting,
        )
    if tuning.outcome == "baseline":
        rate = baseline.learning_rate if baseline.rates else None
        at = "" if rate is None else f", at learning rate {rate:g}"
        return _BASELINE.found(None, at=at, others=_no_change(tuning), waiting=waiting)
    if tuning.outcome == "undecided":
        return _UNDECIDED.found(None, waiting=waiting)
    if not baseline.run_ids:
        return _NO_FIGURES.found(None, reason=message_of(baseline.why) or "it was not measured")
    return (_DIVERGED if tuning.loss_of else _NO_LOSS).found(None)


def _judge_change(tuning: Tuning, row: TunedRow, waiting: str) -> Finding:
    rules: tuple[Rule, Rule] = (_CHANGE, _CHANGE_ONCE) if tuning.outcome == "change" else (_MAYBE, _MAYBE_ONCE)
    gain, sooner = _sooner(tuning, row), row.sooner or row.sooner_than_baseline
    return rules[not _is_repeated(row)].found(
        None,
        change=row.candidate.name,
        gain=f"{gain[:1].upper()}{gain[1:]}" if tuning.outcome == "change" else gain,
        sooner=sooner.value if sooner is not None else None,
        repeat=_repeat(tuning),
        waiting=waiting,
    )


def _gain_of_one_node(tuning: Tuning, faster: str) -> str:
    if tuning.judged_by == "speed":
        return f"it trains {faster} than {format_count(tuning.rows[0].candidate.nodes, 'node')}"
    return f"it reaches the loss of the unchanged job {faster}"


def _repeat(tuning: Tuning) -> str:
    return "seed" if tuning.judged_by == "loss" else "run"


def _sooner(tuning: Tuning, row: TunedRow) -> str:
    """`it reaches the loss of the unchanged job 1.8x faster than one node alone (1.6x to 2.0x)`."""
    reference, gain = "one node", row.sooner
    if gain is None:
        reference, gain = "the unchanged job", row.sooner_than_baseline
    if gain is None:
        return ""
    if tuning.judged_by == "speed":
        return f"it trains {gain.text('faster')} than {reference}"
    loss = "that loss" if reference != "one node" else "the loss of the unchanged job"
    return f"it reaches {loss} {gain.text('faster')} than {reference}"


def _no_change(tuning: Tuning) -> str:
    measured = [row for row in tuning.rows[2:] if row.run_ids]
    if not measured:
        return "no change was measured" if tuning.rows[2:] else "no change is predicted to be worth a run"
    return "no measured change is better"


def _is_repeated(row: TunedRow) -> bool:
    return row.sooner_than_baseline is not None and row.sooner_than_baseline.repeats > 1
