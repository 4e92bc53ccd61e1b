from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.profile.observed import find_steady_state

times = st.lists(st.floats(min_value=1.0, max_value=1e9), max_size=200)


@pytest.mark.parametrize(("total", "dropped"), [(0, 0), (1, 0), (2, 0), (3, 1), (6, 2), (14, 4), (15, 5), (100, 5)])
def test_five_steps_are_dropped_and_of_few_steps_a_third(total: int, dropped: int) -> None:
    steady = find_steady_state([100.0] * total)
    assert (steady.first, steady.count) == (dropped, total - dropped)


def test_slow_steps_after_the_fifth_are_dropped_until_one_is_not() -> None:
    steady = find_steady_state([900.0] * 5 + [200.0, 160.0, 149.0, 300.0] + [100.0] * 91)
    assert steady.first == 7
    assert steady.rule == "the first 7 of 100 steps are excluded as warm-up"


def test_no_more_than_a_third_is_dropped_however_slow() -> None:
    assert find_steady_state([1000.0] * 10 + [1.0] * 20).first == 10
    assert find_steady_state([1000.0] * 14 + [1.0] * 16).first == 10


@given(times)
def test_something_always_counts_and_every_step_is_accounted_for(step_times_us: list[float]) -> None:
    steady = find_steady_state(step_times_us)
    assert steady.first + steady.count == len(step_times_us)
    assert 0 <= steady.first <= len(step_times_us) / 3
    assert steady.count >= min(1, len(step_times_us))


@given(times, st.floats(min_value=0.001, max_value=1000))
def test_the_unit_of_time_does_not_matter(step_times_us: list[float], factor: float) -> None:
    constant = [100.0] * 30 + [400.0] * (len(step_times_us) % 7)
    assert find_steady_state([time * factor for time in constant]).first == find_steady_state(constant).first
