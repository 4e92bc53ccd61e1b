"""BackTest: predictions held against runs that they did not know, and the interval that their errors justify. Pure.

The interval is that of split conformal prediction (Lei et al. 2018, "Distribution-free predictive inference for
regression"): of n absolute residuals the ceil((n + 1) * 0.9)-th smallest. Below nine there is none, and intervals are
what the model assumes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

from multinode.predict.network_model import UncertaintySource
from multinode.units import format_count, format_rate

_LEVEL = 0.9
LEAST_RUNS = 9
"""Residuals that a conformal interval of 90 % takes at least: ceil((n + 1) * 0.9) is no more than n."""
# Rounding must not decide.
_ROUNDING = 1e-9


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One prediction and what was measured afterwards, or was known and kept from it; all in samples/s.

    Attributes:
        name: of what was predicted, in a few words.
        interval: low, high, as the model assumes it.
        link_gbit_per_s: of a node's NIC; None in what earlier releases stored, likewise `nodes`.
    """

    name: str
    predicted: float
    interval: tuple[float, float]
    measured: float
    link_gbit_per_s: float | None = None
    nodes: int | None = None

    @property
    def error(self) -> float:
        """Of the step time, relative to what was measured; negative where the model was too fast."""
        return self.measured / self.predicted - 1

    @property
    def residual(self) -> float:
        """Absolute, of the logarithms."""
        return abs(math.log(self.measured / self.predicted))

    @property
    def is_covered(self) -> bool:
        """Whether the interval has what was measured."""
        low, high = self.interval
        return low <= self.measured <= high


class ResidualQuantile(msgspec.Struct, frozen=True, kw_only=True):
    """How far off the model may be by its back-test.

    Attributes:
        runs: residuals that it is of.
        log_miss: of their absolute logarithms the conformal quantile; of fewer than LEAST_RUNS the largest.
        tested_log_width: high over low of the widest interval that was tested, as a logarithm: what is no more
            uncertain than that was tested.
    """

    runs: int
    log_miss: float
    tested_log_width: float = 0.0

    @property
    def is_conformal(self) -> bool:
        """Whether there are enough residuals for an interval of 90 %."""
        return self.runs >= LEAST_RUNS

    @property
    def relative(self) -> float:
        """The miss as a factor, less 1."""
        return math.expm1(self.log_miss)

    @property
    def why(self) -> str:
        """In words."""
        miss = f"{self.relative:.1%}" if self.relative < 1 else f"a factor of {1 + self.relative:.3g}"
        if self.is_conformal:
            return f"the back-test's 90 % quantile: {self.runs} stored runs, an error of {miss}"
        runs = format_count(self.runs, "stored run")
        return f"of {runs} the largest error was {miss}; a back-tested interval needs {LEAST_RUNS}"

    @property
    def doubt(self) -> UncertaintySource:
        """As the reason of an interval."""
        return UncertaintySource(part="step", relative=self.relative, why=self.why)

    def covers(self, low: float, high: float) -> bool:
        """Whether an assumed interval is of what was tested: no wider than the widest of the trials."""
        return self.is_conformal and math.log(high / low) <= self.tested_log_width + _ROUNDING


class BackTest(msgspec.Struct, frozen=True, kw_only=True):
    """The model against stored runs.

    Attributes:
        median_error: of the errors' magnitudes; None of nothing, likewise the others.
        worst: the trial that is furthest off.
        coverage: part of the trials whose assumed interval has what was measured.
        quantile: what follows for the intervals of predictions.
        sentence: how far off the model was where that is known, and what says nothing of other places.
    """

    tested: tuple[Trial, ...] = ()
    median_error: float | None = None
    worst: Trial | None = None
    coverage: float | None = None
    quantile: ResidualQuantile | None = None
    sentence: str = ""

    @property
    def brief(self) -> str:
        """The same in a few words, to stand behind a figure."""
        if self.worst is None:
            return "not checked against a measured run"
        only = "only " if len(_links(self.tested)) == 1 else ""
        runs = format_count(len(self.tested), "run")
        return f"checked {only}against {runs}{_where(self.tested)}: off by {abs(self.worst.error):.1%} at worst"


def back_test(tested: Sequence[Trial]) -> BackTest:
    """Errors and coverage; pairs without a speed on either side are left out."""
    known = tuple(one for one in tested if one.predicted > 0 and one.measured > 0)
    if not known:
        return BackTest(sentence="not checked: no measured run to compare with")
    median = statistics.median(abs(one.error) for one in known)
    worst = max(known, key=lambda one: abs(one.error))
    covered = sum(one.is_covered for one in known)
    off = f"{abs(worst.error):.1%}"
    if len(known) > 1:
        off = f"{median:.1%} (median), {off} at worst"
    checked = f"checked against {format_count(len(known), 'measured run')}{_where(known)}"
    only = "; at other links only the ranges say how sure it is" if len(_links(known)) == 1 else ""
    return BackTest(
        tested=known,
        median_error=median,
        worst=worst,
        coverage=covered / len(known),
        quantile=residual_quantile(known),
        sentence=f"{checked}: step time off by {off}{only}",
    )


def _links(tested: Sequence[Trial]) -> list[float]:
    """Of all trials, slowest first; empty where one is not known."""
    links = [one.link_gbit_per_s for one in tested]
    return sorted({one for one in links if one is not None}) if None not in links else []


def _where(tested: Sequence[Trial]) -> str:
    """` on 2 nodes at 100 Mbit/s`; empty where it is not known."""
    links, nodes = _links(tested), sorted({one.nodes for one in tested if one.nodes is not None})
    if not links or not nodes:
        return ""
    count = format_count(nodes[0], "node") if len(nodes) == 1 else f"{nodes[0]} to {nodes[-1]} nodes"
    rates = " to ".join(dict.fromkeys(map(format_rate, (links[0], links[-1]))))
    return f" on {count} at {rates}"


def residual_quantile(tested: Sequence[Trial]) -> ResidualQuantile:
    """Of at least one trial, the ceil((n + 1) * 0.9)-th smallest residual; the largest where there are too few."""
    residuals = sorted(one.residual for one in tested)
    widths = [math.log(one.interval[1] / one.interval[0]) for one in tested if one.interval[0] > 0]
    place = min(len(residuals), math.ceil((len(residuals) + 1) * _LEVEL - _ROUNDING))
    return ResidualQuantile(
        runs=len(residuals),
        log_miss=residuals[place - 1],
        tested_log_width=max(widths, default=0.0),
    )
