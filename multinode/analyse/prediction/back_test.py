"""back_test: predictions beside what was measured -> how far off the model was. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from multinode.units import format_count

__all__ = ["BackTest", "Trial", "back_test"]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One prediction and what was measured afterwards, or was known and kept from it; all in samples/s.

    Attributes:
        name: of what was predicted, in a few words.
        interval: low, high.
    """

    name: str
    predicted: float
    interval: tuple[float, float]
    measured: float

    @property
    def error(self) -> float:
        """Of the step time, relative to what was measured; negative where the model was too fast."""
        return self.measured / self.predicted - 1

    @property
    def miss(self) -> float:
        """The same as a factor, less 1: an interval of so much up and down has what was measured."""
        return max(self.measured / self.predicted, self.predicted / self.measured) - 1

    @property
    def is_covered(self) -> bool:
        """Whether the interval has what was measured."""
        low, high = self.interval
        return low <= self.measured <= high


class BackTest(msgspec.Struct, frozen=True, kw_only=True):
    """The model against stored runs.

    Attributes:
        median_error: of the errors' magnitudes; None of nothing, likewise the others.
        worst: the trial that is furthest off.
        coverage: part of the trials whose interval has what was measured.
        sentence: the same for people.
    """

    tested: tuple[Trial, ...] = ()
    median_error: float | None = None
    worst: Trial | None = None
    coverage: float | None = None
    sentence: str = "the model has not been held against any run"


def back_test(tested: Sequence[Trial]) -> BackTest:
    """Errors and coverage; pairs without a speed on either side are left out."""
    known = tuple(one for one in tested if one.predicted > 0 and one.measured > 0)
    if not known:
        return BackTest()
    median = statistics.median(abs(one.error) for one in known)
    worst = max(known, key=lambda one: abs(one.error))
    covered = sum(one.is_covered for one in known)
    runs = format_count(len(known), "measured run")
    return BackTest(
        tested=known,
        median_error=median,
        worst=worst,
        coverage=covered / len(known),
        sentence=f"of {runs} the step time was off by {median:.1%} in the median, by {abs(worst.error):.1%} at worst "
        f"({worst.name}); {covered} within the interval",
    )
