"""The charts of a table of cells: a bar a cell, memory over the batch, tokens/s over the length. Pure."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from multinode.figures.figure import Figure
from multinode.findings.finding import message_of
from multinode.model.workload import GLOBAL_BATCH, METHOD, PER_DEVICE_BATCH, SEQUENCE_LENGTH
from multinode.profile.measured import NODES
from multinode.profile.throughput import TOKENS_PER_S
from multinode.render.charts import GREY, PALETTE, Bar, Scatter, error_bars, line_style, with_axes
from multinode.render.charts import Figure as Plot
from multinode.render.sheet import Chart, html_text, sanitize
from multinode.stats.estimate import Estimate
from multinode.stats.unknown import Unknown, or_none
from multinode.sweep.figures import (
    BOUGHT_WITH,
    DEVICE,
    LABEL,
    NETWORK_SHARE,
    PEAK_MEMORY,
    RELATIVE,
    SAMPLES_PER_MONEY,
    SOURCE,
    SPEED,
    SPEED_PER_PURCHASE,
    CellRow,
    CellTable,
    cell_row,
    has_figures,
    state_word,
    value_of,
)
from multinode.sweep.frame import money_unit, shown_frame
from multinode.units import UNKNOWN

MOST_BARS = 60
_LINE_CHARS, _LEGEND_CHARS, _MOST_LINES = 24, 26, 3
# Of a bar, of each further line of its name, and of what `chart_html` counts as one plot.
_BAR_PX, _LINE_PX, _PLOT_PX = 26, 13, 190
# What bars are told apart by, the first of which there are several and not too many.
_COLOURED_BY: tuple[Figure[Any], ...] = (NODES, DEVICE, METHOD)
# What a line of a chart over the batch, or over the length, is not told apart by.
_NOT_A_SERIES = frozenset({LABEL.name, SOURCE.name, PER_DEVICE_BATCH.name, GLOBAL_BATCH.name, SEQUENCE_LENGTH.name})
_OOM_ABOVE = 1.08
_MOST_SERIES = 24
# So many names of lines take the height of a plot where the page is narrow.
_NAMES_A_PLOT = 8


class CellChart(msgspec.Struct, frozen=True, kw_only=True):
    """A chart."""

    figure: Any
    rows: int  # how tall it is, as `chart_html` counts


class _Bar(NamedTuple):
    """A cell of a chart of bars: its place, its value, and the group that it is coloured by."""

    place: int
    row: CellRow
    value: Estimate | float | None
    group: str


def bar_chart(
    table: CellTable, figure: Figure[Any], axis: str, *, scale: float = 1.0, level: float | None = None
) -> CellChart | None:
    """A bar a cell, in the table's order; a cell without figures says what became of it. None where no cell has it.

    Args:
        table: the table; of many cells the first ones are drawn.
        figure: of the cells.
        axis: what it is.
        scale: what a value is multiplied with.
        level: a value to hold the bars against.
    """
    rows = table.cells[:MOST_BARS]
    values: list[Estimate | float | None] = [
        or_none(cell_row(row)[figure]) if has_figures(row) else None for row in rows
    ]
    if scale != 1:
        values = [scale * value if isinstance(value, float) else value for value in values]
    if all(value is None for value in values):
        return None
    groups, legend = _grouped(table, rows)
    bars = [_Bar(*place) for place in zip(range(len(rows)), rows, values, groups, strict=True)]
    chart = Plot(list(_bar_of_each(bars)))
    lacking = [bar for bar in bars if bar.value is None]
    if lacking:
        chart.add_trace(_words(lacking))
    if level is not None:
        chart.add_vline(x=level, line={"dash": "dash", "color": GREY})
    names = [_wrapped(row.label, _LINE_CHARS) for row in rows]
    chart.update_layout(barmode="overlay", showlegend=len(set(groups)) > 1, legend_title_text=legend)
    chart.update_yaxes(
        tickvals=list(range(len(rows))),
        ticktext=["<br>".join(lines) for lines in names],
        range=[len(rows) - 0.5, -0.5],
        showgrid=False,
    )
    chart.update_xaxes(title_text=axis, rangemode="tozero")
    height_px = sum(_BAR_PX + _LINE_PX * (len(lines) - 1) for lines in names)
    return CellChart(figure=chart, rows=max(1, math.ceil(height_px / _PLOT_PX)))


def memory_chart(table: CellTable) -> CellChart | None:
    """Peak memory of a worker over its batch, a line for all else that cells differ in; those that ran out marked."""
    rows = [row for row in table.cells if row.settings.per_device_batch is not None]
    out = [row for row in rows if row.state == "out_of_memory"]
    sized = [row for row in rows if not isinstance(row.peak_memory_gib, Unknown)]
    batches = {value_of(row, PER_DEVICE_BATCH) for row in (*out, *sized)}
    if not sized or len(batches) < 2:  # noqa: PLR2004 - a line has two ends
        return None
    series = _series(rows, table, besides=SEQUENCE_LENGTH)
    chart = Plot(list(_lines(series, PER_DEVICE_BATCH, PEAK_MEMORY)))
    if out:
        colours = {id(row): line_style(number)["color"] for number, mine in enumerate(series.values()) for row in mine}
        top = max(value_of(row, PEAK_MEMORY) for row in sized) * _OOM_ABOVE
        chart.add_trace(
            Scatter(
                x=[value_of(row, PER_DEVICE_BATCH) for row in out],
                y=[top] * len(out),
                customdata=[[html_text(row.label), state_word(row)] for row in out],
                hovertemplate="%{customdata[0]}: %{customdata[1]}<extra></extra>",
                mode="markers",
                name="out of memory",
                marker={"symbol": "x", "size": 11, "color": [colours.get(id(row), GREY) for row in out]},
            )
        )
    return _finished(chart, batches, "samples per micro-batch", "peak memory per worker (GiB)")


def tokens_chart(table: CellTable) -> CellChart | None:
    """Tokens/s over the sequence length, a line for all else that cells differ in; None of one length."""
    rows = [
        row
        for row in table.cells
        if row.settings.sequence_length is not None and not isinstance(row.tokens_per_s, Unknown)
    ]
    lengths = {value_of(row, SEQUENCE_LENGTH) for row in rows}
    if len(lengths) < 2:  # noqa: PLR2004 - a line has two ends
        return None
    series = _series(rows, table, besides=PER_DEVICE_BATCH)
    chart = Plot(list(_lines(series, SEQUENCE_LENGTH, TOKENS_PER_S)))
    return _finished(chart, lengths, "sequence length (tokens)", "tokens/s")


def _finished(chart: Plot, points: Collection[int], across: str, up: str) -> CellChart:
    xs = sorted(points)
    # Both are doubled from one to the next.
    with_axes(chart, across, up, type="log", tickvals=xs, ticktext=[f"{x:,}" for x in xs])
    chart.update_layout(showlegend=True)
    return CellChart(figure=chart, rows=2 + len(chart.data) // _NAMES_A_PLOT)


def _bar_of_each(bars: Sequence[_Bar]) -> Iterator[Bar]:
    for number, group in enumerate(dict.fromkeys(bar.group for bar in bars)):
        drawn = [bar for bar in bars if bar.group == group and bar.value is not None]
        if drawn:
            yield Bar(
                x=[bar.value.value if isinstance(bar.value, Estimate) else bar.value for bar in drawn],
                y=[bar.place for bar in drawn],
                error_x=_errors([bar.value for bar in drawn]),
                customdata=[[html_text(bar.row.label)] for bar in drawn],
                hovertemplate="%{customdata[0]}: %{x:,.4r}<extra></extra>",
                orientation="h",
                name=html_text(group),
                showlegend=True,
                marker={"color": PALETTE[number % len(PALETTE)]},
            )


def _words(lacking: Sequence[_Bar]) -> Scatter:
    words = [state_word(bar.row) for bar in lacking]
    return Scatter(
        x=[0] * len(lacking),
        y=[bar.place for bar in lacking],
        text=[f" {word}" if word != UNKNOWN else " not known" for word in words],
        textposition="middle right",
        customdata=[[html_text(bar.row.label), html_text(message_of(bar.row.why))] for bar in lacking],
        hovertemplate="%{customdata[0]}: %{text}, %{customdata[1]}<extra></extra>",
        mode="text",
        name="without figures",
        showlegend=False,
    )


def _errors(values: Sequence[Estimate | float | None]) -> dict[str, Any] | None:
    ranges = [value for value in values if isinstance(value, Estimate)]
    if len(ranges) < len(values) or all(interval.low == interval.high for interval in ranges):
        return None
    return error_bars(ranges, color=GREY, thickness=1.2, width=3)


def _grouped(table: CellTable, rows: Sequence[CellRow]) -> tuple[list[str], str]:
    shown = {figure.name: figure for figure in shown_frame(msgspec.structs.replace(table, cells=tuple(rows))).figures}
    for figure in (shown[wanted.name] for wanted in _COLOURED_BY if wanted.name in shown):
        texts = [figure.tell(cell_row(row)) for row in rows]
        if 1 < len(set(texts)) <= len(PALETTE):
            return texts, f"{figure.title} {figure.unit}".rstrip()
    return ["all"] * len(rows), ""


def _series(rows: Sequence[CellRow], table: CellTable, besides: Figure[Any]) -> dict[str, list[CellRow]]:
    figures = [
        figure
        for figure in shown_frame(table).figures
        if not figure.is_measured and (figure.name not in _NOT_A_SERIES or figure.name == besides.name)
        # That full training has no LoRA rank tells no two lines apart.
        if len({figure.tell(cell_row(row)) for row in rows} - {UNKNOWN}) > 1
    ]
    series: dict[str, list[CellRow]] = {}
    for row in rows:
        words = [
            text if figure.is_words or figure.name == NODES.name else f"{figure.title} {text}"
            for figure in figures
            if (text := figure.tell(cell_row(row))) != UNKNOWN
        ]
        series.setdefault(", ".join(words) or "all", []).append(row)
    # Series of several points come before single points.
    longest = sorted(series, key=lambda name: -len(series[name]))[:_MOST_SERIES]
    return {name: mine for name, mine in series.items() if name in longest}


def _lines(series: Mapping[str, Sequence[CellRow]], across: Figure[Any], up: Figure[Any]) -> Iterator[Scatter]:
    for number, (name, mine) in enumerate(series.items()):
        drawn = [row for row in mine if value_of(row, up) is not None]
        if drawn:
            ordered = sorted(drawn, key=lambda row: value_of(row, across))
            yield Scatter(
                x=[value_of(row, across) for row in ordered],
                y=[value_of(row, up) for row in ordered],
                customdata=[[html_text(row.label)] for row in ordered],
                hovertemplate="%{customdata[0]}: %{y:,.4r}<extra></extra>",
                mode="lines+markers",
                name="<br>".join(_wrapped(name, _LEGEND_CHARS)),
                line=line_style(number),
                marker={"size": 8},
            )


def _wrapped(name: str, width: int) -> list[str]:
    lines = textwrap.wrap(name, width, max_lines=_MOST_LINES, placeholder=" ...", break_on_hyphens=True)
    return [html_text(line) for line in lines] or [UNKNOWN]


_LONGEST_AXIS = 30


class _Bars(NamedTuple):
    """A chart of bars that may be drawn: its title, the ending of its name, its axis, and a row's value on it."""

    title: str
    ending: str
    axis: str
    figure: Figure[Any]
    scale: float = 1.0


