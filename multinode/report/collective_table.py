"""The table of a collective sweep, with nccl-tests' columns and units."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from multinode.analyse.collectives import CollectiveRow
from multinode.report.table import make_table

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
    ("of line rate", "(busbw)"),
)


def collective_table(rows: Sequence[CollectiveRow], title: str) -> Table:
    """A row a size, a unit under every header; the share is of what TCP can carry at the card's line rate."""
    table = make_table(title)
    for name, unit in _COLUMNS:
        table.add_column(f"{name}\n{unit}", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.size_bytes),
            str(row.count),
            "float",
            "sum",
            "-1",
            f"{row.time_us:.2f}",
            f"{row.algbw_gb_per_s:.3f}",
            f"{row.busbw_gb_per_s:.3f}",
            str(row.num_wrong),
            "-" if row.share_of_ceiling is None else f"{row.share_of_ceiling:.1%}",
        )
    return table
