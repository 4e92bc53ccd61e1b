from __future__ import annotations

import pytest

from multinode.analyse.run.observed import ObservedNode, observe
from multinode.core.run.samples import CpuSample
from multinode.report.steps.charts import timeline
from tests.report.observing import observed


def titles(figure: object) -> list[str]:
    layout = figure.layout.to_plotly_json()  # type: ignore[attr-defined]  # plotly has no types
    return [layout[axis]["title"]["text"] for axis in sorted(layout, key=_number) if axis.startswith("yaxis")]


def _number(axis: str) -> int:
    return int(axis.removeprefix("yaxis") or 1) if axis.startswith("yaxis") else 0


def test_steps_network_gpus_and_processors_stand_below_each_other_over_one_time() -> None:
    found = timeline(observed())
    assert found is not None
    figure, lanes = found
    assert lanes == 9
    assert titles(figure) == [
        "step (ms)",
        "net in<br>(Gbit/s)",
        "net out<br>(Gbit/s)",
        "SM (%)",
        "power (W)",
        "clock (MHz)",
        "memory (GiB)",
        "temp (C)",
        "CPU (%)",
    ]
    axes = [figure.layout[f"xaxis{number}"] for number in range(2, lanes)]
    assert {axis.matches for axis in axes} == {figure.layout.xaxis.matches}


def test_a_lane_that_nothing_was_sampled_for_is_left_out() -> None:
    found = timeline(observed(gpus=False))
    assert found is not None
    assert titles(found[0]) == ["step (ms)", "net in<br>(Gbit/s)", "net out<br>(Gbit/s)", "CPU (%)"]


def test_the_network_has_a_curve_a_card_and_the_level_of_its_link() -> None:
    found = timeline(observed())
    assert found is not None
    received = {trace.name: trace for trace in found[0].data if trace.yaxis == "y2"}
    assert list(received) == ["box1 ens1f0", "box1 link rate", "box2 ens1f0", "box2 link rate"]
    assert max(received["box1 ens1f0"].y) == pytest.approx(2.4)
    assert set(received["box1 link rate"].y) == {10.0}


def test_time_begins_with_the_runs_first_step_and_each_node_keeps_its_own_clock() -> None:
    found = timeline(observed())
    assert found is not None
    first = [trace for trace in found[0].data if trace.yaxis == "y"]
    assert [trace.x[0] for trace in first] == [pytest.approx(0.0), pytest.approx(0.25)]


def test_a_node_stands_in_the_legend_once_for_all_its_lines() -> None:
    found = timeline(observed())
    assert found is not None
    assert [trace.name for trace in found[0].data if trace.showlegend] == ["box1", "box2"]
    assert {trace.legendgroup for trace in found[0].data} == {"0", "1"}


def test_machines_are_drawn_without_any_step_and_nothing_without_a_sample() -> None:
    cpu = tuple(CpuSample(time_s=100.0 + at, mono_ns=at, busy_percent=50.0) for at in range(3))
    found = timeline(observe("r", [ObservedNode(name="a", node_rank=0, ranks=(0,), samples=cpu)]))
    assert found is not None
    assert list(found[0].data[0].x) == [0.0, 1.0, 2.0]
    assert timeline(observe("r", [ObservedNode(name="a", node_rank=0, ranks=(0,))])) is None
