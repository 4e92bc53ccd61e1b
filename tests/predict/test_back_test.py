from __future__ import annotations

import pytest

from multinode.predict.back_test import Trial, back_test, residual_quantile
from multinode.stats.estimate import exactly, of_bounds


def trial(name: str, predicted: float, measured: float, spread: float = 0.05) -> Trial:
    interval = (predicted / (1 + spread), predicted * (1 + spread))
    return Trial(name=name, predicted=of_bounds(predicted, interval), measured=exactly(measured))


def test_a_step_that_was_predicted_too_short_has_a_negative_error() -> None:
    # 10 samples per second were predicted, and 8 came: the step was to take 0.8 of what it took.
    assert trial("slow", 10, 8).error == pytest.approx(-0.2)
    assert trial("fast", 10, 12.5).error == pytest.approx(0.25)


@pytest.mark.parametrize(("predicted", "measured"), [(10, 5), (5, 10), (10, 10)])
def test_an_interval_of_the_largest_miss_has_what_was_measured(predicted: float, measured: float) -> None:
    found = residual_quantile([trial("one", predicted, measured)])
    assert trial("one", predicted, measured, found.relative * (1 + 1e-9)).is_covered
    assert found.relative == pytest.approx(0.0 if predicted == measured else 1.0)


@pytest.mark.parametrize(
    ("runs", "place"), [(1, 1), (8, 8), (9, 9), (10, 10), (18, 18), (19, 18), (20, 19), (29, 27), (99, 90)]
)
def test_the_quantile_is_that_of_split_conformal_prediction(runs: int, place: int) -> None:
    """The ceil((n + 1) * 0.9)-th smallest; with fewer than nine there is none, and the largest stands in."""
    trials = [trial(str(one), 10, 10 * (1 + one / 100)) for one in range(runs, 0, -1)]
    found = residual_quantile(trials)
    assert found.relative == pytest.approx(place / 100)
    assert found.is_conformal is (runs >= 9)
    said = "the 90% quantile of the error" if found.is_conformal else "a back-tested interval needs 9"
    assert said in found.doubt.message
    assert f"{place}.0%" in found.doubt.message


@pytest.mark.parametrize(
    ("runs", "spread", "asked", "is_of_it"),
    [(9, 0.1, 0.1, True), (9, 0.1, 0.05, True), (9, 0.1, 0.11, False), (8, 0.1, 0.05, False)],
)
def test_what_is_no_more_uncertain_than_the_trials_was_tested(
    runs: int, spread: float, asked: float, *, is_of_it: bool
) -> None:
    found = residual_quantile([trial(str(one), 10, 10.2, spread) for one in range(runs)])
    assert found.covers(10 / (1 + asked), 10 * (1 + asked)) is is_of_it


def test_the_worst_is_named_and_the_intervals_are_counted() -> None:
    found = back_test([trial("a", 10, 10.1), trial("b", 10, 9.7), trial("c", 10, 8)])
    assert found.median_error == pytest.approx(0.03)
    assert found.worst is not None
    assert found.worst.name == "c"
    assert found.outcome.code == "checked"
    assert found.outcome.figures == pytest.approx({"runs": 3, "median_error": 0.03, "worst_error": 0.2})
    assert found.coverage == pytest.approx(2 / 3)


def test_of_nothing_there_is_no_error() -> None:
    for nothing in ([], [trial("stuck", 10, 0)]):
        found = back_test(nothing)
        assert (found.median_error, found.worst, found.coverage) == (None, None, None)
        assert found.outcome.code == "not-checked"
