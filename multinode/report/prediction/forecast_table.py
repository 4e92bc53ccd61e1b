"""The table of a forecast: a row a scenario, of the settings those that vary; and the lines below it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.table import Table
from rich.text import Text

from multinode.analyse.prediction.break_even import BreakEven, Needed
from multinode.analyse.prediction.forecast import Forecast, PredictedScenario
from multinode.report.render.escaping import sanitize
from multinode.report.render.sheet import format_sig
from multinode.report.render.table import make_table
from multinode.units import format_count, format_rate

__all__ = ["forecast_lines", "forecast_table"]

_UNKNOWN = "-"
# Where one of them is the same in all rows, the title says it.
_SETTINGS: tuple[tuple[str, Callable[[PredictedScenario], str]], ...] = (
    ("strategy", lambda one: one.strategy),
    ("method", lambda one: one.method or _UNKNOWN),
    ("workers\na node", lambda one: str(one.workers_per_node)),
    ("batch", lambda one: f"{one.per_device_batch:g}"),
    ("accumu-\nlation", lambda one: str(one.accumulation)),
    ("bucket\n(MiB)", lambda one: _UNKNOWN if one.bucket_mib is None else f"{one.bucket_mib:g}"),
    ("overlap", lambda one: "on" if one.overlap else "off"),
    ("gradients\nas", lambda one: one.grad_compress or _UNKNOWN),
)
_FIGURES: tuple[tuple[str, Callable[[PredictedScenario], str]], ...] = (
    ("step\n(ms)", lambda one: format_sig(one.step_time_ms)),
    ("samples/s", lambda one: format_sig(one.samples_per_s)),
    ("interval", lambda one: f"{format_sig(one.interval[0])} to {format_sig(one.interval[1])}"),
    ("speed-up", lambda one: f"{one.speedup:.2f}"),
    ("efficiency", lambda one: f"{one.efficiency:.0%}"),
    ("exposed\n(ms)", lambda one: format_sig(one.parts.exposed_ms)),
)


def forecast_table(forecast: Forecast) -> Table:
    """Nodes and link, the settings that vary, the figures; `*` marks what was measured."""
    rows = forecast.scenarios
    varying = [(name, told) for name, told in _SETTINGS if len({told(row) for row in rows}) > 1]
    title = f"predicted: {sanitize(_common(rows))}" if rows else "predicted: nothing was asked for"
    marked = "; * measured, its figures are the model's own" if any(row.measured for row in rows) else ""
    table = make_table(title, caption=f"speed-up over one node with all its workers{marked}")
    for name in ("nodes", "link"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, _ in varying:
        table.add_column(name, justify="right", no_wrap=True)
    for name, _ in _FIGURES:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        link = _UNKNOWN if row.link_gbit_per_s is None else format_rate(row.link_gbit_per_s)
        cells = [told(row) for _, told in (*varying, *_FIGURES)]
        table.add_row(f"{'*' if row.measured else ''}{row.nodes}", link, *(Text(sanitize(cell)) for cell in cells))
    return table


def forecast_lines(forecast: Forecast) -> Iterator[str]:
    """The break-even, how far the model is to be trusted, where it has its figures, and why the intervals are wide."""
    yield from (sanitize(line) for line in _lines(forecast))


def _lines(forecast: Forecast) -> Iterator[str]:
    if forecast.break_even is not None:
        yield f"break-even of {forecast.break_even_of}:"
        yield from (f"  {line}" for line in _break_even_lines(forecast.break_even))
    yield f"back-test: {forecast.back_test.sentence}"
    yield from (f"from: {source}" for source in forecast.sources)
    yield from (f"note: {note}" for note in forecast.notes)
    widest = max((row for row in forecast.scenarios if row.nodes > 1), key=_width, default=None)
    if widest is not None:
        whys = "; ".join(doubt.why for doubt in widest.doubts)
        yield f"the widest interval is {_width(widest):.0%} of its figure: {whys}"


def _width(row: PredictedScenario) -> float:
    return (row.interval[1] - row.interval[0]) / row.samples_per_s


def _common(rows: tuple[PredictedScenario, ...]) -> str:
    """Settings that all rows share."""
    row = rows[0]
    same = {name for name, told in _SETTINGS if len({told(one) for one in rows}) == 1}
    words = [
        (row.strategy, "strategy"),
        (row.method, "method"),
        (_workers(row.workers_per_node), "workers\na node"),
        (f"batch {row.per_device_batch:g}", "batch"),
        (f"accumulation {row.accumulation}", "accumu-\nlation"),
        (f"gradients as {row.grad_compress}" if row.grad_compress else None, "gradients\nas"),
        (None if row.overlap else "no overlap", "overlap"),
    ]
    return ", ".join(word for word, name in words if word and name in same)


def _workers(count: int) -> str:
    return f"{_count(count)} a node"


def _count(workers: int) -> str:
    return format_count(workers, "worker")


def _break_even_lines(found: BreakEven) -> Iterator[str]:
    target = f"{found.target:.0%}"
    yield f"nothing that can be hidden is exposed: {_link(found.nothing_exposed)}"
    yield f"efficiency {target}: {_link(found.efficient)}"
    yield f"faster than one node with {_count(found.one_node_workers)}: {_link(found.beats_one)}"
    if found.full_beats_one is not None:
        yield f"the same with {_count(found.one_node_workers)} on each: {_link(found.full_beats_one)}"
    needed = found.accumulation
    if needed.value is None:
        yield f"accumulation for {target}: none is enough: {needed.why}"
    else:
        yield f"accumulation for {target}: {needed.value:g}; {needed.why}"
    yield f"node {found.next_node.nodes}: {found.next_node.sentence}"


def _link(needed: Needed) -> str:
    if needed.value is None:
        return needed.why
    if needed.always:
        return needed.why
    return f"from {format_rate(needed.value)} on"
