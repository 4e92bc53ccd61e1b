from __future__ import annotations

import msgspec

from multinode.network.charts import scan_chart
from multinode.network.screen import show
from multinode.results.answer import answer_in
from tests.network.test_nccl_tests_text import row
from tests.network.test_size_scan import measured, plan, report

WELL = msgspec.structs.replace(report(plan(), measured(plan())), rows=(row(100.0), row(90.0, "all_gather")))


def test_the_chart_has_a_line_for_each_collective_and_each_bound() -> None:
    figure = scan_chart(WELL).figure
    assert [trace.name for trace in figure.data] == ["all_reduce", "all_gather", "TCP line rate", "raw TCP"]
    assert list(figure.data[0].x) == [1 << 20]
    assert list(figure.data[0].y) == [17.37]
    assert set(figure.data[3].y) == {WELL.tcp_gb_per_s}
    assert figure.layout.xaxis.type == "log"


def test_the_page_needs_nothing_from_outside_and_runs_nothing_that_a_node_said() -> None:
    verdict = msgspec.structs.replace(WELL.verdict, message="node <script>alert(1)</script> is slow")
    scan = msgspec.structs.replace(WELL, backend="<b>run</b>", verdict=verdict)
    page = answer_in("html", scan.title, show(scan), scan)
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "<b>run</b>" not in page
    assert 'src="http' not in page
    assert page.startswith("<!DOCTYPE html>")
