"""BackTest: predictions tested with runs that they did not use, and the interval that their errors justify. Pure.

The interval is that of split conformal prediction (Lei et al. 2018, "Distribution-free predictive inference for
regression"): of n absolute residuals the ceil((n + 1) * 0.9)-th smallest. Below nine there is none, and intervals are
as the model assumes. Both are kept: of 57 measured trainings the assumed intervals hold 48, at a median half-width of
11.8%, and the conformal ones 52, at 16.5% (benchmarks/prediction_cells.tar.gz).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

from multinode.findings.finding import Finding
from multinode.findings.rule import RuleGroup
from multinode.predict.network_model import DoubtRules, UncertaintySource
from multinode.stats.estimate import Estimate
from multinode.units import format_count, format_figure, format_rate

_LEVEL = 0.9
LEAST_RUNS = 9
"""Residuals that a conformal interval of 90% needs: ceil((n + 1) * 0.9) is at most n."""
# Rounding must not decide.
_ROUNDING = 1e-9


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A prediction and the measurement that it did not use; all in samples/s."""

    name: str  # of the scenario, for people
    predicted: Estimate  # with the interval that the model assumes
    measured: Estimate  # with its rounding
    link_gbit_per_s: float | None = None  # of a node's NIC; None on one node
    nodes: int | None = None
    shortfall: Finding | None = None  # that the run was slower than its network allows, which is no error of the model

    @property
    def error(self) -> float:
        """Relative error of the step time; negative if the model was too fast."""
        return self.measured.value / self.predicted.value - 1

    @property
    def residual(self) -> float:
        """Absolute difference of the logarithms."""
        return abs(math.log(self.measured.value / self.predicted.value))

    @property
    def is_covered(self) -> bool:
        """Whether the measured value is in the interval."""
        return self.predicted.low <= self.measured.high and self.measured.low <= self.predicted.high


DOUBTS = DoubtRules("Uncertainty of a prediction: the back-test")
_QUANTILE = DOUBTS.doubt(
    "quantile",
    "step",
    about="the error of the model for stored runs",
    message="in the back-test with {runs} stored runs, the 90% quantile of the error is {miss}",
)
_FEW_RUNS = DOUBTS.doubt(
    "few-runs",
    "step",
    about="the largest error for a small number of stored runs",
    message="the largest error in {runs} was {miss}; a back-tested interval needs {least} runs",
)


class ResidualQuantile(msgspec.Struct, frozen=True, kw_only=True):
    """The error of the model according to its back-test."""

    runs: int  # number of residuals
    log_miss: float  # conformal quantile of their absolute logarithms; with fewer than LEAST_RUNS the largest
    # logarithm of high over low of the widest tested interval; narrower ones count as tested
    tested_log_width: float = 0.0

    @property
    def is_conformal(self) -> bool:
        """Whether there are enough residuals for an interval of 90%."""
        return self.runs >= LEAST_RUNS

    @property
    def relative(self) -> float:
        """The error as a factor, minus 1."""
        return math.expm1(self.log_miss)

    @property
    def doubt(self) -> UncertaintySource:
        """The error as a reason for an interval."""
        miss = f"{self.relative:.1%}" if self.relative < 1 else f"a factor of {format_figure(1 + self.relative)}"
        if self.is_conformal:
            return _QUANTILE.found(None, relative=self.relative, runs=self.runs, miss=miss)
        runs = format_count(self.runs, "stored run")
        return _FEW_RUNS.found(None, relative=self.relative, runs=runs, miss=miss, least=LEAST_RUNS)

    def covers(self, low: float, high: float) -> bool:
        """Whether an assumed interval is no wider than the widest tested one."""
        return self.is_conformal and math.log(high / low) <= self.tested_log_width + _ROUNDING


