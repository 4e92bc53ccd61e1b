"""The table of advice: one row a change with its gain, memory, meaning and command; and why, for the best ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.table import Table
from rich.text import Text

from multinode.analyse.advice.advice import Advice, Recommendations, Tried
from multinode.analyse.prediction.forecast import PredictedScenario
from multinode.report.prediction.contrast_outlook import what_it_changes
from multinode.report.render.escaping import sanitize
from multinode.report.render.table import make_table
from multinode.units import format_count, format_rate

__all__ = ["advice_lines", "advice_table"]

_SOME_GIB = 0.005


def advice_table(recommendations: Recommendations, advice: Iterable[Advice]) -> Table:
    """What is advised, best first; predicted beside measured where it was tried."""
    rows = list(advice)
    tried = any(one.tried is not None for one in rows)
    table = make_table(f"what would change it, against {_told(recommendations.today)}", caption=_rate(recommendations))
    table.add_column("change")
    for name in ("gain", "from - to", *(("measured", "error") if tried else ()), "memory\n(GiB)"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("what else it changes")
    table.add_column("how: options of multinode launch, or by hand")
    for one in rows:
        table.add_row(*(Text(sanitize(cell)) for cell in _row(one, tried=tried)))
    return table


def advice_lines(recommendations: Recommendations, advice: Iterable[Advice]) -> Iterator[str]:
    """Why each change pays or does not, then what a try of one came to where it has no figures, then the notes."""
    for one in advice:
        yield sanitize(f"{one.name}: {one.why}")
    for one in advice:
        if one.tried is not None and one.tried.reason:
            yield sanitize(f"{one.name} was tried: {one.tried.reason}")
    yield from (sanitize(f"note: {note}") for note in recommendations.notes)
    yield from (sanitize(f"from {source}") for source in recommendations.sources)


def _row(one: Advice, *, tried: bool) -> list[str]:
    low, high = one.interval
    return [
        one.name,
        f"x{one.gain:.2f}",
        f"{low:.2f} - {high:.2f}",
        *(_measured(one.tried) if tried else []),
        _memory(one.memory_gib),
        what_it_changes(one),
        one.command,
    ]


def _measured(tried: Tried | None) -> list[str]:
    if tried is None:
        return ["", ""]
    if tried.gain is None or tried.error is None:
        return ["failed", ""]
    return [f"x{tried.gain:.2f}", f"{tried.error:+.1%}"]


def _memory(more_gib: float | None) -> str:
    if more_gib is None:
        return "unknown"
    return "0" if abs(more_gib) < _SOME_GIB else f"{more_gib:+.2f}"


def _told(today: PredictedScenario) -> str:
    nodes = format_count(today.nodes, "node")
    link = f" at {format_rate(today.link_gbit_per_s)}" if today.link_gbit_per_s is not None else ""
    return f"{today.strategy} on {nodes}{link}, accumulation {today.accumulation}"


def _rate(recommendations: Recommendations) -> str:
    low, high = recommendations.today.interval
    told = f"as it stands: {recommendations.today.samples_per_s:.3g} samples/s predicted ({low:.3g} to {high:.3g})"
    if recommendations.measured_samples_per_s is not None:
        told += f", {recommendations.measured_samples_per_s:.3g} measured"
    if recommendations.today_tried is not None and recommendations.today_tried.samples_per_s is not None:
        told += f", {recommendations.today_tried.samples_per_s:.3g} in a short run now"
    return told
