"""Trial: the runs of one candidate, its best learning rate; what is worth a trial, and what fits the budget. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from multinode.errors import UsageError
from multinode.findings.finding import Finding
from multinode.job.job import Job, change_arguments, limit_steps
from multinode.job.job_files import Change
from multinode.predict.advice import RankedOption, gain_to_a_loss, is_late, is_one_node, pays
from multinode.profile.observed import Observed
from multinode.records.samples import EvaluationSample, LossSample
from multinode.series.grid import GridRecord, Turn, due_turns
from multinode.stats.estimate import Estimate

_Job = TypeVar("_Job", bound=Job)

Judge = Literal["loss", "speed"]
"""`loss`: by the time to the final loss of the unchanged job; `speed`: by samples/s."""

# By loss only settings: no purchase, no other model, no other nodes.
_OF_LOSS = frozenset(
    {"gradients", "averaging", "outer", "accumulation", "overlap", "buckets", "batch", "strategy", "pair"}
)
_KINDS: dict[Judge, frozenset[str]] = {"loss": _OF_LOSS, "speed": _OF_LOSS | {"nodes", "balance"}}
_FEWEST_STEPS = 8
# PowerSGD does not compress the first ten iterations, and at most a third of a run is warm-up.
_LOW_RANK_STEPS = 32

_LEAST_RATES = 2
DEFAULT_SEED = 42
"""Default of LLaMA-Factory and the Trainer."""

Reason = Literal["memory", "little", "short", "slower", "late", "more"]


BASELINE, ONE_NODE = "baseline", "one-node"
"""Labels of the unchanged job, and of it on one node alone."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A change to try."""

    label: str  # its name in run names; BASELINE and ONE_NODE are the first two
    name: str  # for people
    kind: str = ""  # as in Advice
    change: Change = Change()  # how `launch` makes it
    nodes: int  # that it trains on; `workers_per_node` on each of them, None where they have unequal numbers
    workers_per_node: int | None
    # None if nothing was predicted, neither this speed nor the one relative to one node
    predicted_samples_per_s: Estimate | None = None
    against_one_node: Estimate | None = None
    predicted_gain: Estimate | None = None  # samples/s relative to the unchanged job; None if not predicted
    step_ratio: float = 1.0  # samples per step relative to the unchanged job
    # samples of a run judged by loss, relative to the unchanged job: the most that the same loss ever took
    samples_ratio: float = 1.0
    expected_s: float | None = None  # wall time of one run including overhead; None if unknown
    effects: tuple[Finding, ...] = ()  # as in Advice


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A change that is not tried."""

    name: str
    # `memory`: it does not fit the GPUs; `little`: it gains too little; `short`: it needs more steps than a run has;
    # `slower`: certainly slower than one node; `late`: averages, and reaches a loss certainly after one node or hardly
    # before the unchanged job; `more`: others are predicted to be better
    reason: Reason
    needs_steps: int | None = None  # of a run, for `short`


class Shortlist(msgspec.Struct, frozen=True, kw_only=True):
    """The candidates, best first, and the changes left out."""

    chosen: tuple[RankedOption, ...]
    left_out: tuple[LeftOut, ...]


def make_shortlist(
    ranked: Sequence[RankedOption], *, steps: int, most: int, judge: Judge = "loss", picks: Sequence[str] = ()
) -> Shortlist:
    """The best change of each kind, then the second best of each, until there are enough.

    Args:
        ranked: as from `rank_options`, best first.
        steps: optimizer steps of the unchanged job.
        most: maximum number of candidates.
        judge: how candidates are judged; a run that is judged by speed is as long as its change needs.
        picks: parts of names. If any, only changes with one of them are tried, whatever is predicted of them; two
            changes at once are meant only by a `+`.

    Raises:
        UsageError: none of the changes is picked, or those that are do not fit the GPUs.
    """
    able: dict[str, list[RankedOption]] = {}
    left_out: list[LeftOut] = []
    makeable = [option for option in ranked if option.advice.change is not None]
    picked = [option for option in makeable if _is_picked(option.advice.name, picks)]
    for option in picked:
        # One node alone is measured anyway.
        if is_one_node(option.advice):
            continue
        if not picks and option.option.kind not in _KINDS[judge]:
            continue
        reason, needed = _why_not(option, steps, judge, is_picked=bool(picks)), steps_needed(option)
        if reason is None:
            able.setdefault(option.option.kind, []).append(option)
        else:
            left_out.append(
                LeftOut(name=option.advice.name, reason=reason, needs_steps=needed if reason == "short" else None)
            )
    if picks and not able and not any(is_one_node(option.advice) for option in picked):
        raise _none_picked(makeable, left_out)
    by_gain = _by_gain_to_a_loss if judge == "loss" else _by_gain
    in_turn = list(_in_turn(able, by_gain))
    chosen = sorted(in_turn[:most], key=by_gain)
    left_out += (LeftOut(name=option.advice.name, reason="more") for option in in_turn[most:])
    return Shortlist(chosen=tuple(chosen), left_out=tuple(left_out))


def steps_needed(option: RankedOption) -> int:
    """Steps that a run of the unchanged job needs for a run of this change to show its effect on the loss."""
    before, after = option.option.before.scenario, option.option.after.scenario
    levers = option.option.after.settings.levers
    least = max(_FEWEST_STEPS, levers.averaging.judged_steps if levers.averaging is not None else 0)
    if levers.compression is not None and levers.compression.rank is not None:
        least = _LOW_RANK_STEPS
    return math.ceil(least * after.samples / before.samples / option.advice.samples_ratio[1])


def candidate_of(option: RankedOption, label: str) -> Candidate:
    """A ranked change as a candidate."""
    advice = option.advice
    return Candidate(
        label=label,
        name=advice.name,
        kind=option.option.kind,
        change=advice.change or Change(),
        nodes=advice.outlook.nodes,
        workers_per_node=None if advice.outlook.unequal else advice.outlook.workers_per_node,
        predicted_samples_per_s=advice.outlook.samples_per_s,
        against_one_node=advice.against_one_node,
        predicted_gain=advice.gain,
        step_ratio=option.option.after.scenario.samples / option.option.before.scenario.samples,
        effects=advice.effects,
        samples_ratio=advice.samples_ratio[1],
    )


def _why_not(option: RankedOption, steps: int, judge: Judge, *, is_picked: bool) -> Reason | None:
    beside = option.advice.against_one_node
    if option.advice.fits is False:
        return "memory"
    if not is_picked and beside is not None and beside.high < 1:
        return "slower"
    if not is_picked and is_late(option.advice):
        return "late"
    if not is_picked and not pays(option.advice):
        return "little"
    return "short" if judge == "loss" and steps_needed(option) > steps else None


def _is_picked(name: str, picks: Sequence[str]) -> bool:
    return not picks or any(pick in name and ("+" in pick or "+" not in name) for pick in picks)


def _none_picked(makeable: Sequence[RankedOption], left_out: Sequence[LeftOut]) -> UsageError:
    names = [repr(option.advice.name) for option in makeable if option.advice.fits is not False]
    hint = f"available: {', '.join(names) or 'none'}"
    short = [f"{change.name!r} needs --steps {change.needs_steps}" for change in left_out if change.reason == "short"]
    large = [repr(option.advice.name) for option in makeable if option.advice.fits is False]
    parts = (*short, *([f"too large for the GPUs: {', '.join(large)}"] if large else ()))
    return UsageError("no change that can be tried matches --pick", hint="; ".join((hint, *parts)))


def _in_turn(able: dict[str, list[RankedOption]], key: Callable[[RankedOption], float]) -> Iterator[RankedOption]:
    kinds = (sorted(options, key=key) for options in able.values())
    for row in itertools.zip_longest(*kinds):
        yield from sorted((option for option in row if option is not None), key=key)


def _by_gain(option: RankedOption) -> float:
    return -option.advice.gain.value


def _by_gain_to_a_loss(option: RankedOption) -> float:
    return -gain_to_a_loss(option.advice)


def spent_s(record: GridRecord) -> float:
    """Wall time of all finished runs."""
    return math.fsum(took for cell in record.cells for took in cell.took_s)


def time_needed_s(record: GridRecord, turns: Sequence[Turn], expected_s: Sequence[float | None]) -> float:
    """Estimated time of these runs: as earlier runs of the same cell, otherwise as expected; 0 if unknown.

    Args:
        record: the grid.
        turns: runs of it.
        expected_s: of a run of each cell.
    """
    took = [cell.took_s for cell in record.cells]
    one_s = [statistics.fmean(done) if done else expected for done, expected in zip(took, expected_s, strict=True)]
    return math.fsum(one_s[turn.cell] or 0.0 for turn in turns)


def fits(record: GridRecord, turn: Turn, expected_s: Sequence[float | None], budget_s: float) -> bool:
    """Whether a run fits the budget with all that come before it: earlier rounds, and better cells of its own.

    The last round may thus lack the candidates predicted worst, but never those that all are compared with.
    """
    before = [other for other in due_turns(record) if (other.number, other.cell) <= (turn.number, turn.cell)]
    return spent_s(record) + time_needed_s(record, before, expected_s) <= budget_s


PARTS = 8
"""Number of evaluations per run, and of parts over which the training loss is averaged."""


class LossPoint(msgspec.Struct, frozen=True, kw_only=True):
    """A loss after a number of samples; None if it was NaN or infinite."""

    samples: float
    loss: float | None


class Losses(msgspec.Struct, frozen=True, kw_only=True):
    """The losses of one run by samples, ascending."""

    held_out: tuple[LossPoint, ...] = ()  # from evaluations, on averaged parameters; empty if nothing was evaluated
    training: tuple[LossPoint, ...] = ()  # as logged, averaged over each part of the run; empty if nothing was logged


def read_losses(observed: Observed, global_batch: int) -> Losses:
    """The losses that a run recorded, of the lowest rank that has any."""
    held_out = _by_step(observed.of(EvaluationSample))
    return Losses(
        held_out=tuple(LossPoint(samples=step * global_batch, loss=loss) for step, loss in held_out),
        training=_smoothed(_by_step(observed.of(LossSample)), global_batch),
    )


def samples_to(points: Sequence[LossPoint], target: float) -> float | None:
    """Samples at which the loss first reaches this value, interpolated linearly; None if it never does."""
    before: LossPoint | None = None
    for point in points:
        if point.loss is not None and point.loss <= target:
            if before is None or before.loss is None:
                return point.samples
            share = (before.loss - target) / (before.loss - point.loss)
            return before.samples + share * (point.samples - before.samples)
        before = point
    return None


def loss_after(points: Sequence[LossPoint], samples: float) -> float | None:
    """The loss after a number of samples, interpolated linearly; None if it is unknown there."""
    for before, after in itertools.pairwise(points):
        if before.samples <= samples <= after.samples and before.loss is not None and after.loss is not None:
            share = (samples - before.samples) / (after.samples - before.samples)
            return before.loss + share * (after.loss - before.loss)
    return None


def _by_step(samples: Sequence[EvaluationSample] | Sequence[LossSample]) -> list[tuple[int, float | None]]:
    rank = min((sample.rank for sample in samples), default=0)
    losses: dict[int, float | None] = {}
    for sample in samples:
        if sample.rank == rank:
            losses.setdefault(sample.step, sample.loss)
    return sorted(losses.items())


def _smoothed(losses: Sequence[tuple[int, float | None]], global_batch: int) -> tuple[LossPoint, ...]:
    if not losses:
        return ()
    last = losses[-1][0]
    points = []
    for part in range(PARTS):
        first, end = last * part / PARTS, last * (part + 1) / PARTS
        logged = [loss for step, loss in losses if first < step <= end]
        if logged:
            finite = [loss for loss in logged if loss is not None]
            mean = statistics.fmean(finite) if len(finite) == len(logged) else None
            points.append(LossPoint(samples=end * global_batch, loss=mean))
    return tuple(points)


LossOf = Literal["held-out", "training", ""]


class TrialRun(msgspec.Struct, frozen=True, kw_only=True):
    """A measured run; runs of one seed have the same data in the same order."""

    run_id: str
    seed: int
    learning_rate: float | None = None
    samples_per_s: float
    losses: Losses


class CandidateTrial(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a candidate."""

    candidate: Candidate
    state: str  # as in CellRecord: `waiting`, `measured`, `out_of_memory`, `failed` and so on
    why: Finding | None = None  # it, or a repeat of it, has no figures
    runs: tuple[TrialRun, ...] = ()


