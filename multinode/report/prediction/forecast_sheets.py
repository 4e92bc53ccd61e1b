"""A forecast as tables of text, for terminal, page and Markdown: its scenarios, and the break-even.

No figure is made here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from multinode.analyse.prediction.back_test import LEAST_RUNS
from multinode.analyse.prediction.break_even import Needed, describe_link, describe_needed
from multinode.analyse.prediction.forecast import Forecast, PredictedScenario
from multinode.report.render.sheet import UNKNOWN, Column, Sheet, figure, format_sig
from multinode.units import format_count, format_rate

__all__ = ["break_even_sheet", "forecast_notes", "forecast_sheet", "what_if_sheet"]

_MOST_SCENARIOS = 60
_Told = Callable[[PredictedScenario], str]
# What a scenario may vary: a column where it does, and where all share it a phrase of the title.
_SETTINGS: tuple[tuple[Column, _Told, _Told], ...] = (
    (Column("strategy", words=True), lambda one: one.strategy, lambda one: one.strategy),
    (Column("method", words=True), lambda one: one.method or UNKNOWN, lambda one: one.method or ""),
    (
        Column("workers", "a node"),
        lambda one: str(one.workers_per_node),
        lambda one: f"{format_count(one.workers_per_node, 'worker')} a node",
    ),
    (Column("batch"), lambda one: f"{one.per_device_batch:g}", lambda one: f"batch {one.per_device_batch:g}"),
    (Column("accumulation"), lambda one: str(one.accumulation), lambda one: f"accumulation {one.accumulation}"),
    (
        Column("gradients as", words=True),
        lambda one: one.grad_compress or UNKNOWN,
        lambda one: f"gradients as {one.grad_compress}" if one.grad_compress else "",
    ),
    (Column("bucket", "MiB"), lambda one: figure(one.bucket_mib, "g"), lambda _: ""),
    (Column("overlap"), lambda one: "on" if one.overlap else "off", lambda one: "" if one.overlap else "no overlap"),
)
_FIGURES: tuple[tuple[Column, _Told], ...] = (
    (Column("step", "ms"), lambda one: format_sig(one.step_time_ms)),
    (Column("samples/s"), lambda one: format_sig(one.samples_per_s)),
    (Column("interval"), lambda one: f"{format_sig(one.interval[0])} to {format_sig(one.interval[1])}"),
    (Column("speed-up"), lambda one: f"{one.speedup:.2f}"),
    (Column("efficiency"), lambda one: f"{one.efficiency:.0%}"),
    (Column("exposed", "ms"), lambda one: format_sig(one.parts.exposed_ms)),
)


def forecast_sheet(forecast: Forecast) -> Sheet:
    """Nodes and link, the settings that vary, the figures; `*` marks what was measured."""
    rows = forecast.scenarios
    varies = [len({told(row) for row in rows}) > 1 for _, told, _ in _SETTINGS]
    told = [(column, cell) for (column, cell, _), varied in zip(_SETTINGS, varies, strict=True) if varied]
    shared = [word(rows[0]) for (_, _, word), varied in zip(_SETTINGS, varies, strict=True) if rows and not varied]
    marked = "; * measured, its figures are the model's own" if any(row.measured for row in rows) else ""
    return Sheet(
        title=f"predicted: {', '.join(filter(None, shared)) if rows else 'nothing was asked for'}",
        columns=(Column("nodes"), Column("link"), *(column for column, _ in (*told, *_FIGURES))),
        rows=tuple(
            (f"{'*' if row.measured else ''}{row.nodes}", _link(row), *(cell(row) for _, cell in (*told, *_FIGURES)))
            for row in rows
        ),
        notes=(f"speed-up over one node with all its workers{marked}",),
    )


def what_if_sheet(forecast: Forecast | None) -> Sheet:
    """The same where it is one table of many: no more rows than one reads, and all that there is to know below it."""
    if forecast is None:
        return Sheet(title="what if")
    sheet = forecast_sheet(forecast)
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
    found = forecast.break_even if forecast is not None else None
    rows: list[tuple[str, str]] = []
    if found is not None:
        target, workers = f"{found.target:.0%}", format_count(found.one_node_workers, "worker")
        # One node against itself, shared out over several, has nothing to win.
        is_itself = found.beats_one.value is None and found.full_beats_one is not None
        rows = [
            *([] if is_itself else [(f"faster than one node with {workers}", describe_link(found.beats_one))]),
            *(
                [(f"faster than one node, with {workers} on each", describe_link(found.full_beats_one))]
                if found.full_beats_one is not None
                else []
            ),
            (f"efficiency {target}", describe_link(found.efficient)),
            ("nothing that can be hidden is exposed", describe_link(found.nothing_exposed)),
            (f"accumulation for {target}", _accumulation(found.accumulation)),
            (f"node {found.next_node.nodes}", found.next_node.sentence),
        ]
    return Sheet(title="break-even", rows=tuple(rows))


def forecast_notes(forecast: Forecast) -> Iterator[str]:
    """How far the model is to be trusted, where it has its figures, and why the intervals are wide."""
    yield f"back-test: {forecast.back_test.sentence}"
    yield _intervals(forecast)
    yield from (f"from: {source}" for source in forecast.sources)
    yield from (f"note: {note}" for note in forecast.notes)
    widest = max((row for row in forecast.scenarios if row.nodes > 1), key=_width, default=None)
    if widest is not None:
        whys = "; ".join(doubt.why for doubt in widest.doubts)
        yield f"the widest interval is {_width(widest):.0%} of its figure: {whys}"


def _intervals(forecast: Forecast) -> str:
    """Where they are from."""
    quantile = forecast.back_test.quantile
    if quantile is None or not quantile.is_conformal:
        runs = quantile.runs if quantile is not None else 0
        return f"intervals: assumed, not back-tested: {runs} of the {LEAST_RUNS} runs that one of 90% takes"
    beyond = sum(row.basis == "assumed" and row.nodes > 1 for row in forecast.scenarios)
    told = f"intervals: 90%, by the residuals of {quantile.runs} runs: up to {quantile.relative:.1%} off"
    return (
        f"{told}; {format_count(beyond, 'row')} beyond what they tested: assumed, and no narrower" if beyond else told
    )


def _width(row: PredictedScenario) -> float:
    return (row.interval[1] - row.interval[0]) / row.samples_per_s


def _link(row: PredictedScenario) -> str:
    return UNKNOWN if row.link_gbit_per_s is None else format_rate(row.link_gbit_per_s)


def _accumulation(needed: Needed) -> str:
    if needed.value is None:
        return f"none is enough: {needed.why}" if needed.low is None else _count(needed)
    # An earlier release stored no range.
    return (
        f"{needed.value:g}; {needed.why}"
        if needed.low is None
        else f"{_count(needed)}; at {needed.value:g} {needed.why}"
    )


def _count(needed: Needed) -> str:
    return describe_needed(needed, "accumulation", lambda count, _: f"{count:g}")
