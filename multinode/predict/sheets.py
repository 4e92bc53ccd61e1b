"""A forecast as tables of text: its scenarios, the break-even and notes. No figure is made here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from multinode.predict.forecast import Forecast, PredictedScenario
from multinode.predict.leave_one_out import LEAST_RUNS
from multinode.predict.words import accumulation_words, link_words
from multinode.render.sheet import UNKNOWN, Column, Sheet, figure, format_sig, span_of_times
from multinode.units import format_count, format_rate

_MOST_SCENARIOS = 60
_Told = Callable[[PredictedScenario], str]
# What a scenario may vary: a column where it does, and where all share it a phrase of the title.
_SETTINGS: tuple[tuple[Column, _Told, _Told], ...] = (
    (Column("strategy", words=True), lambda one: one.strategy, lambda one: one.strategy),
    (
        Column("method", words=True),
        lambda one: one.method or UNKNOWN,
        lambda one: "full fine-tuning" if one.method == "full" else one.method or "",
    ),
    (
        Column("workers", "per node"),
        lambda one: " + ".join(map(str, one.unequal or (one.workers_per_node,))),
        lambda one: (
            f"{' + '.join(map(str, one.unequal))} workers"
            if one.unequal
            else f"{format_count(one.workers_per_node, 'worker')} per node"
        ),
    ),
    (Column("batch"), lambda one: f"{one.per_device_batch:g}", lambda one: f"batch {one.per_device_batch:g}"),
    (Column("accum."), lambda one: str(one.accumulation), lambda one: f"accumulation {one.accumulation}"),
    (
        Column("gradients", words=True),
        lambda one: one.grad_compress or UNKNOWN,
        lambda one: f"gradients as {one.grad_compress}" if one.grad_compress else "",
    ),
    (
        Column("averaged", words=True),
        lambda one: one.averaging or "every step",
        lambda one: f"averaged {one.averaging}" if one.averaging else "",
    ),
    (Column("bucket", "MiB"), lambda one: figure(one.bucket_mib, "g"), lambda _: ""),
    (Column("overlap"), lambda one: "on" if one.overlap else "off", lambda one: "" if one.overlap else "no overlap"),
)
_FIGURES: tuple[tuple[Column, _Told], ...] = (
    (Column("step", "ms"), lambda one: format_sig(one.step_time_ms)),
    (Column("samples/s"), lambda one: format_sig(one.samples_per_s)),
    (Column("range"), lambda one: f"{format_sig(one.interval[0])}-{format_sig(one.interval[1])}"),
    (Column("speed-up"), lambda one: f"{one.speedup:.2f}x"),
    (Column("efficiency"), lambda one: f"{one.efficiency:.0%}"),
    (Column("exposed", "ms"), lambda one: format_sig(one.parts.exposed_ms)),
)


_NARROW: tuple[tuple[Column, _Told], ...] = (
    (
        Column("samples/s"),
        lambda one: (
            f"{format_sig(one.samples_per_s)} "
            + ("measured" if one.measured else f"({format_sig(one.interval[0])}-{format_sig(one.interval[1])})")
        ),
    ),
    (
        Column("against", "1 node"),
        lambda one: span_of_times(one.speedup, None if one.measured else one.speedup_interval),
    ),
    (Column("scaling", "efficiency"), lambda one: f"{one.efficiency:.0%}"),
)
_ALIKE = 1e-9


def forecast_sheet(forecast: Forecast, *, narrow: bool = False) -> Sheet:
    """Nodes and link, the settings that vary, the figures; `*` marks what was measured.

    Args:
        forecast: with its scenarios.
        narrow: for a terminal, where the parts of a step have no room.
    """
    rows, figures = _with_one_node(forecast), _NARROW if narrow else _FIGURES
    if narrow and all(abs(row.efficiency - row.speedup) < _ALIKE for row in rows):
        # With as many workers as the one node has, it is the speed-up again.
        figures = figures[:-1]
    varies = [len({told(row) for row in forecast.scenarios}) > 1 for _, told, _ in _SETTINGS]
    told = [(column, cell) for (column, cell, _), varied in zip(_SETTINGS, varies, strict=True) if varied]
    mark = "" if narrow else "*"
    marked = "; * measured; these values are the model's" if mark and any(row.measured for row in rows) else ""
    return Sheet(
        title=f"predicted: {shared_settings(forecast.scenarios)}",
        columns=(Column("nodes"), Column("link"), Column("workers"), *(column for column, _ in (*told, *figures))),
        rows=tuple(
            (
                f"{mark if row.measured else ''}{row.nodes}",
                _link(row),
                f"{row.layout.workers}",
                *(cell(row) for _, cell in (*told, *figures)),
            )
            for row in rows
        ),
        notes=(
            f"{'against 1 node:' if narrow else 'speed-up: over 1 node'} with all its workers{marked}",
            *(("ranges: 90% prediction interval",) if narrow else ()),
        ),
    )


def rows_words(forecast: Forecast) -> str:
    """Of how many workers the rows are, where the break-even above them is of others; else empty."""
    found = forecast.break_even
    per_node = {row.workers_per_node for row in forecast.scenarios if row.nodes > 1}
    if found is None or found.full_beats_one is None or not per_node or found.one_node_workers in per_node:
        return ""
    here = format_count(min(per_node), "worker")
    return (
        f"These rows have {here} per node; the break-even is for {found.one_node_workers} per node "
        "(--workers-per-node):"
    )


def _with_one_node(forecast: Forecast) -> tuple[PredictedScenario, ...]:
    one, rows = forecast.one_node, forecast.scenarios
    if one is None or any(row.nodes == 1 or not _is_beside(row, one) for row in rows):
        return rows
    return (one, *rows)


def _is_beside(row: PredictedScenario, one: PredictedScenario) -> bool:
    names = ("strategy", "method", "per_device_batch", "accumulation")
    return all(getattr(row, name) == getattr(one, name) for name in names)


def shared_settings(rows: Sequence[PredictedScenario]) -> str:
    """What all scenarios have alike."""
    words = [word(rows[0]) for _, told, word in _SETTINGS if rows and len({told(row) for row in rows}) == 1]
    return ", ".join(filter(None, words))


def what_if_sheet(forecast: Forecast | None, *, narrow: bool = False) -> Sheet:
    """The same where it is one table of many: no more rows than one reads, and all that there is to know below it."""
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
    found = forecast.break_even if forecast is not None else None
    rows: list[tuple[str, str]] = []
    if found is not None:
        target, workers = f"{found.target:.0%}", format_count(found.one_node_workers, "worker")
        # One node against itself, spread over several, cannot win.
        is_itself = found.beats_one.value is None and found.full_beats_one is not None
        rows = [
            *([] if is_itself else [(f"faster than 1 node with {workers}", link_words(found.beats_one))]),
            *(
                [(f"faster than 1 node, with {workers} on each", link_words(found.full_beats_one))]
                if found.full_beats_one is not None
                else []
            ),
            (f"efficiency {target}", link_words(found.efficient)),
            ("all communication that overlap can hide is hidden", link_words(found.nothing_exposed)),
            (f"accumulation for {target}", accumulation_words(found.accumulation)),
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
        yield f"the widest interval is {_width(widest):.0%} of its value: {whys}"


def _intervals(forecast: Forecast) -> str:
    quantile = forecast.back_test.quantile
    if quantile is None or not quantile.is_conformal:
        runs = quantile.runs if quantile is not None else 0
        return f"intervals: assumed, not back-tested: {runs} of the {LEAST_RUNS} runs needed for a 90% interval"
    beyond = sum(row.basis == "assumed" and row.nodes > 1 for row in forecast.scenarios)
    told = f"intervals: 90%, from the residuals of {quantile.runs} runs: up to {quantile.relative:.1%} off"
    outside = f"{format_count(beyond, 'row')} outside the tested range: assumed, at least as wide"
    return f"{told}; {outside}" if beyond else told


def _width(row: PredictedScenario) -> float:
    return (row.interval[1] - row.interval[0]) / row.samples_per_s


def _link(row: PredictedScenario) -> str:
    return UNKNOWN if row.link_gbit_per_s is None else format_rate(row.link_gbit_per_s)
