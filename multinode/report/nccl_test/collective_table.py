"""The table of a collective sweep, with nccl-tests' columns and units."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from multinode.analyse.collectives.collectives import CollectiveRow
from multinode.report.render.table import make_table

__all__ = ["collective_table"]

_COLUMNS = (
    ("size", "(B)"),
    ("count", "(elements)"),
    ("type", ""),
    ("redop", ""),
    ("root", ""),
    ("time", "(us)"),
    ("algbw", "(GB/s)"),
    ("busbw", "(GB/s)"),
    ("#wrong", ""),
    ("p95", "(us)"),
    ("of link", "(busbw)"),
    ("of TCP", "(busbw)"),
)
_UNKNOWN = "-"


def collective_table(rows: Sequence[CollectiveRow], title: str) -> Table:
    """A row a size, a unit under every header.

    `of link` is busbw as a share of what TCP can carry at the line rate of the slowest card, `of TCP` of what raw TCP
    reached between the same cards in the same run.
    """
    table = make_table(title)
    for name, unit in _COLUMNS:
        table.add_column(f"{name}\n{unit}", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.size_bytes),
            str(row.count),
            row.dtype,
            row.redop,
            "0" if row.collective == "broadcast" else "-1",
            f"{row.time_us:.2f}",
            f"{row.algbw_gb_per_s:.3f}",
            f"{row.busbw_gb_per_s:.3f}",
            "N/A" if row.num_wrong is None else str(row.num_wrong),
            f"{row.p95_us:.2f}",
            _share(row.share_of_ceiling),
            _share(row.share_of_tcp),
        )
    return table


def _share(share: float | None) -> str:
    return _UNKNOWN if share is None else f"{share:.1%}"
