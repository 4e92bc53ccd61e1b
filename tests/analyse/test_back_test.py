from __future__ import annotations

import pytest

from multinode.analyse.prediction.forecast import Trial, back_test


def trial(name: str, predicted: float, measured: float, spread: float = 0.05) -> Trial:
    interval = (predicted / (1 + spread), predicted * (1 + spread))
    return Trial(name=name, predicted=predicted, interval=interval, measured=measured)


def test_a_step_that_was_predicted_too_short_has_a_negative_error() -> None:
    # 10 samples a second were predicted, and 8 came: the step was to take 0.8 of what it took.
    assert trial("slow", 10, 8).error == pytest.approx(-0.2)
    assert trial("fast", 10, 12.5).error == pytest.approx(0.25)


@pytest.mark.parametrize(("predicted", "measured"), [(10, 5), (5, 10), (10, 10)])
def test_an_interval_of_the_miss_has_what_was_measured(predicted: float, measured: float) -> None:
    found = trial("one", predicted, measured)
    assert trial("one", predicted, measured, found.miss).is_covered
    assert found.miss == pytest.approx(0.0 if predicted == measured else 1.0)


def test_the_worst_is_named_and_the_intervals_are_counted() -> None:
    found = back_test([trial("a", 10, 10.1), trial("b", 10, 9.7), trial("c", 10, 8)])
    assert found.median_error == pytest.approx(0.03)
    assert found.worst is not None
    assert found.worst.name == "c"
    assert found.coverage == pytest.approx(2 / 3)
    assert found.sentence == (
        "of 3 measured runs the step time was off by 3.0% in the median, by 20.0% at worst (c); 2 within the interval"
    )


def test_of_nothing_there_is_no_error() -> None:
    for nothing in ([], [trial("stuck", 10, 0)]):
        found = back_test(nothing)
        assert (found.median_error, found.worst, found.coverage) == (None, None, None)
        assert found.sentence == "the model has not been held against any run"
