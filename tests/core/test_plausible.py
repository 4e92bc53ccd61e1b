from __future__ import annotations

import math

import pytest

from multinode.core.text.plausible import plausible_reading, plausible_us

NONSENSE = (None, -1.0, math.nan, math.inf, -math.inf, 1.7e308, -1.7e308, 10**400)


@pytest.mark.parametrize("value", [0.0, 0.5, 1e6, 3600e6])
def test_what_a_step_may_take_is_believed(value: float) -> None:
    assert plausible_us(value) == value


@pytest.mark.parametrize("value", [*NONSENSE, 5e-324, 1e13])
def test_what_no_step_takes_is_as_good_as_missing(value: float | None) -> None:
    assert plausible_us(value) is None


def test_a_gauge_shows_from_nothing_to_a_million() -> None:
    assert [plausible_reading(value) for value in (0.0, 97.5, 81_920.0)] == [0.0, 97.5, 81_920.0]
    assert [plausible_reading(value) for value in (*NONSENSE, 2e6)] == [None] * (len(NONSENSE) + 1)
