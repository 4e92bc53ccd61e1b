"""The charts of a contrast on its page; the tables beside them are those of `sheets`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from multinode.contrast.figures import Contrast, Side
from multinode.contrast.sheets import (
    nodes_and_workers,
    side_head,
)
from multinode.predict.forecast import PredictedScenario
from multinode.predict.screen import link_words
from multinode.profile.step_split import PARTS
from multinode.profile.throughput import SAMPLES_PER_S
from multinode.render.charts import GREY, PALETTE, Figure, Scatter, error_bars, stacked_bars, with_axes
from multinode.render.sheet import Chart
from multinode.stats.unknown import Unknown, or_none
from multinode.units import format_figure, format_placement

_LINE, _OTHER, _THIRD = PALETTE[:3]
_BAND, _FAINT = "rgba(0, 114, 178, 0.22)", "rgba(128, 128, 128, 0.12)"


def step_chart(contrast: Contrast) -> Figure | None:
    """One stacked bar per side with the parts of its step; None without a split."""
    sides = [side for side in contrast.measured if not isinstance(side.split, Unknown)]
    parts = {part.title: [or_none(getattr(side.split, part.name)) for side in sides] for part in PARTS}
    names = [f"{side_head(contrast, side)}<br>{nodes_and_workers(side)}" for side in sides]
    return stacked_bars(names, parts, "ms per step, mean")


def scaling_chart(contrast: Contrast) -> Figure | None:
    """Samples/s over nodes with their spread, and ideal scaling; None without a curve."""
    curve = contrast.measured
    if all(side.role != "point" for side in curve):
        return None
    nodes = [side.nodes for side in curve]
    measured = [side.samples_per_s for side in curve]
    # With the same workers everywhere, ideal scaling is flat.
    ideal = [curve[0].samples_per_s.value * side.world_size / max(1, curve[0].world_size) for side in curve]
    chart = Figure()
    chart.add_trace(Scatter(x=nodes, y=ideal, mode="lines", name="ideal scaling", line={"dash": "dash", "color": GREY}))
    chart.add_trace(
        Scatter(
            x=nodes,
            y=[estimate.value for estimate in measured],
            error_y=error_bars(measured),
            customdata=[[f"{100 * side.efficiency:.0f}%"] for side in curve],
            hovertemplate="%{y:.2f} samples/s, efficiency %{customdata[0]}",
            mode="lines+markers",
            name="measured",
            line={"color": _LINE},
        )
    )
    return with_axes(chart, "nodes", SAMPLES_PER_S.title, tickvals=nodes)


def bandwidth_chart(contrast: Contrast) -> Figure | None:
    """Predicted samples/s over the candidate's link, with the interval as a band; None without two links.

    Also shows the measured values, and the break-even link.
    """
    drawn = _over_links(contrast)
    if len(drawn) < 2:  # noqa: PLR2004 - a line has two ends
        return None
    chart = Figure(list(_predicted(drawn)))
    links = [scenario.link_gbit_per_s for scenario in drawn]
    for level in _levels(contrast, drawn[0], links):
        chart.add_trace(level)
    measured = next((scenario for scenario in drawn if scenario.measured), None)
    if measured is not None:
        chart.add_trace(_measured(contrast.candidate, measured))
    _mark_break_even(chart, contrast, drawn)
    ticks = {"tickvals": links, "ticktext": [f"{link:g}" for link in links]}
    return with_axes(chart, "link of a node (Gbit/s)", SAMPLES_PER_S.title, type="log", **ticks)


def _over_links(contrast: Contrast) -> list[PredictedScenario]:
    forecast = or_none(contrast.forecast)
    there = (contrast.candidate.nodes, contrast.candidate.workers_per_node)
    on_nodes = [
        scenario
        for scenario in (forecast.scenarios if forecast is not None else ())
        if (scenario.nodes, scenario.workers_per_node) == there
        and scenario.link_gbit_per_s is not None
        and scenario.link_gbit_per_s > 0
    ]
    if not on_nodes:
        return []
    settings = _settings(next((scenario for scenario in on_nodes if scenario.measured), on_nodes[0]))
    alike = {scenario.link_gbit_per_s: scenario for scenario in reversed(on_nodes) if _settings(scenario) == settings}
    return [alike[link] for link in sorted(alike, key=lambda link: link or 0.0)]


def _settings(scenario: PredictedScenario) -> tuple[object, ...]:
    named = msgspec.structs.asdict(scenario)
    names = ("per_device_batch", "accumulation", "strategy", "method", "bucket_mib", "overlap")
    # One node has the settings of several, but for levers that have no effect there.
    return (*(named[name] for name in names), scenario.levers.on(1))


def _predicted(drawn: Sequence[PredictedScenario]) -> Iterator[Scatter]:
    links = [scenario.link_gbit_per_s for scenario in drawn]
    rates = [scenario.samples_per_s for scenario in drawn]
    low, high = [rate.low for rate in rates], [rate.high for rate in rates]
    edge = {"x": links, "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
    yield Scatter(y=high, showlegend=False, name="high", **edge)
    yield Scatter(y=low, fill="tonexty", fillcolor=_BAND, name="interval", **edge)
    yield Scatter(
        x=links,
        y=[rate.value for rate in rates],
        customdata=[[f"{format_figure(rate.low)} to {format_figure(rate.high)}"] for rate in rates],
        hovertemplate="%{x:g} Gbit/s: %{y:,.3r} samples/s, %{customdata[0]}",
        mode="lines+markers",
        name=f"{format_placement(drawn[0].nodes, drawn[0].workers_per_node, drawn[0].layout.workers)}, predicted",
        line={"color": _LINE},
    )


def _levels(contrast: Contrast, drawn: PredictedScenario, links: Sequence[float | None]) -> Iterator[Scatter]:
    baseline = contrast.baseline
    yield _level(f"{nodes_and_workers(baseline)}, measured", baseline.samples_per_s.value, links, _THIRD)
    wanted = (1, drawn.workers_per_node)
    forecast, alone = or_none(contrast.forecast), dict[str, float]()
    if (baseline.nodes, baseline.workers_per_node) != wanted and forecast is not None:
        for scenario in forecast.scenarios:
            if (scenario.nodes, scenario.workers_per_node) == wanted and _settings(scenario) == _settings(drawn):
                alone[f"{wanted[0]} x {wanted[1]}, predicted"] = scenario.samples_per_s.value
    yield from (_level(name, samples_per_s, links, GREY) for name, samples_per_s in alone.items())


def _level(name: str, samples_per_s: float, links: Sequence[float | None], color: str) -> Scatter:
    return Scatter(
        x=[links[0], links[-1]],
        y=[samples_per_s] * 2,
        mode="lines",
        name=name,
        line={"dash": "dash", "color": color},
        hovertemplate="%{y:.2f} samples/s",
    )


def _measured(candidate: Side, there: PredictedScenario) -> Scatter:
    speed = candidate.samples_per_s
    return Scatter(
        x=[there.link_gbit_per_s],
        y=[speed.value],
        error_y=error_bars([speed]),
        mode="markers",
        name=f"{nodes_and_workers(candidate)}, measured",
        marker={"color": _OTHER, "size": 11, "symbol": "diamond"},
        hovertemplate="%{x:g} Gbit/s: %{y:,.3r} samples/s",
    )


def _mark_break_even(chart: Figure, contrast: Contrast, drawn: Sequence[PredictedScenario]) -> None:
    forecast = or_none(contrast.forecast)
    break_even = forecast.break_even if forecast is not None else None
    if break_even is None:
        return
    needed = break_even.beats_one
    low, high = needed.low, needed.high
    first, last = drawn[0].link_gbit_per_s or 0.0, drawn[-1].link_gbit_per_s or 0.0
    if low is None or needed.always or low > last or (high or last) < first:
        return
    low, high, top = max(low, first), min(high or last, last), max(max(trace.y) for trace in chart.data)
    chart.add_trace(
        Scatter(
            x=[low, low, high, high],
            y=[0, top, top, 0],
            mode="lines",
            fill="toself",
            fillcolor=_FAINT,
            name=f"faster than 1 x {break_even.one_node_workers}: {link_words(needed)}",
            line={"dash": "dot", "color": GREY},
            hoverinfo="name",
        )
    )


# The height of a plot, in bars.
_BARS_A_PLOT = 4


def contrast_charts(contrast: Contrast) -> Iterator[Chart]:
    """Its charts; `name` is unique on the page."""
    split = step_chart(contrast)
    if split is not None:
        bars = -(-len(contrast.measured) // _BARS_A_PLOT)
        yield Chart(title="where a step goes", figure=split, name="sides", rows=bars)
    scaling = scaling_chart(contrast)
    if scaling is not None:
        yield Chart(title="scaling", figure=scaling, name="scaling", rows=2)
    links = bandwidth_chart(contrast)
    if links is not None:
        yield Chart(title="throughput over bandwidth", figure=links, name="links", rows=2)
