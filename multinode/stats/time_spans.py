"""Spans of time as intervals: union, intersection and difference. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
"""Start and end; merged intervals are sorted, nonempty and disjoint."""


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of any intervals; empty and reversed ones are ignored."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def intersect(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """The intersection of two merged lists."""
    common: list[Interval] = []
    index = other = 0
    while index < len(left) and other < len(right):
        start = max(left[index][0], right[other][0])
        end = min(left[index][1], right[other][1])
        if start < end:
            common.append((start, end))
        if left[index][1] < right[other][1]:
            index += 1
        else:
            other += 1
    return common


def subtract(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """The part of the first of two merged lists that is not in the second."""
    if not left:
        return []
    return intersect(left, gaps(right, (left[0][0], left[-1][1])))


def gaps(intervals: Sequence[Interval], within: Interval) -> list[Interval]:
    """The part of a span that merged intervals do not cover."""
    start, end = within
    free: list[Interval] = []
    for busy_from, busy_to in intervals:
        if busy_to <= start:
            continue
        if busy_from >= end:
            break
        if busy_from > start:
            free.append((start, busy_from))
        start = busy_to
    if start < end:
        free.append((start, end))
    return free


def clip(intervals: Sequence[Interval], within: Interval) -> list[Interval]:
    """The part of merged intervals inside a span."""
    return intersect(intervals, [within]) if within[0] < within[1] else []


def length(intervals: Iterable[Interval]) -> float:
    """The total length of merged intervals."""
    return sum(end - start for start, end in intervals)
