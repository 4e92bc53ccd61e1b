"""What `tune` prints: the verdict, one table of what was measured, and what was not tried."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from multinode.figures.figure import Figure, Row
from multinode.figures.frame import Frame
from multinode.predict.advice import CHANGE
from multinode.predict.advice_screen import AGAINST_ONE_NODE as PREDICTED_OVER_ONE_NODE
from multinode.profile.throughput import SAMPLES_PER_S
from multinode.render.sheet import Block, Chart, Charts, Labels, Prose, Sheet, Tiles, Tone
from multinode.stats.estimate import PLUS_MINUS, Estimate, text_of
from multinode.stats.unknown import Unknown
from multinode.tune.judge import SAME_LOSS, SOONER, TunedRow, Tuning
from multinode.tune.trial import BASELINE, LeftOut
from multinode.units import UNKNOWN, about, format_count, format_duration, format_sig, times

_LEFT_OUT = {
    "memory": "does not fit on the GPUs",
    "little": f"predicted to gain less than {SOONER:.0%}",
    "slower": "predicted to be slower than one node, even allowing for the prediction error",
    "late": "predicted to reach the loss later than one node, or hardly sooner than the unchanged job, even if "
    "averaging saves as many steps as in the best benchmark",
    "more": "other changes are predicted to be better; to try more changes, use --candidates",
}


def left_out_words(left_out: Sequence[LeftOut]) -> tuple[str, ...]:
    """Which changes are not tried, and why, a line a reason."""
    names: dict[str, list[str]] = {}
    for change in left_out:
        needs = f"needs runs of {change.needs_steps} steps (--steps {change.needs_steps})"
        names.setdefault(needs if change.reason == "short" else _LEFT_OUT[change.reason], []).append(change.name)
    return tuple(f"{', '.join(named)}: {why}" for why, named in names.items())


def loss_words(tuning: Tuning) -> str:
    """What the losses of its table are of."""
    samples = "the number of samples in its row" if _samples_differ(tuning) else f"{tuning.samples or 0:,} samples"
    if tuning.loss_of == "held-out":
        return (
            f"on held-out data, after {samples}; for methods that average between nodes, the loss of the "
            "averaged parameters"
        )
    if tuning.loss_of == "training":
        return (
            f"logged training loss, averaged over the last part of {samples}; for methods that average "
            "between nodes, the loss of steps between two averages"
        )
    return "not recorded in every run"


def _samples_differ(tuning: Tuning) -> bool:
    return len({row.samples for row in tuning.rows if row.samples is not None}) > 1


_TONES: dict[str, Tone] = {"change": "good", "one_node": "good", "inconclusive": "doubtful"}
_MARKS = {"worse": "worse", "diverged": "diverged"}
_STATES = {"out_of_memory": "out of memory", "failed": "failed", "skipped": "skipped", "waiting": "not run"}


def show(tuning: Tuning) -> Iterator[Block]:
    """The verdict, speed, loss and time to the loss of each change, why, and what was not tried."""
    if tuning.verdict is not None:
        yield Prose(tuning.verdict.message, "lead", tone=_TONES.get(tuning.outcome, ""))
    yield Tiles(tuple(_key_figures(tuning)))
    yield _sheet(tuning)
    yield Labels(tuple(_rows(tuning)))
    yield Charts(lambda: _charts(tuning))


def _charts(tuning: Tuning) -> Iterable[Chart]:
    from multinode.tune.charts import tuning_charts  # noqa: PLC0415 - plotly is an extra

    return tuning_charts(tuning)


def _key_figures(tuning: Tuning) -> Iterator[tuple[str, str]]:
    winner = tuning.row(tuning.recommended)
    if winner is None or not winner.run_ids:
        return
    yield f"{SAMPLES_PER_S.title}, {winner.candidate.name}", text_of(winner.samples_per_s)
    if winner.time_to_loss_s is not None:
        yield "time to the loss (s)", text_of(winner.time_to_loss_s)
    if winner.sooner is not None and winner.candidate.nodes > 1:
        yield "against 1 node", winner.sooner.text("times")


def show_plan(tuning: Tuning) -> Iterator[Block]:
    """What would be tried, and how long that takes."""
    has_prediction = any(row.candidate.predicted_samples_per_s is not None for row in tuning.rows)
    candidates = (row.candidate for row in tuning.rows)
    rows = tuple(Row(candidate, msgspec.structs.asdict(candidate)) for candidate in candidates)
    yield Frame(rows=rows, figures=(CHANGE, PREDICTED_SPEED, PREDICTED_AGAINST_ONE_NODE, EXPECTED)).sheet()
    runs = f"{tuning.seeds} per row"
    if tuning.learning_rates:
        runs = (
            f"per row, one seed at {len(tuning.learning_rates)} learning rates and {tuning.seeds - 1} more at the best"
        )
    length = f"each of {format_count(tuning.steps, 'measured step')}"
    if tuning.samples is not None:
        most = max(row.candidate.samples_ratio for row in tuning.rows)
        more = f"; up to {times(most)} as many for methods that average between nodes" if most > 1 else ""
        length = f"each on {tuning.samples:,} samples ({tuning.steps} steps of the unchanged job){more}"
    labels: list[tuple[str, str]] = [("Runs", f"{runs}, {length}")]
    if tuning.needed_s is not None:
        within = "" if tuning.budget_s is None else f"; the budget is {format_duration(tuning.budget_s)}"
        labels.append(("Time", f"{about(tuning.needed_s)} for {format_count(tuning.waiting, 'run')}{within}"))
    if not has_prediction:
        labels.append(("Changes", "predictions from the first two runs decide which are tried"))
    if tuning.sources:
        labels.append(("Predicted", f"based on {', '.join(tuning.sources)}"))
    yield Labels((*labels, *_not_tried(tuning)))


def _state(row: Row) -> str:
    tuned: TunedRow = row.item
    return text_of(tuned.samples_per_s) if tuned.run_ids else _STATES.get(tuned.state, tuned.state)


def _error(row: Row) -> str:
    tuned: TunedRow = row.item
    if tuned.gain_error is None:
        return UNKNOWN
    return f"{tuned.gain_error:+.1%}{', outside' if tuned.is_covered is False else ''}"


def _loss(row: Row) -> str:
    tuned: TunedRow = row.item
    words = " ".join(filter(None, (text_of(tuned.loss), _MARKS.get(tuned.loss_verdict or ""))))
    return words if tuned.run_ids else UNKNOWN


def _time(row: Row) -> str:
    tuned: TunedRow = row.item
    if tuned.time_to_loss_s is not None:
        return f"{text_of(tuned.time_to_loss_s)} s"
    if not tuned.run_ids:
        return UNKNOWN
    return f"reached by {tuned.reached} of {len(tuned.run_ids)}" if tuned.reached else "not reached"


def _times(gain: Estimate | None) -> str:
    return UNKNOWN if gain is None else gain.text("times")


def _predicted(row: Row) -> str:
    rate = row[PREDICTED_SPEED]
    if isinstance(rate, Unknown):
        return UNKNOWN
    return format_sig(rate.value) + ("" if rate.is_exact else f" ({rate.text('range')})")


PREDICTED_SPEED = Figure[Estimate](
    "predicted_samples_per_s",
    "predicted",
    SAMPLES_PER_S.title,
    form="figure",
    about="predicted samples/s of all workers",
    cell=_predicted,
)
PREDICTED_AGAINST_ONE_NODE = msgspec.structs.replace(
    PREDICTED_OVER_ONE_NODE, cell=lambda row: _times(row.item.against_one_node)
)
EXPECTED = Figure[float]("expected_s", "a run", "takes", form="duration", about="expected duration of a run")
LEARNING_RATE = Figure[float](
    "learning_rate", "lr", form="number", about=("learning rate; the best one if several were tried")
)
SPEED = msgspec.structs.replace(SAMPLES_PER_S, cell=_state)
GAIN = Figure[Estimate](
    "gain",
    "against",
    "unchanged",
    form="times",
    about="samples/s relative to the unchanged job",
    cell=lambda row: UNKNOWN if row.item.candidate.label == BASELINE else _times(row.item.gain),
)
PREDICTED_GAIN = Figure[Estimate](
    "predicted_gain",
    "predicted",
    "gain",
    form="times",
    about="predicted samples/s relative to the unchanged job",
    cell=lambda row: _times(row.item.candidate.predicted_gain),
)
GAIN_ERROR = Figure[float](
    "gain_error", "error", form="share", about="predicted gain divided by the measured gain, minus 1", cell=_error
)
SAMPLES = Figure[int]("samples", "samples", form="number", about="number of samples in a run")
LOSS = Figure[Estimate]("loss", "loss", form="figure", about="final loss, on held-out data if available", cell=_loss)
TIME_TO_LOSS = Figure[Estimate](
    "time_to_loss_s",
    "time",
    "to the loss",
    form="duration",
    about="training time until the final loss of the unchanged job is reached",
    cell=_time,
)
AGAINST_ONE_NODE = Figure[Estimate](
    "sooner",
    "against",
    "1 node",
    form="times",
    about="time of one node alone (to reach the loss, or per sample) divided by the time of this row",
    cell=lambda row: UNKNOWN if row.item.candidate.nodes == 1 else _times(row.item.sooner),
)


def _sheet(tuning: Tuning) -> Sheet:
    by_speed: tuple[Figure[Any], ...] = (CHANGE, SPEED, GAIN, PREDICTED_GAIN, GAIN_ERROR, AGAINST_ONE_NODE)
    rate = (LEARNING_RATE,) if tuning.learning_rates else ()
    samples = (SAMPLES,) if _samples_differ(tuning) else ()
    by_loss: tuple[Figure[Any], ...] = (CHANGE, *rate, SPEED, *samples, LOSS, TIME_TO_LOSS, AGAINST_ONE_NODE)
    frame = Frame(
        rows=tuple(Row(row, msgspec.structs.asdict(row) | {CHANGE.name: row.candidate.name}) for row in tuning.rows),
        figures=by_speed if tuning.judged_by == "speed" else by_loss,
    )
    return msgspec.structs.replace(frame.sheet(notes=tuple(_notes(tuning))), legend=tuple(_legend(tuning)))


def _notes(tuning: Tuning) -> Iterator[str]:
    seeds = max((len(row.run_ids) for row in tuning.rows), default=0)
    if tuning.judged_by == "speed":
        yield "speed only: a change may need more samples to reach the same loss; --judge loss measures that"
        if seeds == 1:
            yield "one run per row: the variation between runs is unknown"
        return
    yield f"loss: {loss_words(tuning)}"
    if seeds == 1:
        yield "one seed: the variation between seeds is unknown"


def _legend(tuning: Tuning) -> Iterator[str]:
    seeds = max((len(row.run_ids) for row in tuning.rows), default=0)
    if tuning.judged_by == "speed":
        yield "against: samples/s relative to the unchanged job and to one node"
        yield "error: the predicted gain divided by the measured gain, minus 1"
        if seeds > 1:
            yield f"{seeds} runs, interleaved; {PLUS_MINUS} and ranges: 95% confidence interval over runs"
        return
    yield (
        f"time: training time until the loss is within {SAME_LOSS:.1%} of the first row's final loss; against 1 node: "
        "the time of one node divided by the time of the row"
    )
    if tuning.learning_rates:
        rates = ", ".join(f"{rate:g}" for rate in tuning.learning_rates)
        yield f"lr: learning rate; of {rates}, the one with the lowest final loss for the first seed"
    if any(row.loss_verdict in _MARKS for row in tuning.rows):
        noise = ", and by more than the noise" if seeds > 1 else ""
        worse = f"over {SAME_LOSS:.1%} above that of the unchanged job{noise}"
        yield f"worse: the loss is {worse}; such a change is never recommended"
    if any(row.candidate.samples_ratio > 1 for row in tuning.rows):
        yield (
            "samples: a run that averages between nodes gets the largest number of samples that a benchmark needed to "
            "reach DDP's loss"
        )
    if seeds > 1:
        yield (
            f"{seeds} seeds, interleaved; with each seed, all changes see the same data in the same order; "
            f"{PLUS_MINUS} and ranges: 95% confidence interval over seeds"
        )


def _rows(tuning: Tuning) -> Iterator[tuple[str, str]]:
    winner = tuning.row(tuning.recommended)
    if winner is not None and winner.candidate.effects:
        effects = "; ".join(effect.message for effect in winner.candidate.effects)
        yield "Note", f"{winner.candidate.name}: {effects}"
    more = _more_samples(tuning, winner)
    if winner is not None and more > 1 + SOONER:
        name = winner.candidate.name
        words = f"{name}: it needs {times(more)} the samples of the unchanged job to reach the same loss"
        yield "Samples", f"{words}: train longer by that factor"
    why = _why(tuning)
    if why:
        yield "Why", why
    for number, row in enumerate(row for row in tuning.rows if row.needs_steps is not None):
        words = f"if the loss keeps catching up, it will match the unchanged job at about {row.needs_steps} steps"
        yield _label(number, "Steps"), f"{row.candidate.name}: {words} (--steps {row.needs_steps})"
    ends = [row.candidate.name for row in tuning.rows if _is_at_an_end(row)]
    if ends:
        words = "the best learning rate is the lowest or highest one tried, so also try others: --learning-rates"
        yield "Rates", f"{', '.join(ends)}: {words}"
    for row in tuning.rows:
        if row.why is not None:
            yield "Failed", f"{row.candidate.name}: {row.why.message}"
    yield from _not_tried(tuning)
    yield from _budget(tuning)


def _why(tuning: Tuning) -> str:
    if tuning.outcome != "one_node":
        return ""
    alone = tuning.rows[1]
    rates = [row for row in tuning.rows if row.candidate.nodes > 1 and row.samples_per_s and row.samples_to_loss]
    fastest = max(rates, key=lambda row: row.samples_per_s.value if row.samples_per_s else 0.0, default=None)
    if fastest is None or alone.samples_per_s is None or alone.samples_to_loss is None:
        return ""
    if fastest.samples_per_s is None or fastest.samples_to_loss is None:
        return ""
    speed = fastest.samples_per_s.value / alone.samples_per_s.value
    more = fastest.samples_to_loss.value / alone.samples_to_loss.value
    text = f"{fastest.candidate.name}: it trains at {times(speed)} the samples/s of one node"
    if more <= 1:
        return text
    return f"{text}, but needs {times(more)} the samples to reach the same loss: the larger batch saves too few steps"


def _more_samples(tuning: Tuning, row: TunedRow | None) -> float:
    """Its samples to the loss of the unchanged job over those of that; 1 if either is unknown."""
    baseline = tuning.rows[0].samples_to_loss
    return row.samples_to_loss.value / baseline.value if row and row.samples_to_loss and baseline else 1.0


def _is_at_an_end(row: TunedRow) -> bool:
    return bool(row.rates) and row.learning_rate in {row.rates[0].learning_rate, row.rates[-1].learning_rate}


def _not_tried(tuning: Tuning) -> Iterator[tuple[str, str]]:
    for number, words in enumerate(left_out_words(tuning.left_out)):
        yield _label(number, "Not tried"), words


def _budget(tuning: Tuning) -> Iterator[tuple[str, str]]:
    if tuning.budget_s is None:
        return
    used = f"{format_duration(tuning.spent_s)} of {format_duration(tuning.budget_s)}"
    if tuning.waiting:
        used += f"; {format_count(tuning.waiting, 'run')} left: run the same command with a larger --budget"
    yield "Budget", used


def _label(number: int, label: str) -> str:
    return "" if number else label
