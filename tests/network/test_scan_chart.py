from __future__ import annotations

from multinode.network.scan_chart import scan_chart, scan_page
from tests.network.test_nccl_tests_text import row


def test_the_chart_has_a_line_for_each_collective_and_each_bound() -> None:
    rows = [row(100.0), row(90.0, "all_gather")]
    figure = scan_chart(rows, {"TCP ceiling": 0.118}, "title")
    assert [trace.name for trace in figure.data] == ["all_reduce", "all_gather", "TCP ceiling"]
    assert list(figure.data[0].x) == [1 << 20]
    assert list(figure.data[0].y) == [17.37]
    assert set(figure.data[2].y) == {0.118}
    assert figure.layout.xaxis.type == "log"


def test_the_page_needs_nothing_from_outside_and_runs_nothing_that_a_node_said() -> None:
    page = scan_page([row(100.0)], {}, "<b>run</b>", "node <script>alert(1)</script> is slow")
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "<b>run</b>" not in page
    assert 'src="http' not in page
    assert page.startswith("<!DOCTYPE html>")
