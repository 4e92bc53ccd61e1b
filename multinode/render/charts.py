"""What all charts share: axes and their ticks, error bars, stacked bars, colours, curves reduced to fewer points.

plotly is large, and comes with the extra `report`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from multinode.errors import MultinodeError
from multinode.render.sheet import Chart, html_text
from multinode.requirements import install_hint
from multinode.stats.estimate import Estimate

try:
    from plotly.graph_objects import Bar, Figure, Scatter
    from plotly.offline import get_plotlyjs
    from plotly.subplots import make_subplots
except ModuleNotFoundError as error:
    raise MultinodeError(
        "a page with charts needs plotly, which is not installed",
        hint=install_hint("plotly>=6.0"),
    ) from error

__all__ = ["Bar", "Figure", "Scatter", "get_plotlyjs", "make_subplots"]


PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999")
"""Distinguishable with color vision deficiencies, on white and black (Okabe and Ito)."""
GREY = "#808080"
MOST_POINTS = 2000
_ROW_PX = 190
_EDGES_PX = 110
_BARS_A_PLOT = 8
_DASHES = ("solid", "dash", "dot", "dashdot")

Curve = tuple[list[float], list[float | None]]
"""x, ascending, and y; a y of None is a gap."""


def thinned(xs: Sequence[float], ys: Sequence[float | None], most: int = MOST_POINTS) -> Curve:
    """At most this many points: the minimum and maximum of each stretch of a long curve, and its two ends.

    A gap in a long curve closes if its stretch has points.
    """
    if len(xs) <= most:
        return list(xs), list(ys)
    stretches = max(1, (most - 2) // 2)
    kept = {0, len(xs) - 1}
    for number in range(stretches):
        span = range(number * len(xs) // stretches, (number + 1) * len(xs) // stretches)
        points = [(value, index) for index in span if (value := ys[index]) is not None]
        if points:
            kept |= {min(points)[1], max(points)[1]}
    order = sorted(kept)
    return [xs[index] for index in order], [ys[index] for index in order]


def with_axes(chart: Figure, across: str, up: str = "", **of_x: Any) -> Figure:
    """The chart with axis titles; axes of counts start at zero. `of_x` is passed to plotly."""
    chart.update_xaxes(title_text=across, **of_x)
    if up:
        chart.update_yaxes(title_text=up, rangemode="tozero")
    return chart


def error_bars(values: Iterable[Estimate], **drawn: Any) -> dict[str, Any]:
    """From low to high of each; `drawn` is passed to plotly."""
    every = list(values)
    return {
        "type": "data",
        "symmetric": False,
        "array": [estimate.high - estimate.value for estimate in every],
        "arrayminus": [estimate.value - estimate.low for estimate in every],
        **drawn,
    }


def line_style(number: int) -> dict[str, str]:
    """Lines that overlap remain visible."""
    return {"color": PALETTE[number % len(PALETTE)], "dash": _DASHES[number % len(_DASHES)]}


def interval_bars(values: Mapping[str, Estimate], across: str) -> Figure:
    """One bar per name, the first one on top, each with its interval."""
    names, estimates = [*values][::-1], [*values.values()][::-1]
    chart = Figure(
        Bar(
            y=[html_text(name) for name in names],
            x=[estimate.value for estimate in estimates],
            error_x=error_bars(estimates),
            orientation="h",
            marker={"color": PALETTE[0]},
            hovertemplate="%{y}: %{x:,.4r}<extra></extra>",
        )
    )
    return with_axes(chart, across)


def bars_height(bars: int) -> int:
    """The plots that so many bars below each other are as tall as."""
    return max(1, -(-bars // _BARS_A_PLOT))


def stacked_bars(names: Sequence[str], parts: Mapping[str, Sequence[float | None]], across: str) -> Figure | None:
    """One bar per name, the first one on top, stacked of the known parts; None without any."""
    chart = Figure()
    for number, (part, values) in enumerate(parts.items()):
        if any(value is not None for value in values):
            chart.add_trace(
                Bar(
                    y=names[::-1],
                    x=values[::-1],
                    name=part,
                    orientation="h",
                    marker={"color": PALETTE[number % len(PALETTE)]},
                    hovertemplate="%{x:.1f} ms",
                )
            )
    if not chart.data:
        return None
    chart.update_layout(barmode="stack", legend={"traceorder": "normal"})
    return with_axes(chart, across)


def chart_html(chart: Chart, name: str) -> str:
    """The chart as HTML that needs plotly's script on its page; `name` is unique there."""
    figure = chart.figure
    figure.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        height=_ROW_PX * chart.rows + _EDGES_PX,
        margin={"l": 60, "r": 15, "t": 30, "b": 45},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.01, "xanchor": "left", "x": 0},
        colorway=list(PALETTE),
        hoverlabel={"namelength": -1},
        font={"family": "system-ui, sans-serif"},
    )
    figure.update_xaxes(gridcolor="rgba(128,128,128,0.25)", zeroline=False, automargin=True)
    figure.update_yaxes(gridcolor="rgba(128,128,128,0.25)", zeroline=False, automargin=True)
    return str(
        figure.to_html(
            full_html=False,
            include_plotlyjs=False,
            div_id=name,
            # Without hover, the toolbar is always visible and covers the legend; dragging zooms without it.
            config={"responsive": True, "displaylogo": False, "displayModeBar": False},
        )
    )
