"""What `predict` prints: break-even, scenarios, error of the model; with `--details` all notes. Makes no figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from multinode.figures.figure import Figure, Row
from multinode.figures.frame import Frame
from multinode.model.workload import METHOD, PER_DEVICE_BATCH, STRATEGY
from multinode.predict.back_test import LEAST_RUNS
from multinode.predict.break_even import SLOWEST_GBIT_PER_S, BreakEven, Needed
from multinode.predict.forecast import (
    AVERAGED,
    BUCKET,
    GRADIENTS,
    OVERLAPPED,
    SCENARIO_ACCUMULATION,
    SCENARIO_LINK,
    SCENARIO_NODES,
    SCENARIO_WORKERS,
    Forecast,
    PredictedScenario,
    scenario_row,
)
from multinode.predict.shortfall import shortfall_words
from multinode.profile.measured import EFFICIENCY, EXPOSED, SPEEDUP, WORLD_SIZE
from multinode.profile.throughput import SAMPLES_PER_S, STEP_TIME
from multinode.render.sheet import Block, CommandLine, Labels, Prose, Sheet, in_detail
from multinode.stats.estimate import Estimate, inverse
from multinode.units import format_count, format_figure, format_range, format_rate, format_sig, times

# A narrower range is one figure.
_ONE_FIGURE = 1.05
# Rounding must not decide.
_ROUNDING = 1e-9


# Where no link is certain, none up to this rate is, nor one of the rate that is predicted.
_FAST_GBIT_PER_S = 100.0


def link_words(needed: Needed) -> str:
    """A break-even link with its range: `1 Gbit/s (800 Mbit/s to 1.2 Gbit/s)`, `at most 2 Gbit/s`."""
    return _needed_words(needed, "link", f"above {format_rate(max(_FAST_GBIT_PER_S, needed.value or 0.0))}", _rate)


def _is_range(needed: Needed) -> bool:
    """Whether it has an amount that decides, and not a sentence."""
    if needed.low is None or (needed.low <= SLOWEST_GBIT_PER_S and needed.high is None):
        return False
    return needed.high is None or needed.high > SLOWEST_GBIT_PER_S


def break_even_words(
    break_even: BreakEven,
    nodes: int,
    link_gbit_per_s: float | None = None,
    *,
    shortly: bool = False,
    alike: bool = False,
) -> str:
    """Which nodes overtake which one, at what link, and what the link is: for the layout that can win."""
    # One node against itself, spread over several, cannot win.
    needed, workers = (
        break_even.full_beats_one or break_even.beats_one,
        format_count(break_even.one_node_workers, "worker"),
    )
    each = f" with {workers} each" if break_even.full_beats_one is not None else ""
    sides, words = (f"{format_count(nodes, 'node')}{each}", f"1 node with {workers}"), link_words(needed)
    yours = f"; your link runs at {format_rate(link_gbit_per_s)}" if link_gbit_per_s is not None else ""
    if not _is_range(needed):
        return f"{words}, {sides[0]} against {sides[1]} (predicted)"
    if shortly:
        return f"{words}, predicted, {f'with {workers} per node' if alike else f'against {sides[1]}'}"
    return f"{words}, predicted. On a faster link, {sides[0]} are faster than {sides[1]}{yours}"


def accumulation_words(needed: Needed) -> str:
    """Micro-batches per step, and what they make of the global batch."""
    if needed.value is None:
        return _count(needed)
    if needed.low is None:
        return f"{needed.value:g}; {needed.message}"
    return f"{_count(needed)}; at {needed.value:g} {needed.message}"


def _count(needed: Needed) -> str:
    return _needed_words(needed, "accumulation", "an unknown maximum", lambda count, _: f"{count:g}")


def _needed_words(needed: Needed, noun: str, beyond: str, words: Callable[[float, int], str]) -> str:
    """What is needed of a noun; `words` writes an amount with its unit, -1 rounds it down, 1 up.

    `beyond` is an end that is not known.
    """
    if needed.low is None:
        return needed.message
    is_any, low = needed.low <= SLOWEST_GBIT_PER_S, words(needed.low, -1)
    if needed.high is None and is_any:
        return f"inconclusive: any {noun} may be enough, or none"
    if is_any and needed.high is not None:
        return needed.message if needed.high <= SLOWEST_GBIT_PER_S else f"at most {words(needed.high, 1)}"
    if needed.value is None:
        return f"at least {low}, but perhaps no {noun} is enough"
    middle, high = words(needed.value, 0), beyond if needed.high is None else words(needed.high, 1)
    if needed.high is not None and needed.high / needed.low <= _ONE_FIGURE:
        return middle
    return f"{middle} ({format_range(low, 'to', high)})"


def _rate(gbit_per_s: float, way: int) -> str:
    unit = 10.0 ** (math.floor(math.log10(gbit_per_s)) - 1)
    digits = gbit_per_s / unit
    if not way:
        return format_rate(round(digits) * unit)
    return format_rate((math.ceil(digits - _ROUNDING) if way > 0 else math.floor(digits + _ROUNDING)) * unit)


_MOST_SCENARIOS = 60
# What a scenario may vary: a column where it does, and where all share it a phrase of the title.
_SETTINGS: tuple[tuple[Figure[Any], Callable[[PredictedScenario], str]], ...] = (
    (STRATEGY, lambda row: row.strategy),
    (METHOD, lambda row: "full fine-tuning" if row.method == "full" else row.method or ""),
    (
        SCENARIO_WORKERS,
        lambda row: (
            f"{' + '.join(map(str, row.unequal))} workers"
            if row.unequal
            else f"{format_count(row.workers_per_node, 'worker')} per node"
        ),
    ),
    (PER_DEVICE_BATCH, lambda row: f"batch {row.per_device_batch:g}"),
    (SCENARIO_ACCUMULATION, lambda row: f"accumulation {row.accumulation}"),
    (GRADIENTS, lambda row: f"gradients in {words}" if (words := row.levers.words.get("compression")) else ""),
    (AVERAGED, lambda row: f"averaged {words}" if (words := row.levers.words.get("averaging")) else ""),
    (BUCKET, lambda _: ""),
    (OVERLAPPED, lambda row: "" if row.overlap else "no overlap"),
)
_WORKERS = msgspec.structs.replace(WORLD_SIZE, title=WORLD_SIZE.words)
_FIGURES: tuple[Figure[Any], ...] = (
    *(STEP_TIME, SAMPLES_PER_S, SAMPLES_PER_S.ranged, SPEEDUP.as_form("times"), EFFICIENCY, EXPOSED),
)


def _speed(row: Row) -> str:
    speed: Estimate = row.item.samples_per_s
    beside = "measured" if row.item.measured else f"({speed.text('range')})"
    return f"{format_sig(speed.value)} {beside}"


def _against(row: Row) -> str:
    speedup: Estimate = row.item.speedup
    return times(speedup.value) if row.item.measured else speedup.text("times")


_NARROW: tuple[Figure[Any], ...] = (
    msgspec.structs.replace(SAMPLES_PER_S, cell=_speed),
    msgspec.structs.replace(SPEEDUP, title="against", unit="1 node", cell=_against),
    msgspec.structs.replace(EFFICIENCY, title="scaling", unit=EFFICIENCY.title),
)
_MEASURED_NODES = msgspec.structs.replace(
    SCENARIO_NODES, cell=lambda row: f"{'*' if row.item.measured else ''}{row.item.nodes}"
)
_ALIKE = 1e-9


def forecast_sheet(forecast: Forecast, *, narrow: bool = False) -> Sheet:
    """Nodes and link, the settings that vary, the figures; `*` marks what was measured.

    Args:
        forecast: with its scenarios.
        narrow: for a terminal, where the parts of a step have no room.
    """
    rows, figures = _with_one_node(forecast), _NARROW if narrow else _FIGURES
    rows = tuple(each for row in rows for each in (row, *row.cases))
    if narrow and all(abs(row.efficiency - row.speedup.value) < _ALIKE for row in rows):
        # With as many workers as the one node has, it is the speed-up again.
        figures = figures[:-1]
    varied = [
        figure for figure, _ in _SETTINGS if len({figure.tell(scenario_row(row)) for row in forecast.scenarios}) > 1
    ]
    marked = (
        "; *: this scenario was measured, but its row shows the predicted values"
        if not narrow and any(row.measured for row in rows)
        else ""
    )
    nodes = SCENARIO_NODES if narrow else _MEASURED_NODES
    frame = Frame(
        title=f"predicted: {shared_settings(forecast.scenarios)}",
        rows=tuple(map(scenario_row, rows)),
        figures=(nodes, SCENARIO_LINK, _WORKERS, *varied, *figures),
    )
    notes = (
        f"{'against 1 node: speed relative to' if narrow else 'speed-up: over'} 1 node with all its workers{marked}",
        *(("ranges: 90% prediction interval",) if narrow else ()),
        *_case_notes(rows),
    )
    return frame.sheet(notes=notes)


def _case_notes(rows: Sequence[PredictedScenario]) -> Iterator[str]:
    names = ", ".join(dict.fromkeys(row.case for row in rows if row.case))
    if names:
        yield f"{names}: predicted for the case that NCCL uses the network above only in this way"


def rows_words(forecast: Forecast) -> str:
    """Of how many workers the rows are, where the break-even above them is of others; else empty."""
    break_even = forecast.break_even
    per_node = {row.workers_per_node for row in forecast.scenarios if row.nodes > 1}
    if (
        break_even is None
        or break_even.full_beats_one is None
        or not per_node
        or break_even.one_node_workers in per_node
    ):
        return ""
    here = format_count(min(per_node), "worker")
    return (
        f"These rows have {here} per node; the break-even is for {break_even.one_node_workers} per node "
        "(--workers-per-node)."
    )


def _with_one_node(forecast: Forecast) -> tuple[PredictedScenario, ...]:
    alone, rows = forecast.one_node, forecast.scenarios
    if alone is None or any(row.nodes == 1 or not _is_beside(row, alone) for row in rows):
        return rows
    return (alone, *rows)


def _is_beside(row: PredictedScenario, alone: PredictedScenario) -> bool:
    names = ("strategy", "method", "per_device_batch", "accumulation")
    return all(getattr(row, name) == getattr(alone, name) for name in names)


def shared_settings(rows: Sequence[PredictedScenario]) -> str:
    """What all scenarios have alike."""
    table = list(map(scenario_row, rows))
    words = [word(rows[0]) for figure, word in _SETTINGS if rows and len({figure.tell(row) for row in table}) == 1]
    return ", ".join(filter(None, words))


def what_if_sheet(forecast: Forecast | None, *, narrow: bool = False) -> Sheet:
    """The table of a forecast among other tables: few rows, and everything else to know below it."""
    if forecast is None:
        return Sheet(title="what if")
    sheet = forecast_sheet(forecast, narrow=narrow)
    left = len(sheet.rows) - _MOST_SCENARIOS
    more = (f"and {left} more in the JSON",) if left > 0 else ()
    return Sheet(
        title="what if",
        columns=sheet.columns,
        rows=sheet.rows[:_MOST_SCENARIOS],
        notes=(sheet.title, *sheet.notes, *more, *forecast_notes(forecast)),
    )


def break_even_sheet(forecast: Forecast | None) -> Sheet:
    """What it would take; empty where that is not known."""
    break_even = forecast.break_even if forecast is not None else None
    rows: list[tuple[str, str]] = []
    if break_even is not None:
        target, workers = f"{break_even.target:.0%}", format_count(break_even.one_node_workers, "worker")
        # One node against itself, spread over several, cannot win.
        is_itself = break_even.beats_one.value is None and break_even.full_beats_one is not None
        rows = [
            *([] if is_itself else [(f"faster than 1 node with {workers}", link_words(break_even.beats_one))]),
            *(
                [(f"faster than 1 node, with {workers} on each", link_words(break_even.full_beats_one))]
                if break_even.full_beats_one is not None
                else []
            ),
            (f"{target} scaling efficiency", link_words(break_even.efficient)),
            ("maximum overlap of communication and compute", link_words(break_even.nothing_exposed)),
            (f"accumulation for {target} scaling efficiency", accumulation_words(break_even.accumulation)),
            (f"node {break_even.next_node.nodes}", break_even.next_node.message),
        ]
    return Sheet(title="break-even", rows=tuple(rows))


def forecast_notes(forecast: Forecast) -> Iterator[str]:
    """How far the model is to be trusted, where it has its figures, and why the intervals are wide."""
    yield f"back-test: {forecast.back_test.outcome.message}"
    yield _intervals(forecast)
    yield from (f"source: {source}" for source in forecast.sources)
    yield from (f"note: {note.message}" for note in forecast.notes)
    widest = max((row for row in forecast.scenarios if row.nodes > 1), key=_width, default=None)
    if widest is not None:
        whys = "; ".join(doubt.message for doubt in widest.doubts)
        yield f"reasons for the widest interval ({_width(widest):.0%} of its value): {whys}"


def _intervals(forecast: Forecast) -> str:
    quantile = forecast.back_test.quantile
    if quantile is None or not quantile.is_conformal:
        runs = quantile.runs if quantile is not None else 0
        return f"intervals: assumed, not back-tested ({runs} of the {LEAST_RUNS} runs needed for a 90% interval)"
    beyond = sum(row.basis == "assumed" and row.nodes > 1 for row in forecast.scenarios)
    note = f"intervals: 90%, from the residuals of {quantile.runs} runs, up to {quantile.relative:.1%} off"
    outside = f"for {format_count(beyond, 'row')} outside the tested range, assumed to be at least as wide"
    return f"{note}; {outside}" if beyond else note


def _width(row: PredictedScenario) -> float:
    rate = row.samples_per_s
    return (rate.high - rate.low) / rate.value


_MOST_ROWS = 20


def show(forecast: Forecast) -> Iterator[Block]:
    """The break-even, the scenarios, what follows for today's training; in detail each scenario and note."""
    yield Prose(_verdict(forecast), "lead")
    yield Prose(rows_words(forecast))
    sheet = msgspec.structs.replace(forecast_sheet(forecast, narrow=True), title="")
    yield msgspec.structs.replace(sheet, rows=sheet.rows[:_MOST_ROWS], detail="brief")
    yield msgspec.structs.replace(sheet, detail="screen")
    yield msgspec.structs.replace(forecast_sheet(forecast), detail="page")
    left = len(sheet.rows) - _MOST_ROWS
    if left > 0:
        yield Labels((("", f"and {format_count(left, 'scenario')} more: --details"),), detail="brief")
    yield Labels(tuple(_rows(forecast)))
    yield from in_detail((break_even_sheet(forecast), *(Prose(note, "note") for note in forecast_notes(forecast))))


