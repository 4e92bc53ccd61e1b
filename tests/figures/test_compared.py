"""Two frames of one kind are compared row by row, by what identifies a row."""

from __future__ import annotations

import pytest

from multinode.figures.compared import compare_frames, compared_frame
from multinode.figures.figure import Figure, Row
from multinode.figures.frame import Frame
from multinode.stats.estimate import Estimate, exactly, ratio

NAME = Figure[str]("name", "cell")
SIZE = Figure[int]("size", "size", form="number")
SPEED = Figure[Estimate]("speed", "speed", "GB/s", form="interval")
RATIO = Figure[Estimate]("ratio", "ratio", form="times_interval")


def around(value: float, off: float = 0.01) -> Estimate:
    return Estimate(value=value, low=value * (1 - off), high=value * (1 + off))


def frame(*rows: tuple[str, int, Estimate | None]) -> Frame:
    values = ({"name": name, "size": size, "speed": speed, "ratio": None} for name, size, speed in rows)
    return Frame(rows=tuple(Row(each, each) for each in values), figures=(NAME, SIZE, SPEED))


def test_a_row_is_over_the_one_of_the_other_frame_that_the_same_values_identify() -> None:
    before = frame(("a", 1, around(2.0)), ("a", 2, around(4.0)))
    now = frame(("a", 2, around(2.0)), ("a", 1, around(3.0)), ("b", 1, around(9.0)))
    first, second, alone = (row[RATIO] for row in now.over(before, SPEED, RATIO).rows)
    assert first == ratio(around(2.0), around(4.0))
    assert second == ratio(around(3.0), around(2.0))
    assert getattr(alone, "reason", None) == "there is no baseline"
    assert set(now.by_identity) - set(before.by_identity) == {("b", 1)}


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        (around(1.0), around(1.01), False),
        (around(1.0), around(1.02), True),
        (around(1.0), around(0.98), True),
        (exactly(1.0), exactly(3.0), None),
        # Of zero and below nothing is a ratio.
        (exactly(0.0), exactly(3.0), None),
    ],
)
def test_the_interval_of_the_ratio_decides_and_without_one_nothing_is_judged(
    before: Estimate, now: Estimate, *, changed: bool | None
) -> None:
    (found,) = compare_frames(frame(("a", 1, before)), frame(("a", 1, now)), SPEED, NAME.tell)
    assert (found.first, found.second, found.changed) == (before, now, changed)


def test_rows_without_the_figure_are_not_compared() -> None:
    assert compare_frames(frame(("a", 1, None)), frame(("a", 1, around(1.0))), SPEED, NAME.tell) == ()


def test_both_figures_stand_beside_their_ratio() -> None:
    pairs = compare_frames(
        frame(("a", 1, around(2.0)), ("b", 1, exactly(2.0))),
        frame(("a", 1, around(3.0)), ("b", 1, exactly(3.0))),
        *(SPEED, NAME.tell),
    )
    sheet = compared_frame(pairs, NAME, ("r1", "r2"), unit="GB/s", title="speed of both").sheet()
    assert [(column.name, column.unit) for column in sheet.columns] == [
        *(("cell", ""), ("r1", "GB/s"), ("r2", "GB/s"), ("ratio", "")),
    ]
    assert [row[1:] for row in sheet.rows] == [
        ("2.00 \N{PLUS-MINUS SIGN} 0.02", "3.00 \N{PLUS-MINUS SIGN} 0.03", "1.50x (1.48-1.52)"),
        ("2", "3", "1.5x"),
    ]