BACK_TESTS = RuleGroup("Back-test of a forecast")
_NOT_CHECKED = BACK_TESTS.rule(
    "not-checked",
    about="no measured run is left to check the model against",
    message="not checked: there is no measured run to compare with",
)
_CHECKED = BACK_TESTS.rule(
    "checked",
    about="errors of predicted step times, and where the runs were measured",
    message="checked against {measured}{where}: the predicted step time was off by {off}{short}{only}",
    figures=("runs", "median_error", "worst_error"),
)


class BackTest(msgspec.Struct, frozen=True, kw_only=True):
    """The model tested with stored runs."""

    tested: tuple[Trial, ...] = ()
    median_error: float | None = None  # of the absolute errors; None without trials, like the others
    worst: Trial | None = None  # the trial with the largest error
    coverage: float | None = None  # share of the trials whose assumed interval contains the measurement
    quantile: ResidualQuantile | None = None  # for the intervals of predictions
    outcome: Finding = _NOT_CHECKED.found(None)  # the error, and where it applies

    @property
    def brief(self) -> str:
        """The result of the back-test in a few words."""
        if self.worst is None:
            return "not checked against measured runs"
        only = "only " if len(_links(self.tested)) == 1 else ""
        runs = format_count(len(self.tested), "run")
        return f"checked {only}against {runs}{_where(self.tested)}: off by {abs(self.worst.error):.1%} at worst"


def back_test(tested: Sequence[Trial]) -> BackTest:
    """Errors and coverage; pairs without a speed are excluded."""
    trials = tuple(trial for trial in tested if trial.predicted.value > 0 and trial.measured.value > 0)
    if not trials:
        return BackTest()
    median = statistics.median(abs(trial.error) for trial in trials)
    worst = max(trials, key=lambda trial: abs(trial.error))
    covered = sum(trial.is_covered for trial in trials)
    off = f"{abs(worst.error):.1%}"
    if f"{median:.1%}" != off:
        off = f"{median:.1%} at the median and {off} at worst"
    return BackTest(
        tested=trials,
        median_error=median,
        worst=worst,
        coverage=covered / len(trials),
        quantile=residual_quantile(fair) if (fair := [trial for trial in trials if trial.shortfall is None]) else None,
        outcome=_CHECKED.found(
            None,
            runs=len(trials),
            measured=format_count(len(trials), "measured run"),
            where=_where(trials),
            off=off,
            median_error=median,
            worst_error=abs(worst.error),
            short=" (this run was slower than its network allows)" if worst.shortfall is not None else "",
            only="; for other links, rely only on the ranges" if len(_links(trials)) == 1 else "",
        ),
    )


def _links(tested: Sequence[Trial]) -> list[float]:
    links = [trial.link_gbit_per_s for trial in tested]
    return sorted({link for link in links if link is not None}) if None not in links else []


def _where(tested: Sequence[Trial]) -> str:
    """` on 2 nodes at 100 Mbit/s`; empty if unknown."""
    links, nodes = _links(tested), sorted({trial.nodes for trial in tested if trial.nodes is not None})
    if not links or not nodes:
        return ""
    count = format_count(nodes[0], "node") if len(nodes) == 1 else f"{nodes[0]} to {nodes[-1]} nodes"
    rates = " to ".join(dict.fromkeys(map(format_rate, (links[0], links[-1]))))
    return f" on {count} at {rates}"


def residual_quantile(tested: Sequence[Trial]) -> ResidualQuantile:
    """The ceil((n + 1) * 0.9)-th smallest residual of at least one trial; the largest if there are too few."""
    residuals = sorted(trial.residual for trial in tested)
    predicted = [trial.predicted for trial in tested]
    widths = [math.log(estimate.high / estimate.low) for estimate in predicted if estimate.low > 0]
    place = min(len(residuals), math.ceil((len(residuals) + 1) * _LEVEL - _ROUNDING))
    return ResidualQuantile(
        runs=len(residuals),
        log_miss=residuals[place - 1],
        tested_log_width=max(widths, default=0.0),
    )