def _verdict(forecast: Forecast) -> str:
    rows, break_even, today = forecast.scenarios, forecast.break_even, forecast.today
    if len(rows) == 1 or break_even is None:
        return _of_one(max(rows, key=lambda row: row.samples_per_s.value)) if rows else "No scenario was requested."
    link = today.link_gbit_per_s if today is not None else None
    return f"Break-even: {break_even_words(break_even, break_even.next_node.nodes - 1, link)}."


def _of_one(row: PredictedScenario) -> str:
    low, high = map(format_figure, row.samples_per_s.bounds)
    rate = f"{format_figure(row.samples_per_s.value)} samples/s ({low} to {high})"
    sentence = f"{_place(row)}: {rate} predicted"
    if row.nodes == 1:
        return f"{sentence}."
    if row.speedup.low < 1 < row.speedup.high:
        range_told = f"{row.speedup.text('times_range')} the speed of 1 node"
        return f"Inconclusive: {_place(row)} would reach {range_told}: {rate} predicted."
    more, how = (row.speedup, "faster") if row.speedup.value >= 1 else (inverse(row.speedup), "slower")
    return f"{sentence}, {times(more.value)} {how} than 1 node ({more.text('times_range')})."


def _place(row: PredictedScenario) -> str:
    link = f" at {format_rate(row.link_gbit_per_s)}" if row.link_gbit_per_s is not None else ""
    return f"{format_count(row.nodes, 'node')}{link}"


