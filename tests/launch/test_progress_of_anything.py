"""Nodes are not trusted: whatever their records say, the live table and the line are printed, and stay short."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from multinode.launch.progress_table import ProgressTable, progress_line
from multinode.network.measure import scan_messages
from multinode.records.benchmark import CollectiveTest
from multinode.records.progress import NodeProgress, RunProgress
from multinode.records.samples import Sample
from tests.any_samples import any_samples

_WIDTH = 160
_TEST = CollectiveTest(messages=scan_messages(["all_reduce"], (1024, 2048)))


@given(first=any_samples(12), second=any_samples(12), tested=st.booleans())
def test_records_of_any_content_leave_table_and_line_printable(
    *, first: list[Sample], second: list[Sample], tested: bool
) -> None:
    shown = [
        NodeProgress(
            name=name,
            node_rank=index,
            ranks=(2 * index, 2 * index + 1),
            state="running",
            total_steps=len(_TEST.messages) if tested else None,
            test=_TEST if tested else None,
            ifname="ens1f0",
            link_gbit_per_s=10.0,
        )
        for index, name in enumerate(("box1", "box2"))
    ]
    # With fourteen nodes, some have no row of their own.
    others = [
        NodeProgress(name=f"more{index}", node_rank=index, ranks=(2 * index, 2 * index + 1)) for index in range(2, 14)
    ]
    nodes = [*shown, *others]
    for node, samples in zip(nodes, (first, second, *[first] * len(others)), strict=True):
        node.take(samples)
    for some in (nodes[:2], nodes):
        progress = RunProgress(run_id="r", job="sft.yaml", world_size=2 * len(some), nodes=tuple(some))
        output = io.StringIO()
        Console(file=output, width=_WIDTH, color_system=None).print(ProgressTable(progress))
        assert "box1" in output.getvalue() or len(some) > 2
        assert max(map(len, output.getvalue().splitlines())) <= _WIDTH
        assert len(progress_line(progress)) < 2 * _WIDTH