def cell_charts(table: CellTable) -> Iterator[Chart]:
    """Its charts."""
    note = f"The first {MOST_BARS} cells are drawn; the table has all of them." if len(table.cells) > MOST_BARS else ""
    for wanted in _wanted(table):
        level = 1.0 if wanted.ending == "relative" else None
        chart = bar_chart(table, wanted.figure, _axis(wanted.axis), scale=wanted.scale, level=level)
        if chart is not None and not (wanted.ending == "network" and _is_alone(table)):
            yield Chart(title=wanted.title, figure=chart.figure, name=wanted.ending, rows=chart.rows, note=note)
    for title, ending, chart in (
        ("memory by batch", "memory", memory_chart(table)),
        ("tokens/s by sequence length", "tokens", tokens_chart(table)),
    ):
        if chart is not None:
            yield Chart(title=title, figure=chart.figure, name=ending, rows=chart.rows)


def _wanted(table: CellTable) -> Iterator[_Bars]:
    hourly = money_unit(f"samples {SAMPLES_PER_MONEY.unit}", table.cells)
    bought = money_unit(f"samples/s {SPEED_PER_PURCHASE.unit}", table.cells)
    relative = f"relative to {table.baseline}"
    yield _Bars("samples/s by cell", "speed", SPEED.title, SPEED)
    yield _Bars(relative, "relative", "times the baseline's samples/s", RELATIVE)
    yield _Bars("samples per hourly cost", "hourly", hourly, SAMPLES_PER_MONEY)
    yield _Bars("speed per purchase price", "purchase", bought, SPEED_PER_PURCHASE, BOUGHT_WITH)
    # On one node it does not pass the network: it is what two workers cost there.
    yield _Bars("exposed communication", "network", "exposed, % of a step", NETWORK_SHARE, 100)


def _axis(text: str) -> str:
    text = sanitize(text)
    return html.escape(text if len(text) <= _LONGEST_AXIS else f"{text[: _LONGEST_AXIS - 3]}...")


def _is_alone(table: CellTable) -> bool:
    return all(row.world_size == 1 or not or_none(row.network_share) for row in table.cells)
