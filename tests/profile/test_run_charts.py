from __future__ import annotations

import msgspec
import pytest

from multinode.profile.charts import loss_chart, split_chart, step_time_chart, timeline
from multinode.profile.observed import Observed, ObservedNode, observe
from multinode.profile.step_split import StepSplit
from multinode.records.samples import CpuSample, LossSample
from multinode.render.charts import MOST_POINTS
from multinode.render.sheet import html_text
from tests.profile.observing import NAMES, STEPS, SUMMARY, observed


def test_the_step_time_has_a_line_a_node_and_what_does_not_count_is_shaded() -> None:
    seen = observed()
    figure = step_time_chart(seen)
    assert figure is not None
    assert [trace.name for trace in figure.data] == list(NAMES)
    assert list(figure.data[0].x) == list(range(1, STEPS + 1))
    assert figure.data[0].y[0] == pytest.approx(800.0)
    (shade,) = figure.layout.shapes
    assert (shade.x0, shade.x1) == (0.5, seen.counted[0] - 0.5)
    assert [note.text for note in figure.layout.annotations] == ["excluded"]


def test_steps_that_do_not_count_are_shaded_wherever_they_are() -> None:
    seen = observed()
    slowed = tuple(number for number in seen.counted if number not in {20, 21})
    figure = step_time_chart(msgspec.structs.replace(seen, counted=slowed))
    assert figure is not None
    assert [(shade.x0, shade.x1) for shade in figure.layout.shapes] == [(0.5, slowed[0] - 0.5), (19.5, 21.5)]


def test_of_many_stretches_that_do_not_count_the_longest_are_shaded_and_the_chart_says_so() -> None:
    seen = observed(gpus=False, steps=1000)
    # Every fifth step, and three in a row at 500.
    slowed = tuple(number for number in range(1, 1001) if number % 5 and number not in {499, 501})
    figure = step_time_chart(msgspec.structs.replace(seen, counted=slowed))
    assert figure is not None
    shades = [(shade.x0, shade.x1) for shade in figure.layout.shapes]
    assert len(shades) <= 20
    assert (498.5, 501.5) in shades
    (note,) = figure.layout.annotations
    assert note.text == "excluded (the 20 longest of 200 stretches)"


def test_where_all_steps_count_nothing_is_shaded() -> None:
    seen = observed()
    figure = step_time_chart(msgspec.structs.replace(seen, counted=tuple(seen.steps)))
    assert figure is not None
    assert (figure.layout.shapes, figure.layout.annotations) == ((), ())


def test_a_long_training_is_drawn_by_few_points() -> None:
    figure = step_time_chart(observed(gpus=False, steps=5000))
    assert figure is not None
    assert all(len(trace.x) <= MOST_POINTS for trace in figure.data)


def test_without_steps_there_is_neither_a_step_time_nor_a_loss() -> None:
    nothing = observe("r", [ObservedNode(name="a", node_rank=0, ranks=(0,))])
    assert step_time_chart(nothing) is None
    assert loss_chart(nothing) is None
    assert split_chart(StepSplit()) is None


def test_the_parts_of_each_workers_step_are_stacked_and_the_first_stands_on_top() -> None:
    figure = split_chart(SUMMARY.split)
    assert figure is not None
    assert figure.layout.barmode == "stack"
    # They are what the split has.
    assert figure.layout.xaxis.title.text == "ms of a step, mean"
    parts = {trace.name: dict(zip(trace.y, trace.x, strict=True)) for trace in figure.data}
    assert list(parts) == ["compute", "exposed communication", "straggler wait", "data", "optimizer", "host"]
    assert list(parts["compute"]) == ["rank 3", "rank 2", "rank 1", "rank 0"]
    assert (parts["straggler wait"]["rank 0"], parts["straggler wait"]["rank 3"]) == (30.0, 15.0)


def test_a_loss_that_was_no_number_is_a_gap() -> None:
    seen = _with_loss(observed(), LossSample(rank=0, step=41, loss=None))
    figure = loss_chart(seen)
    assert figure is not None
    assert (figure.data[0].x[0], figure.data[0].y[0]) == (5, pytest.approx(2.35))
    assert (figure.data[0].x[-1], figure.data[0].y[-1]) == (41, None)


def test_a_name_in_a_chart_is_no_markup() -> None:
    assert html_text('<a href="http://x">n</a>\x1b') == "&lt;a href=&quot;http://x&quot;&gt;n&lt;/a&gt;?"


def _with_loss(seen: Observed, sample: LossSample) -> Observed:
    first, *others = seen.nodes
    first = msgspec.structs.replace(first, samples=(*first.samples, sample))
    return msgspec.structs.replace(seen, nodes=(first, *others))


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


def test_the_network_has_a_curve_a_nic_and_the_level_of_its_link() -> None:
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
