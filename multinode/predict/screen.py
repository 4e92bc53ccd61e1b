"""What `predict` prints: the break-even, the scenarios, and how far off the model was; `--details` adds every note."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from multinode.predict.forecast import Forecast, PredictedScenario
from multinode.predict.sheets import (
    break_even_sheet,
    forecast_notes,
    forecast_sheet,
    rows_words,
    shared_settings,
)
from multinode.predict.words import break_even_words, launch_command, link_words
from multinode.render.sheet import format_sig, times
from multinode.render.table import CommandLine, Part, footer, labelled_parts, paragraph, sheet_table
from multinode.units import format_count, format_rate

_MOST_ROWS = 20


def forecast_parts(
    forecast: Forecast, *, details: bool = False, more: str = "", next_command: str = ""
) -> Iterator[Part]:
    """The screen of `predict`.

    Args:
        forecast: with its words.
        details: with every scenario and note.
        more: the command that shows the details; empty where they are shown.
        next_command: what to do next; empty for nothing.
    """
    yield paragraph(_verdict(forecast), "bold")
    yield ""
    if told := rows_words(forecast):
        yield paragraph(told)
        yield ""
    sheet = forecast_sheet(forecast, narrow=True)
    left = 0 if details else len(sheet.rows) - _MOST_ROWS
    yield sheet_table(msgspec.structs.replace(sheet, title="", rows=sheet.rows[: len(sheet.rows) - max(0, left)]))
    yield ""
    yield from labelled_parts(_rows(forecast, left))
    if details:
        yield ""
        yield sheet_table(break_even_sheet(forecast))
        yield ""
        yield from map(paragraph, forecast_notes(forecast))
    elif more:
        yield footer("Details", more)
    if next_command:
        yield footer("Next", next_command)


def _verdict(forecast: Forecast) -> str:
    rows, found, today = forecast.scenarios, forecast.break_even, forecast.today
    if len(rows) == 1 or found is None:
        return _of_one(max(rows, key=lambda row: row.samples_per_s)) if rows else "No scenario was requested."
    link = today.link_gbit_per_s if today is not None else None
    return f"Break-even (predicted): {break_even_words(found, found.next_node.nodes - 1, link)}."


def _of_one(one: PredictedScenario) -> str:
    low, high = (format_sig(end) for end in one.interval)
    rate = f"{format_sig(one.samples_per_s)} samples/s ({low} to {high})"
    said = f"{_place(one)}: {rate} predicted"
    if one.nodes == 1:
        return f"{said}."
    span = one.speedup_interval or (one.speedup, one.speedup)
    if span[0] < 1 < span[1]:
        range_told = f"{times(span[0])} to {times(span[1])} the speed of 1 node"
        return f"Inconclusive: {_place(one)} would reach {range_told}: {rate} predicted."
    if one.speedup >= 1:
        return f"{said}, {times(one.speedup)} faster than 1 node ({times(span[0])} to {times(span[1])})."
    return f"{said}, {times(1 / one.speedup)} slower than 1 node ({times(1 / span[1])} to {times(1 / span[0])})."


def _place(one: PredictedScenario) -> str:
    link = f" at {format_rate(one.link_gbit_per_s)}" if one.link_gbit_per_s is not None else ""
    return f"{format_count(one.nodes, 'node')}{link}"


def _today(forecast: Forecast) -> Iterator[tuple[str, str]]:
    today, one = forecast.today, forecast.one_node
    if today is None or one is None:
        return
    rate = f"{_place(today)}: {format_sig(today.samples_per_s)} samples/s measured"
    span = today.speedup_interval
    if span is None or span[1] >= 1:
        yield "Today", rate
        return
    yield "Today", f"{rate}, {times(1 / today.speedup)} slower than 1 node: for now, train on 1 node"
    if forecast.job:
        options = f"--nodes 1 --workers-per-node {one.workers_per_node}"
        yield "", CommandLine(launch_command(forecast.job, forecast.hosts, options))


def _rows(forecast: Forecast, left: int) -> Iterator[tuple[str, str]]:
    if left > 0:
        yield "", f"and {format_count(left, 'scenario')} more: --details"
    if forecast.scenarios:
        yield "Settings", shared_settings(forecast.scenarios)
    yield from _today(forecast)
    if forecast.break_even is not None:
        yield "Needed", f"{_target(forecast)}: {link_words(forecast.break_even.efficient)}"
    yield "Model", forecast.back_test.sentence
    if forecast.measure:
        yield "Measure", forecast.measure


def _target(forecast: Forecast) -> str:
    found, today = forecast.break_even, forecast.today
    target = found.target if found is not None else 0.0
    if found is not None and today is not None and today.layout.workers == found.one_node_workers:
        return f"to be within {1 - target:.0%} of the speed of 1 node"
    return f"for {target:.0%} scaling efficiency"
