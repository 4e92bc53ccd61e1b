from __future__ import annotations

import itertools
import random

import pytest

from multinode.predict.draws import DRAWS, HIGH, LOW, Draw, between, interval, linear, quantile


def test_each_unknown_has_one_of_every_value_and_its_mirror_image() -> None:
    assert Draw() in DRAWS
    for place in range(len(Draw._fields)):
        values = sorted(draw[place] for draw in DRAWS)
        steps = [high - low for low, high in itertools.pairwise(values)]
        assert max(steps) == pytest.approx(min(steps))
        assert quantile(values, HIGH) == pytest.approx(1)
    for draw, mirrored in zip(DRAWS, reversed(DRAWS), strict=True):
        assert draw == pytest.approx([-value for value in mirrored])


def test_what_several_unknowns_come_to_has_the_quantiles_of_independent_ones() -> None:
    chance = random.Random(1)  # noqa: S311
    many = [[chance.uniform(-1, 1) / 0.9 for _ in Draw._fields] for _ in range(20_000)]
    for weights in ((1, 1, 0, 0, 0, 0), (1, 0, 2, 0, 0, 1), (0, 3, 1, 0, 2, 2), (1, 1, 1, 1, 1, 1)):
        drawn, true = (
            quantile(sorted(sum(map(float.__mul__, map(float, weights), point)) for point in points), HIGH)
            for points in (DRAWS, many)
        )
        assert drawn == pytest.approx(true, rel=0.15)


def test_an_interval_is_as_wide_as_one_error_and_wider_for_two_though_not_by_their_sum() -> None:
    assert interval(100, [100] * len(DRAWS), 0.1) == pytest.approx((100 / 1.1, 110))
    low, high = interval(100, [100 * 1.1**-draw.compute for draw in DRAWS], 0.1)
    assert 100 / 1.1**2 < low < 100 / 1.1
    assert 110 < high < 100 * 1.1**2
    assert LOW < 0.5 < HIGH


def test_a_bounded_unknown_stays_within_its_bounds() -> None:
    assert [between(position, 4, 2, 1) for position in (-1.1, -1, 0, 1, 1.1)] == [4, 4, 2, 1, 1]
    assert between(0.5, 4, 2, 1) == pytest.approx(2**0.5)
    assert [linear(position, 1, 0.5, 0) for position in (-1.1, -0.5, 0, 0.5, 1.1)] == [1, 0.75, 0.5, 0.25, 0]