def loss_of_all(runs: Sequence[TrialRun]) -> LossOf:
    """The kind of loss that all runs have; losses on different data are not compared."""
    if runs and all(run.losses.held_out for run in runs):
        return "held-out"
    return "training" if runs and all(run.losses.training for run in runs) else ""


def points_of(run: TrialRun, loss_of: LossOf) -> tuple[LossPoint, ...]:
    """The losses of this kind."""
    return run.losses.held_out if loss_of == "held-out" else run.losses.training if loss_of else ()


def end_loss(run: TrialRun, loss_of: LossOf) -> float | None:
    """The final loss; None if it diverged or has none."""
    points = points_of(run, loss_of)
    return points[-1].loss if points else None


def first_seed_losses(runs: Sequence[TrialRun]) -> dict[float, float | None]:
    """Final loss by learning rate, of the runs of the first seed, ascending."""
    loss_of, first = loss_of_all(runs), min((run.seed for run in runs), default=0)
    rated = [(run.learning_rate, run) for run in runs if run.seed == first]
    return {rate: end_loss(run, loss_of) for rate, run in sorted(rated, key=_rate) if rate is not None}


def at_best_rate(trial: CandidateTrial) -> CandidateTrial:
    """The trial with only the runs at the learning rate that has the lowest loss for the first seed."""
    losses = first_seed_losses(trial.runs)
    if not losses:
        return trial
    best = min(losses, key=lambda rate: (_or_infinity(losses[rate]), rate))
    return msgspec.structs.replace(trial, runs=tuple(run for run in trial.runs if run.learning_rate == best))


