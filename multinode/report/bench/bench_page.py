"""bench_page: what a page shows of a bench: the verdict with what mends it, the tables, and how it was measured.

The page itself is `run_page`'s.
"""

from __future__ import annotations

from collections.abc import Iterator

from multinode.analyse.bench.bench_figures import BenchReport
from multinode.report.bench.bench_table import bench_sheets
from multinode.report.bench.bench_text import bench_lines
from multinode.report.render.page import section_html, sheet_html, text_html

__all__ = ["bench_html"]


def bench_html(report: BenchReport) -> Iterator[str]:
    """Its parts."""
    yield section_html("verdict", [text_html("\n".join(bench_lines(report)))])
    yield from (sheet_html(sheet) for sheet in bench_sheets(report))
    yield text_html("\n".join(report.notes))
