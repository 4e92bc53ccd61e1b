"""The size scan as a page: busbw over size, with the link's maximum and raw TCP."""

from __future__ import annotations

from multinode.network.screen import scan_lines
from multinode.network.size_scan import ScanReport
from multinode.render.blocks import blocks_html
from multinode.render.charts import Figure, Scatter, with_axes
from multinode.render.page import page
from multinode.render.sheet import Chart, Prose


def scan_chart(report: ScanReport, name: str = "sweep") -> Chart:
    """One line per collective with points at the sizes, and one level line per bound."""
    rows = report.rows
    figure = Figure()
    for collective in dict.fromkeys(row.collective for row in rows):
        mine = [row for row in rows if row.collective == collective]
        figure.add_trace(
            Scatter(
                x=[row.size_bytes for row in mine],
                y=[row.busbw_gb_per_s for row in mine],
                customdata=[[row.time_us.value, row.p95_us] for row in mine],
                hovertemplate="%{x} B: %{y:.4f} GB/s, median %{customdata[0]:.0f} us, p95 %{customdata[1]:.0f} us",
                mode="lines+markers",
                name=collective,
            )
        )
    sizes = [row.size_bytes for row in rows]
    for bound, level in report.levels.items():
        ends = [min(sizes), max(sizes)] if sizes else []
        figure.add_trace(Scatter(x=ends, y=[level] * len(ends), mode="lines", line={"dash": "dash"}, name=bound))
    figure.update_layout(hovermode="closest")
    with_axes(figure, "size (B)", "busbw (GB/s)", type="log")
    return Chart(title=f"collectives: {report.title}", name=name, figure=figure, rows=2)


def scan_page(report: ScanReport) -> str:
    """A self-contained page: the chart, and the verdict as plain text."""
    return page(report.title, [blocks_html([scan_chart(report), Prose("\n".join(scan_lines(report)), "verbatim")])])
