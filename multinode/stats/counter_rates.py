"""Counter rates: growth of monotonic counters over a span of time; an UnknownError if one shrinks. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from multinode.stats.unknown import UnknownError

_NS_PER_S = 1e9
_LEAST_COVERED = 0.5
# Closer readings give no exact rate.
_LEAST_PEAK_NS = 50_000_000


class Reading(NamedTuple):
    """A counter at a time of the node's monotonic clock."""

    mono_ns: int
    total: float


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A span of the node's monotonic clock."""

    start_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        """Its length."""
        return (self.end_ns - self.start_ns) / _NS_PER_S

    def overlap_s(self, start_ns: int, end_ns: int) -> float:
        """The overlap with another span."""
        return max(0.0, (min(end_ns, self.end_ns) - max(start_ns, self.start_ns)) / _NS_PER_S)


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """What a counter grew by, and the time it took."""

    count: float
    seconds: float

    @property
    def per_s(self) -> float:
        """The mean rate."""
        return self.count / self.seconds


def grown_in(readings: Iterable[Reading], span: Span) -> Growth:
    """The growth in the span, interpolated linearly between the readings around its ends."""
    within = _within(readings, span)
    return Growth(
        count=within[-1].total - within[0].total, seconds=(within[-1].mono_ns - within[0].mono_ns) / _NS_PER_S
    )


def peak_in(readings: Iterable[Reading], span: Span) -> float:
    """The highest rate per second between two readings that are at least 50 ms apart."""
    first, *others = within = _within(readings, span)
    peak = 0.0
    for reading in others:
        apart_ns = reading.mono_ns - first.mono_ns
        if apart_ns >= min(_LEAST_PEAK_NS, within[-1].mono_ns - within[0].mono_ns):
            peak = max(peak, (reading.total - first.total) / apart_ns * _NS_PER_S)
            first = reading
    return peak


def in_whole(readings: Iterable[Reading]) -> float:
    """The growth from the first reading to the last.

    Raises:
        UnknownError: there are fewer than two, or the counter decreased.
    """
    ordered = _ordered(readings)
    if len(ordered) < 2:  # noqa: PLR2004 - a beginning and an end
        raise UnknownError("fewer than two samples")
    _check(ordered)
    return ordered[-1].total - ordered[0].total


def _within(readings: Iterable[Reading], span: Span) -> list[Reading]:
    ordered = _ordered(readings)
    start_ns = max(span.start_ns, ordered[0].mono_ns) if ordered else 0
    end_ns = min(span.end_ns, ordered[-1].mono_ns) if ordered else 0
    if end_ns <= start_ns or end_ns - start_ns < _LEAST_COVERED * (span.end_ns - span.start_ns):
        raise UnknownError("not sampled for half of the time")
    first = max(index for index, reading in enumerate(ordered) if reading.mono_ns <= start_ns)
    last = min(index for index, reading in enumerate(ordered) if reading.mono_ns >= end_ns)
    around = ordered[first : last + 1]
    _check(around)
    inner = [reading for reading in around if start_ns < reading.mono_ns < end_ns]
    return [
        Reading(start_ns, _between(around[0], around[1], start_ns)),
        *inner,
        Reading(end_ns, _between(around[-2], around[-1], end_ns)),
    ]


def _ordered(readings: Iterable[Reading]) -> list[Reading]:
    by_time = {reading.mono_ns: reading for reading in readings}
    return [by_time[moment] for moment in sorted(by_time)]


def _check(readings: Sequence[Reading]) -> None:
    if any(late.total < early.total for early, late in itertools.pairwise(readings)):
        raise UnknownError("the counter went backwards")


def _between(before: Reading, after: Reading, moment_ns: int) -> float:
    part = (moment_ns - before.mono_ns) / (after.mono_ns - before.mono_ns)
    return before.total + (after.total - before.total) * part
