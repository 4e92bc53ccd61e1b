from __future__ import annotations

import msgspec
import pytest

from multinode.analyse.run.observed import Observed, ObservedNode, observe
from multinode.analyse.steps.step_split import StepSplit
from multinode.core.run.samples import LossSample
from multinode.report.render.charts import MOST_POINTS
from multinode.report.render.escaping import html_text
from multinode.report.steps.charts import loss_chart, split_chart, step_time_chart
from tests.report.observing import NAMES, STEPS, SUMMARY, observed


def test_the_step_time_has_a_line_a_node_and_what_does_not_count_is_shaded() -> None:
    seen = observed()
    figure = step_time_chart(seen)
    assert figure is not None
    assert [trace.name for trace in figure.data] == list(NAMES)
    assert list(figure.data[0].x) == list(range(1, STEPS + 1))
    assert figure.data[0].y[0] == pytest.approx(800.0)
    (shade,) = figure.layout.shapes
    assert (shade.x0, shade.x1) == (0.5, seen.counted[0] - 0.5)
    assert [note.text for note in figure.layout.annotations] == ["does not count"]


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
    assert note.text == "does not count (the 20 longest of 200 stretches)"


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
    assert list(parts) == ["compute", "exposed communication", "wait for stragglers", "data", "optimizer", "host"]
    assert list(parts["compute"]) == ["rank 3", "rank 2", "rank 1", "rank 0"]
    assert (parts["wait for stragglers"]["rank 0"], parts["wait for stragglers"]["rank 3"]) == (30.0, 15.0)


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