def _rate(rated: tuple[float | None, TrialRun]) -> float:
    return rated[0] or 0.0


def _or_infinity(loss: float | None) -> float:
    return math.inf if loss is None else loss


class TrialTraining(msgspec.Struct, frozen=True, kw_only=True):
    """How one run trains."""

    steps: int  # optimizer steps
    seed: int = DEFAULT_SEED  # of the weights that are new, the order of the data, and their split
    every: int = 1  # steps of a round in which nodes average; an evaluation comes at the end of one
    parts: int = PARTS  # evaluations in a run, or fewer
    evaluation_samples: int | None = None  # that are held out; None evaluates nothing

    @property
    def evaluation_steps(self) -> int:
        """From one evaluation to the next: whole rounds, as an evaluation ends one.

        The last evaluation is at the last step, where the rate has decayed, or as close to it as half as many allow.
        """
        rounds = math.ceil(self.steps / self.every)
        least = math.ceil(rounds / self.parts)
        return self.every * min(range(least, 2 * least), key=lambda between: rounds % between)


def trial_steps(samples: float, global_batch: int, every: int) -> int:
    """Optimizer steps on about as many samples, in whole rounds: at the end of one, all nodes have equal parameters.

    Args:
        samples: of the run.
        global_batch: samples of a step.
        every: steps of a round.
    """
    return every * math.ceil(max(1, round(samples / global_batch)) / every)


