"""The table of a contrast: one row a side, and the ratio."""

from __future__ import annotations

from rich.table import Table

from multinode.analyse.contrast import Contrast, Side
from multinode.report.table import make_table

__all__ = ["contrast_table"]


def contrast_table(contrast: Contrast) -> Table:
    """Samples/s, step time, speed-up and efficiency, with the mode and the rule under them."""
    title = f"{contrast.job}: one node against {contrast.candidate.nodes}"
    table = make_table(title, caption=f"{contrast.mode}: {contrast.why}; {contrast.rule}")
    table.add_column("side", no_wrap=True)
    for name in ("nodes x\nworkers", "samples/s", "step time\n(ms)", "p95\n(ms)", "speed-up", "efficiency"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("baseline", *_side(contrast.baseline), "1.00", "100 %")
    table.add_row(
        "candidate", *_side(contrast.candidate), f"{contrast.speedup:.2f}", f"{contrast.efficiency * 100:.0f} %"
    )
    return table


def _side(side: Side) -> list[str]:
    return [
        f"{side.nodes} x {side.workers_per_node}",
        f"{side.samples_per_s:.1f}",
        f"{side.step_time_ms.median:.1f}",
        f"{side.step_time_ms.p95:.1f}",
    ]
