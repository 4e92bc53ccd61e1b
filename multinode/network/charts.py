"""The charts of `nccl-test`: busbw over size with the link's maximum and raw TCP; the speed-up of each setting."""

from __future__ import annotations

from collections.abc import Iterator

from multinode.network.nccl_tuning import GAIN, TuneReport
from multinode.network.read_scan import ReadScan
from multinode.network.scan_evidence import BUSBW, SIZE
from multinode.network.size_scan import ScanReport
from multinode.render.charts import GREY, Figure, Scatter, bars_height, interval_bars, with_axes
from multinode.render.sheet import Chart
from multinode.stats.unknown import Unknown


def scan_chart(scan: ScanReport | ReadScan, name: str = "sweep") -> Chart:
    """Busbw over size: one line per collective with points at the sizes, and one level line per bound."""
    rows = scan.rows
    figure = Figure()
    for collective in dict.fromkeys(row.collective for row in rows):
        mine = [row for row in rows if row.collective == collective]
        figure.add_trace(
            Scatter(
                x=[row.size_bytes for row in mine],
                y=[row.busbw_gb_per_s for row in mine],
                customdata=[[row.time_us.value, row.p95_us] for row in mine],
                hovertemplate=f"%{{x}} {SIZE.unit}: %{{y:.4f}} {BUSBW.unit}, "
                "median %{customdata[0]:.0f} us, p95 %{customdata[1]:.0f} us",
                mode="lines+markers",
                name=collective,
            )
        )
    sizes = [row.size_bytes for row in rows]
    for bound, level in scan.levels.items():
        ends = [min(sizes), max(sizes)] if sizes else []
        figure.add_trace(Scatter(x=ends, y=[level] * len(ends), mode="lines", line={"dash": "dash"}, name=bound))
    figure.update_layout(hovermode="closest")
    with_axes(figure, SIZE.heading, BUSBW.heading, type="log")
    return Chart(title=f"collectives: {scan.title}", name=name, figure=figure, rows=2)


def tune_charts(report: TuneReport) -> Iterator[Chart]:
    """A bar per setting with its interval, beside the default's speed."""
    together = (report.together,) if report.together is not None and len(report.together.env) > 1 else ()
    tried = (*report.settings, *together)
    measured = {one.text: one.gain for one in tried if not isinstance(one.gain, Unknown)}
    if not measured:
        return
    figure = interval_bars(measured, f"{GAIN.title} over NCCL's default")
    figure.add_vline(x=1, line={"color": GREY, "dash": "dash"})
    yield Chart(title=f"{GAIN.title} of each setting", name="settings", figure=figure, rows=bars_height(len(measured)))
