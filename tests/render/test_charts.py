from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from multinode.render.charts import MOST_POINTS, thinned


def test_a_short_curve_is_left_as_it_is() -> None:
    assert thinned([1, 2, 3], [5.0, None, 7.0]) == ([1, 2, 3], [5.0, None, 7.0])


def test_the_one_peak_of_a_long_curve_is_not_lost() -> None:
    ys = [1.0] * 100_000
    ys[54_321], ys[7] = 99.0, -5.0
    xs, kept = thinned(list(range(len(ys))), ys)
    assert len(xs) <= MOST_POINTS
    assert (54_321, 99.0) in set(zip(xs, kept, strict=True))
    assert (7, -5.0) in set(zip(xs, kept, strict=True))
    assert (xs[0], xs[-1]) == (0, len(ys) - 1)


@given(st.lists(st.none() | st.floats(-1e9, 1e9), max_size=400), st.integers(4, 50))
def test_a_thinned_curve_is_part_of_the_curve_in_its_order(ys: list[float | None], most: int) -> None:
    xs, kept = thinned(list(range(len(ys))), ys, most)
    assert xs == sorted(xs)
    assert all(ys[int(x)] is y or ys[int(x)] == y for x, y in zip(xs, kept, strict=True))
    if len(ys) > most:
        assert len(xs) <= most
    known = [y for y in ys if y is not None]
    if known:
        assert max(known) in kept
        assert min(known) in kept