def _today(forecast: Forecast) -> Iterator[tuple[str, str]]:
    today, alone = forecast.today, forecast.one_node
    if today is None or alone is None:
        return
    rate = f"{_place(today)}: {format_figure(today.samples_per_s.value)} samples/s measured"
    if today.speedup.high >= 1:
        yield "Today", rate
        return
    yield "Today", f"{rate}, {times(1 / today.speedup.value)} slower than 1 node: for now, train on 1 node"
    if forecast.command is not None:
        yield "", CommandLine(forecast.command.launch(f"--nodes 1 --workers-per-node {alone.workers_per_node}"))


def _rows(forecast: Forecast) -> Iterator[tuple[str, str]]:
    if forecast.scenarios:
        yield "Settings", shared_settings(forecast.scenarios)
    yield from _today(forecast)
    if forecast.own_link is not None:
        yield "Your link", _own_link_words(forecast.own_link)
    if forecast.shortfall is not None:
        yield "Measured", shortfall_words(forecast.shortfall)
    if forecast.break_even is not None:
        yield "Needed", f"{_target(forecast)}: {link_words(forecast.break_even.efficient)}"
    yield "Model", forecast.back_test.outcome.message
    if forecast.measure:
        yield "Measure", forecast.measure


def _own_link_words(row: PredictedScenario) -> str:
    """Whether several nodes are faster on the training's own link, how certainly, and by how much."""
    if row.speedup.low >= 1:
        chance = "faster than 1 node"
    elif row.speedup.high <= 1:
        chance = "slower than 1 node"
    else:
        chance = f"probably {'faster' if row.speedup.value >= 1 else 'slower'} than 1 node"
    return f"{_place(row)}: {chance} ({row.speedup.text('times_range')} its speed)"


def _target(forecast: Forecast) -> str:
    break_even, today = forecast.break_even, forecast.today
    target = break_even.target if break_even is not None else 0.0
    if break_even is not None and today is not None and today.layout.workers == break_even.one_node_workers:
        return f"to be within {1 - target:.0%} of the speed of 1 node"
    return f"for {target:.0%} scaling efficiency"
