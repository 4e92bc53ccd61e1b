"""Tuning: runs of each change beside the unchanged training and one node alone, judged by loss or speed. Pure.

Runs of one seed have the same data in the same order, and are compared with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from multinode.stats.estimate import Estimate, of_repeats, ratio
from multinode.tune.trial import (
    Candidate,
    CandidateTrial,
    Judge,
    LeftOut,
    LossOf,
    TrialRun,
    at_best_rate,
    end_loss,
    first_seed_losses,
    loss_of_all,
    points_of,
    samples_to,
)
from multinode.units import format_count

SAME_LOSS = 0.005
"""Losses that differ by less than this part are equal: what rounding of gradients alone changes."""
SOONER = 0.05
"""Of a time that was measured once, what is more than noise."""

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
    reason: str = ""
    run_ids: tuple[str, ...] = ()
    # with the scatter over the seeds, as every Estimate here; of one seed the interval is empty
    samples_per_s: Estimate | None = None
    loss: Estimate | None = None  # at the end, after as many samples as all others
    gain: Estimate | None = None  # samples/s over those of the unchanged training, seed by seed
    gain_error: float | None = None  # of the predicted gain: over the measured one, minus 1; None without a prediction
    is_covered: bool | None = None  # whether the measured gain is within the predicted interval; likewise
    against_baseline: Estimate | None = None  # its loss over that of the unchanged training, seed by seed
    # `worse` is beyond noise and more than rounding changes, with one seed more than rounding changes
    loss_verdict: LossVerdict | None = None
    # after which it is as good as the unchanged training at its end, within what rounding changes; None where a seed
    # did not reach it
    samples_to_loss: Estimate | None = None
    time_to_loss_s: Estimate | None = None  # the same in seconds of training, without start-up, warm-up and evaluations
    reached: int = 0  # seeds that reached it
    # time of one node alone over its own: to that loss, or by speed for as many samples
    sooner: Estimate | None = None
    # the same over the time of the unchanged training
    sooner_than_baseline: Estimate | None = None
    learning_rate: float | None = None  # that its runs have; the best of `rates` where several were tried
    rates: tuple[TriedRate, ...] = ()


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """What `tune --json` prints; `tuning.json`."""

    schema: str = "multinode.tuning/2"
    run_id: str
    job: str  # in a few words
    judged_by: Judge = "loss"
    sources: tuple[str, ...] = ()  # runs of the unchanged training that the predictions are from; empty for its own
    samples: int | None = None  # that every run judged by loss trains on
    steps: int = 0  # of a run of the unchanged training
    seeds: int = 1  # runs of each candidate that were asked for
    learning_rates: tuple[float, ...] = ()  # that the first seed was trained with; empty where all have the job's own
    # what the losses are of: `held-out` data, or the `training` data as logged; empty where there are none
    loss_of: LossOf = ""
    # the unchanged training, one node alone, then the candidates in the order of their prediction
    rows: tuple[TunedRow, ...] = ()
    left_out: tuple[LeftOut, ...] = ()  # what is not tried
    # `change`: a change is recommended; `inconclusive`: one may be better; `one_node`, `baseline`: none is better than
    # that; `unjudged`: nothing can be judged; `undecided`: only the unchanged training is measured
    outcome: Outcome = "unjudged"
    recommended: str | None = None  # label of the row; None where none is
    best: str | None = None  # label of the change that comes first by its mean; None where none reached the loss
    budget_s: float | None = None  # that was given; `spent_s` of it is used, also by earlier calls of the same command
    spent_s: float = 0.0
    waiting: int = 0  # runs that did not fit the budget, or are not yet made
    needed_s: float | None = None  # that these take, by the prediction; None where nothing is known
    notes: tuple[str, ...] = ()
    verdict: str = ""  # one sentence; empty of a plan
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
        trials: the unchanged training first, then one node alone, then the candidates.
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
        msgspec.structs.replace(_row(trial, mine, figures[0], figures[1], loss_of), rates=rates)
        for trial, mine, rates in zip(trials, figures, tried, strict=True)
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
        reason=trial.reason,
        run_ids=tuple(run.run_id for run in trial.runs),
        samples_per_s=_estimate(figures.samples_per_s for figures in mine.values()),
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


def _verdict(tuning: Tuning) -> str:
    unmeasured = [row for row in tuning.rows if row.state == "waiting"]
    text = {
        "change": _change,
        "inconclusive": _inconclusive,
        "one_node": _one_node,
        "baseline": _baseline,
        "unjudged": _unjudged,
        "undecided": _undecided,
    }[tuning.outcome](tuning)
    if unmeasured and tuning.outcome != "unjudged":
        text += f" {format_count(len(unmeasured), 'change')} not measured yet."
    return text


def _change(tuning: Tuning) -> str:
    row = tuning.row(tuning.recommended)
    if row is None:
        return ""
    sooner, seed = _sooner(tuning, row), _repeat(tuning)
    text = f"Recommended: {row.candidate.name}. {sooner[0].upper()}{sooner[1:]}."
    return text if _is_repeated(row) else f"{text} This is one {seed}; the variation between {seed}s is unknown."


def _inconclusive(tuning: Tuning) -> str:
    row = tuning.row(tuning.best)
    if row is None:
        return ""
    more = f"Measure more {_repeat(tuning)}s: --seeds."
    if _is_repeated(row):
        return f"Inconclusive: {row.candidate.name} may be better: {_sooner(tuning, row)}. {more}"
    return f"Inconclusive: {row.candidate.name}: {_sooner(tuning, row)}, with one {_repeat(tuning)}. {more}"


def _repeat(tuning: Tuning) -> str:
    return "seed" if tuning.judged_by == "loss" else "run"


def _sooner(tuning: Tuning, row: TunedRow) -> str:
    """`it reaches the loss of the unchanged training 1.8x faster than one node alone (1.6x to 2.0x)`."""
    reference, gain = "one node", row.sooner
    if gain is None:
        reference, gain = "the unchanged training", row.sooner_than_baseline
    if gain is None:
        return ""
    if tuning.judged_by == "speed":
        return f"it trains {gain.text('faster')} than {reference}"
    loss = "that loss" if reference != "one node" else "the loss of the unchanged training"
    return f"it reaches {loss} {gain.text('faster')} than {reference}"


def _one_node(tuning: Tuning) -> str:
    gain = tuning.rows[1].sooner_than_baseline
    faster = gain.text("faster") if gain is not None else "faster"
    if tuning.judged_by == "speed":
        nodes = format_count(tuning.rows[0].candidate.nodes, "node")
        return f"Train on one node: it trains {faster} than {nodes}, and {_no_change(tuning)}."
    return f"Train on one node: it reaches the loss of the unchanged training {faster}, and {_no_change(tuning)}."


def _baseline(tuning: Tuning) -> str:
    rate = tuning.rows[0].learning_rate if tuning.rows[0].rates else None
    at = "" if rate is None else f", at learning rate {rate:g}"
    return f"Keep the training as it is{at}: {_no_change(tuning)}."


def _no_change(tuning: Tuning) -> str:
    measured = [row for row in tuning.rows[2:] if row.run_ids]
    if not measured:
        return "no change was measured" if tuning.rows[2:] else "no change is predicted to be worth a run"
    return "no measured change is better"


def _undecided(_: Tuning) -> str:
    return "No recommendation yet: only the unchanged training is measured."


def _unjudged(tuning: Tuning) -> str:
    baseline = tuning.rows[0]
    if not baseline.run_ids:
        why = baseline.reason or "it was not measured"
        return f"No recommendation: the unchanged training has no figures: {why}."
    if not tuning.loss_of:
        return "No recommendation: not every run recorded a loss, and speed is not enough."
    return "No recommendation: the unchanged training diverged, so there is no loss to reach."


def _is_repeated(row: TunedRow) -> bool:
    return row.sooner_than_baseline is not None and row.sooner_than_baseline.repeats > 1
