from __future__ import annotations

import math

import pytest

from multinode.records.samples import plausible_us

NONSENSE = (None, -1.0, math.nan, math.inf, -math.inf, 1.7e308, -1.7e308, 10**400)


@pytest.mark.parametrize("value", [0.0, 0.5, 1e6, 3600e6])
def test_what_a_step_may_take_is_believed(value: float) -> None:
    assert plausible_us(value) == value


@pytest.mark.parametrize("value", [*NONSENSE, 5e-324, 1e13])
def test_what_no_step_takes_is_as_good_as_missing(value: float | None) -> None:
    assert plausible_us(value) is None
