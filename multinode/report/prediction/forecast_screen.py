"""What `predict` prints: the break-even, the scenarios, and how far off the model was; `--details` adds every note."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from multinode.analyse.prediction.forecast import Forecast, PredictedScenario
from multinode.report.prediction.forecast_sheets import (
    break_even_sheet,
    forecast_notes,
    forecast_sheet,
    shared_settings,
)
from multinode.report.prediction.forecast_words import error_words
from multinode.report.prediction.needed_words import link_words
from multinode.report.render.screen import Part, labelled, paragraph
from multinode.report.render.sheet import format_sig, times
from multinode.report.render.table import sheet_table
from multinode.units import format_count, format_rate

__all__ = ["forecast_parts"]

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
    sheet = forecast_sheet(forecast, narrow=True)
    left = 0 if details else len(sheet.rows) - _MOST_ROWS
    yield sheet_table(msgspec.structs.replace(sheet, title="", rows=sheet.rows[: len(sheet.rows) - max(0, left)]))
    yield ""
    yield labelled(_rows(forecast, left))
    if details:
        yield ""
        yield sheet_table(break_even_sheet(forecast))
        yield ""
        yield from map(paragraph, forecast_notes(forecast))
    elif more:
        yield f"Details     {more}"
    if next_command:
        yield f"Next        {next_command}"


def _verdict(forecast: Forecast) -> str:
    rows, found = forecast.scenarios, forecast.break_even
    if len(rows) == 1 or found is None:
        return _of_one(max(rows, key=lambda row: row.samples_per_s)) if rows else "No scenario was asked for."
    # One node against itself, spread over several, cannot win.
    needed = found.full_beats_one or found.beats_one
    workers = format_count(found.one_node_workers, "worker")
    return f"Break-even with 1 node, every node full ({workers} each): {link_words(needed)}."


def _of_one(one: PredictedScenario) -> str:
    """A scenario in one sentence."""
    link = f" at {format_rate(one.link_gbit_per_s)}" if one.link_gbit_per_s is not None else ""
    low, high = (format_sig(end) for end in one.interval)
    said = (
        f"{format_count(one.nodes, 'node')}{link}: {format_sig(one.samples_per_s)} samples/s ({low}-{high}) predicted"
    )
    if one.nodes == 1:
        return f"{said}."
    speed = f"{times(one.speedup)} faster" if one.speedup >= 1 else f"{times(1 / one.speedup)} slower"
    return f"{said}, {speed} than 1 node ({one.efficiency:.0%} scaling efficiency)."


def _rows(forecast: Forecast, left: int) -> Iterator[tuple[str, str]]:
    if left > 0:
        yield "", f"and {format_count(left, 'scenario')} more: --details"
    if forecast.scenarios:
        yield "Settings", shared_settings(forecast.scenarios)
    if forecast.break_even is not None:
        yield (
            "Efficiency",
            f"{forecast.break_even.target:.0%} scaling efficiency: {link_words(forecast.break_even.efficient)}",
        )
    yield "Error", error_words(forecast.back_test)
