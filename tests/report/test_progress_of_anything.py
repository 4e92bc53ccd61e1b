"""Nodes are not trusted: whatever their records say, the live table and the line are printed, and stay short."""

from __future__ import annotations

import io
import math

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from multinode.core.measure.benchmark import CollectiveTest, scan_messages
from multinode.core.run.progress import NodeProgress, RunProgress, advance_node
from multinode.core.run.samples import (
    CollectiveSample,
    DdpSample,
    DeviceWaitSample,
    GpuSample,
    LossSample,
    ModelSample,
    NicSample,
    Sample,
    StepSample,
)
from multinode.report.run.progress_table import progress_line, progress_table

_WIDTH = 160
_TEST = CollectiveTest(messages=scan_messages(["all_reduce"], (1024, 2048)))
# The bounds of what a record can hold, and few enough others that records meet.
_COUNTS = st.sampled_from([0, 1, 2, 3, 1 << 60])
_FLOATS = st.sampled_from([0.0, 5e-324, 1e-3, 1.0, 1e6, 1e12, 1.7e308, -1.0, -1.7e308, math.inf, math.nan])
_PERHAPS_COUNT, _PERHAPS = st.none() | _COUNTS, st.none() | _FLOATS
_ONE_WORKER = {"rank": _COUNTS, "step": _COUNTS}
_CLOCKS = {"time_s": _FLOATS, "mono_ns": _COUNTS}
_SAMPLES: st.SearchStrategy[list[Sample]] = st.lists(
    st.one_of(
        st.builds(
            StepSample,
            **_ONE_WORKER,
            **_CLOCKS,
            step_time_us=_PERHAPS,
            total_steps=_PERHAPS_COUNT,
            samples=_PERHAPS_COUNT,
            tokens=_PERHAPS_COUNT,
            phases_us=st.none() | st.fixed_dictionaries({"comm": _FLOATS}),
        ),
        st.builds(
            DdpSample,
            **_ONE_WORKER,
            iteration=_COUNTS,
            bucket_sizes_bytes=st.just(()),
            forward_us=_FLOATS,
            backward_us=_FLOATS,
            comm_us=_FLOATS,
            overlap_us=_FLOATS,
        ),
        st.builds(DeviceWaitSample, **_ONE_WORKER, wait_us=_FLOATS, calls=_COUNTS, of_calls=_COUNTS),
        st.builds(LossSample, **_ONE_WORKER, loss=_PERHAPS),
        st.builds(
            NicSample, **_CLOCKS, ifname=st.sampled_from(["eth0", "mlx5_0/1"]), rx_bytes=_COUNTS, tx_bytes=_COUNTS
        ),
        st.builds(
            GpuSample,
            **_CLOCKS,
            index=_COUNTS,
            sm_percent=_PERHAPS,
            memory_used_gib=_PERHAPS,
            power_w=_PERHAPS,
            temperature_c=_PERHAPS,
        ),
        st.builds(
            CollectiveSample,
            rank=_COUNTS,
            collective=st.just("all_reduce"),
            dtype=st.just("float"),
            size_bytes=_COUNTS,
            count=_COUNTS,
            times_us=st.lists(_FLOATS, max_size=3).map(tuple),
            index=_COUNTS,
        ),
        st.builds(
            ModelSample,
            rank=_COUNTS,
            wrapper=st.just("ddp"),
            parameters=_COUNTS,
            trainable=_COUNTS,
            device=st.sampled_from([None, "cpu", "cuda"]),
        ),
    ),
    max_size=12,
)


@given(first=_SAMPLES, second=_SAMPLES, tested=st.booleans())
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
            ifname="eth0",
            link_gbit_per_s=10.0,
        )
        for index, name in enumerate(("box1", "box2"))
    ]
    # With fourteen nodes, some have no row of their own.
    others = [
        NodeProgress(name=f"more{index}", node_rank=index, ranks=(2 * index, 2 * index + 1)) for index in range(2, 14)
    ]
    nodes = [advance_node(node, samples) for node, samples in zip(shown, (first, second), strict=True)]
    nodes += [advance_node(node, first) for node in others]
    for some in (nodes[:2], nodes):
        progress = RunProgress(run_id="r", job="sft.yaml", world_size=2 * len(some), nodes=tuple(some))
        output = io.StringIO()
        Console(file=output, width=_WIDTH, color_system=None).print(progress_table(progress))
        assert "box1" in output.getvalue() or len(some) > 2
        assert max(map(len, output.getvalue().splitlines())) <= _WIDTH
        assert len(progress_line(progress)) < 2 * _WIDTH
