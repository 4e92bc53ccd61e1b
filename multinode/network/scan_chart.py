"""The size scan as a page: busbw over size, with the link's maximum and raw TCP."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from multinode.render.charts import Figure, Scatter, with_axes
from multinode.traffic.algorithms import CollectiveRow


def scan_chart(rows: Sequence[CollectiveRow], lines: Mapping[str, float], title: str) -> Figure:
    """One line per collective with points at the sizes, and one level line per entry of `lines` (name: GB/s)."""
    figure = Figure()
    for name in dict.fromkeys(row.collective for row in rows):
        mine = [row for row in rows if row.collective == name]
        figure.add_trace(
            Scatter(
                x=[row.size_bytes for row in mine],
                y=[row.busbw_gb_per_s for row in mine],
                customdata=[[row.time_us, row.p95_us] for row in mine],
                hovertemplate="%{x} B: %{y:.4f} GB/s, median %{customdata[0]:.0f} us, p95 %{customdata[1]:.0f} us",
                mode="lines+markers",
                name=name,
            )
        )
    sizes = [row.size_bytes for row in rows]
    for name, level in lines.items():
        ends = [min(sizes), max(sizes)] if sizes else []
        figure.add_trace(Scatter(x=ends, y=[level] * len(ends), mode="lines", line={"dash": "dash"}, name=name))
    figure.update_layout(title={"text": title}, template="simple_white", hovermode="closest")
    return with_axes(figure, "size (B)", "busbw (GB/s)", type="log")


def scan_page(rows: Sequence[CollectiveRow], lines: Mapping[str, float], title: str, text: str) -> str:
    """A self-contained HTML page: the chart, and the verdict as plain text."""
    chart = scan_chart(rows, lines, html.escape(title)).to_html(full_html=False, include_plotlyjs=True)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title></head>\n<body>{chart}\n<pre>{html.escape(text)}</pre></body></html>\n"
    )