def can_evaluate(job: Job) -> bool:
    """Whether the job can evaluate on samples that it does not train on."""
    return job.kind.holds_out(job.arguments)


def parse_learning_rates(text: str) -> tuple[float, ...]:
    """`5e-4,1e-3` as numbers, ascending: the first is the one least likely to diverge.

    Raises:
        ValueError: one is not a number between 0 and 1, or stands twice.
    """
    try:
        rates = sorted(float(part) for part in text.split(","))
    except ValueError:
        rates = []
    if len(set(rates)) < max(_LEAST_RATES, len(rates)) or not all(0 < rate < 1 for rate in rates):
        raise ValueError(f"{text!r} is not a list of distinct numbers between 0 and 1, such as 5e-4,1e-3,2e-3")
    return tuple(rates)


def trial_job(job: _Job, training: TrialTraining) -> _Job:
    """The job as it is trained for its figures and its loss; a script trains as it does."""
    changed: dict[str, Any] = {"seed": training.seed}
    if training.evaluation_samples is None:
        return limit_steps(change_arguments(job, changed), training.steps)
    every = training.evaluation_steps
    if (job.settings.logging_steps or math.inf) > every:
        changed["logging_steps"] = every
    if can_evaluate(job):
        changed |= {
            "eval_strategy": "steps",
            "eval_steps": every,
            "per_device_eval_batch_size": job.settings.per_device_train_batch_size,
        }
        if not job.arguments.get("eval_dataset"):
            changed["val_size"] = training.evaluation_samples
    return limit_steps(change_arguments(job, changed), training.steps)
