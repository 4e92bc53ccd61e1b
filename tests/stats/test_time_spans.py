from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from multinode.stats.time_spans import Interval, clip, gaps, intersect, length, merge, subtract

# Whole numbers: what is in a list can be counted moment by moment.
spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)
windows = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda ends: (min(ends), max(ends)))


def moments(intervals: list[Interval] | list[tuple[int, int]]) -> set[int]:
    return {moment for start, end in intervals for moment in range(int(start), int(end))}


@given(spans)
def test_merged_intervals_cover_what_was_covered_and_lie_apart(some: list[tuple[int, int]]) -> None:
    merged = merge(some)
    assert moments(merged) == moments(some)
    assert all(start < end for start, end in merged)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(merged))
    assert length(merged) == len(moments(some))
    assert merge(merged) == merged


@given(spans, spans)
def test_two_lists_meet_and_part_as_sets_do(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    left, right = merge(some), merge(others)
    assert moments(intersect(left, right)) == moments(some) & moments(others)
    assert moments(subtract(left, right)) == moments(some) - moments(others)
    assert length(intersect(left, right)) + length(subtract(left, right)) == length(left)
    assert intersect(left, right) == intersect(right, left) == merge(intersect(left, right))


@given(spans, windows)
def test_a_span_is_what_is_busy_in_it_and_what_is_free(some: list[tuple[int, int]], within: tuple[int, int]) -> None:
    busy, free = clip(merge(some), within), gaps(merge(some), within)
    assert moments(busy) | moments(free) == moments([within])
    assert not moments(busy) & moments(free)
    assert merge(free) == free
