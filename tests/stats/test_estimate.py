"""Intervals against a truth that is known: made-up step times, seeded, of processes whose mean and median are given."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence

import pytest

from multinode.records.run import CERTAIN_STEPS
from multinode.stats.estimate import (
    Estimate,
    Form,
    estimate_median,
    estimate_rate,
    exactly,
    inverse,
    of_bounds,
    of_repeats,
    ratio,
    text_of,
)

_Steps = Callable[[random.Random, int], list[float]]

STEP_MS = 100.0


def seeded(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - for figures that are the same in every run


def noisy(rng: random.Random, count: int) -> list[float]:
    return [STEP_MS * math.exp(0.1 * rng.gauss(0, 1)) for _ in range(count)]


def autocorrelated(rng: random.Random, count: int) -> list[float]:
    """As where a neighbour comes and goes: a step is like the one before it (0.6)."""
    state, steps = rng.gauss(0, 1), []
    for _ in range(count):
        state = 0.6 * state + 0.8 * rng.gauss(0, 1)
        steps.append(STEP_MS * math.exp(0.1 * state))
    return steps


def with_stragglers(rng: random.Random, count: int) -> list[float]:
    """One step of five takes twice as long."""
    return [one * (2 if rng.random() < 0.2 else 1) for one in noisy(rng, count)]


MEAN_MS: dict[_Steps, float] = {noisy: STEP_MS * math.exp(0.005), with_stragglers: 1.2 * STEP_MS * math.exp(0.005)}
MEAN_MS[autocorrelated] = MEAN_MS[noisy]
# Of the mixture: 0.8 P(one below m) + 0.2 P(two below m) is a half.
MEDIAN_MS: dict[_Steps, float] = {
    noisy: STEP_MS,
    autocorrelated: STEP_MS,
    with_stragglers: STEP_MS * math.exp(0.1 * 0.31864),
}


def share_covered(truth: float, estimates: Iterator[Estimate]) -> float:
    found = list(estimates)
    return sum(one.low <= truth <= one.high for one in found) / len(found)


def mean_of(steps: Sequence[float]) -> Estimate:
    return estimate_rate(steps, [1.0] * len(steps))


def by_independent_steps(steps: Sequence[float]) -> Estimate:
    """What it was before: twice the standard error, as if no step were like the one before it."""
    value, count = statistics.median(steps), len(steps)
    off = 2 * statistics.stdev(steps) / statistics.fmean(steps) / math.sqrt(count)
    return Estimate(value=value, low=value / (1 + off), high=value * (1 + off))


@pytest.mark.parametrize("count", [30, 120])
@pytest.mark.parametrize("steps", [noisy, autocorrelated, with_stragglers])
def test_steps_of_one_run_cover_the_truth_in_about_19_of_20_runs(steps: _Steps, count: int) -> None:
    rng = seeded(1)
    runs = [steps(rng, count) for _ in range(300)]
    for truth, estimate in ((MEAN_MS[steps], mean_of), (MEDIAN_MS[steps], estimate_median)):
        assert 0.87 < share_covered(truth, map(estimate, runs)) < 0.995


def test_an_interval_that_may_end_a_run_covers_in_19_of_20_where_a_step_is_like_the_one_before() -> None:
    """The steps of a first verdict do not: it reports, and ends nothing."""
    covered = {}
    for count in (10, CERTAIN_STEPS):
        rng = seeded(3)
        runs = [autocorrelated(rng, count) for _ in range(2000)]
        rates = (estimate_rate([1.0] * count, times) for times in runs)
        covered[count] = share_covered(1 / MEAN_MS[autocorrelated], rates)
    # One standard error of a share of 2000 is 0.005.
    assert covered[CERTAIN_STEPS] >= 0.945
    assert covered[10] < 0.9


def test_steps_that_count_as_independent_and_the_mean_s_error_around_a_median_did_not() -> None:
    rng = seeded(1)
    covered = share_covered(STEP_MS, (by_independent_steps(autocorrelated(rng, 120)) for _ in range(500)))
    assert covered < 0.75
    covered = share_covered(STEP_MS, (by_independent_steps(noisy(rng, 120)) for _ in range(500)))
    assert covered < 0.92
    # And of stragglers it was far too wide.
    covered = share_covered(
        MEDIAN_MS[with_stragglers], (by_independent_steps(with_stragglers(rng, 120)) for _ in range(500))
    )
    assert covered == 1


def test_a_rate_is_of_sums_and_as_certain_as_the_work_follows_the_time() -> None:
    times_s = seeded(7).sample([1.0, 2.0, 3.0, 2.0] * 5, 20)
    steady = estimate_rate([8 * time_s for time_s in times_s], times_s)
    assert (steady.value, steady.low, steady.high) == pytest.approx((8.0, 8.0, 8.0))
    same_work = estimate_rate([8.0] * 20, times_s)
    assert same_work.value == 4.0
    assert same_work.low < 3.9
    assert same_work.high > 4.1


@pytest.mark.parametrize("count", [2, 3, 5, 10])
def test_repeats_cover_the_truth_in_19_of_20(count: int) -> None:
    rng = seeded(2)
    runs = [[20 * math.exp(0.03 * rng.gauss(0, 1)) for _ in range(count)] for _ in range(1000)]
    assert 0.93 < share_covered(20.0, map(of_repeats, runs)) < 0.97
    least_to_greatest = (Estimate(value=20.0, low=min(run), high=max(run)) for run in runs)
    assert share_covered(20.0, least_to_greatest) == pytest.approx(1 - 0.5 ** (count - 1), abs=0.03)


def turns(rng: random.Random, count: int, speedup: float) -> tuple[list[float], list[float]]:
    """Both sides in turns, each repeat off by 2%, and whole turns by 10%: a neighbour that comes and goes."""
    drift = [math.exp(0.1 * rng.gauss(0, 1)) for _ in range(count)]
    one, other = ([20 * slow * math.exp(0.02 * rng.gauss(0, 1)) for slow in drift] for _ in range(2))
    return one, [speedup * rate for rate in other]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_ratio_of_repeats_in_turns_covers_the_truth_in_19_of_20(count: int) -> None:
    rng = seeded(3)
    sides = [turns(rng, count, 1.15) for _ in range(1000)]
    covered = share_covered(1.15, (ratio(of_repeats(other), of_repeats(one)) for one, other in sides))
    assert 0.93 < covered < 0.97


def test_what_both_sides_suffer_in_a_turn_leaves_their_ratio_conclusive() -> None:
    rng = seeded(4)
    sides = [turns(rng, 5, 1.15) for _ in range(300)]
    paired = [ratio(of_repeats(other), of_repeats(one)).low for one, other in sides]
    # As it was before: the least over the greatest.
    furthest = [min(other) / max(one) for one, other in sides]
    inconclusive = [sum(low <= 1 for low in lows) / len(sides) for lows in (paired, furthest)]
    assert inconclusive[0] < 0.01
    assert inconclusive[1] > 0.6


@pytest.mark.parametrize("steps", [noisy, autocorrelated])
def test_a_ratio_of_single_runs_covers_the_truth_in_about_19_of_20(steps: _Steps) -> None:
    rng = seeded(5)
    pairs = ((mean_of(steps(rng, 60)), mean_of(steps(rng, 60))) for _ in range(1000))
    assert 0.92 < share_covered(1.0, itertools.starmap(ratio, pairs)) < 0.985


def test_sides_with_unlike_numbers_of_repeats_are_compared_by_their_intervals() -> None:
    one, other = of_repeats([10.0, 11.0]), Estimate(value=21.0, low=20.0, high=22.0)
    found = ratio(other, one)
    assert (found.value, found.repeats) == (2.0, 1)
    assert found.low == pytest.approx(2 / math.exp(math.hypot(math.log(21 / 20), math.log(one.high / one.value))))


def test_what_never_changes_is_certain_and_one_step_tells_nothing() -> None:
    assert mean_of([5.0] * 9) == estimate_median([5.0] * 9) == Estimate(value=5.0, low=5.0, high=5.0)
    for alone in (mean_of([5.0]), estimate_median([5.0])):
        assert alone.low < 0.01
        assert alone.high > 1000
    assert mean_of([0.0, 0.0]) == Estimate(value=0.0, low=0.0, high=0.0)
    assert of_repeats([0.0, 0.0]) == Estimate(value=0.0, low=0.0, high=0.0, repeats=2, values=(0.0, 0.0))


def test_a_drift_over_the_whole_run_is_uncertainty_and_no_scatter_of_steps() -> None:
    drifting = [100.0 + step for step in range(30)]
    shuffled = seeded(6).sample(drifting, 30)
    wide, narrow = (one.high / one.low for one in map(mean_of, (drifting, shuffled)))
    assert math.log(wide) > 1.5 * math.log(narrow)


def test_times_a_factor_all_of_it_grows() -> None:
    grown = of_repeats([1.0, 2.0, 3.0]) * 10
    assert (grown.value, grown.values) == (20.0, (10.0, 20.0, 30.0))
    assert grown == of_repeats([10.0, 20.0, 30.0])
    turned = inverse(grown)
    assert turned == Estimate(
        value=1 / 20, low=1 / grown.high, high=1 / grown.low, repeats=3, values=(1 / 10, 1 / 20, 1 / 30)
    )


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ("figure", "6.7 \N{PLUS-MINUS SIGN} 0.2"),
        ("percent", "6.7 \N{PLUS-MINUS SIGN} 0.2%"),
        ("range", "6.50-6.90"),
        ("times", "6.7x (6.5-6.9)"),
        ("times_in_words", "6.7x (6.5x to 6.9x)"),
        ("times_range", "6.5x to 6.9x"),
        ("faster", "6.7x faster (6.5x to 6.9x)"),
    ],
)
def test_an_estimate_has_one_wording_of_each_form(form: Form, told: str) -> None:
    assert Estimate(value=6.7, low=6.5, high=6.9).text(form) == told


def test_a_wide_interval_is_told_by_its_ends_and_a_narrow_one_not_at_all() -> None:
    assert Estimate(value=19.4, low=15.1, high=27.0).text(unit=" ms") == "19.4 ms (15.1-27.0)"
    assert exactly(19.4).text() == "19.4"
    assert Estimate(value=86.04, low=86.02, high=86.06).text("percent") == "86.0%"


def test_what_is_slower_is_told_by_the_inverse_of_its_interval() -> None:
    assert Estimate(value=0.5, low=0.4, high=0.8).text("faster") == "2.0x slower (1.25x to 2.5x)"


@pytest.mark.parametrize("form", ["times", "times_in_words"])
def test_ends_that_read_the_same_are_left_out(form: Form) -> None:
    assert Estimate(value=1.5, low=1.4999, high=1.5001).text(form) == "1.50x"
    assert exactly(1.5).text("faster") == "1.50x faster"


def test_a_figure_without_bounds_is_exact_and_one_that_is_unknown_a_dash() -> None:
    assert of_bounds(3.0, None) == exactly(3.0)
    assert of_bounds(3.0, (2.0, 5.0)).bounds == (2.0, 5.0)
    assert text_of(None, "times") == "-"
    assert text_of(of_bounds(3.0, (2.0, 5.0)), "times") == "3.0x (2.0-5.0)"
