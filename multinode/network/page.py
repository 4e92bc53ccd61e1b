"""The page of one nccl-test."""

from __future__ import annotations

from multinode.network.screen import show
from multinode.network.size_scan import ScanReport
from multinode.render.page import page, section


def scan_page(report: ScanReport) -> str:
    """A self-contained page of the scan alone."""
    return page(report.title, [section("run-1", show(report))])
