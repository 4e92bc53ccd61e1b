from __future__ import annotations

import pytest

from multinode.analyse.comparison.contrast_side import full_run_samples, with_full_run
from multinode.analyse.job.workload import Whole
from tests.analyse.made_up_sides import side_of

STEPS = Whole(steps=1000)


def test_both_sides_train_the_samples_that_the_steps_of_the_candidate_have() -> None:
    baseline = side_of("baseline", 20.0, whole=STEPS, price_per_hour=1.0)  # 4 samples a step
    candidate = side_of("candidate", 30.0, nodes=2, whole=STEPS, price_per_hour=3.0)  # 8
    one, both = with_full_run((baseline, candidate), candidate)
    assert one.whole_s is not None
    assert both.whole_s is not None
    assert one.whole_s.value == pytest.approx(8000 / 20)
    assert both.whole_s.value == pytest.approx(8000 / 30)
    assert one.whole_s.low < one.whole_s.value < one.whole_s.high
    assert one.whole_cost == pytest.approx(400 / 3600)
    assert both.whole_cost == pytest.approx(8000 / 30 / 3600 * 3)


def test_epochs_are_of_the_data_whatever_the_batch() -> None:
    sides = [side_of(role, 10.0, whole=Whole(epochs=3.0), dataset_samples=400) for role in ("baseline", "candidate")]
    assert full_run_samples(sides, sides[1]) == pytest.approx(1200.0)


def test_without_a_known_batch_a_step_has_the_samples_that_it_was_seen_to_have() -> None:
    candidate = side_of("candidate", 10.0, settings=None, step_ms=500.0, whole=STEPS)
    assert full_run_samples([candidate], candidate) == pytest.approx(5000.0)


@pytest.mark.parametrize(
    ("whole", "reason"),
    [
        (Whole(), "does not say how many"),
        (Whole(steps=-1), "does not say how many"),
        (Whole(epochs=1e300), "does not say how many"),
        (Whole(epochs=2.0), "how many samples the data set has is not known"),
    ],
)
def test_a_whole_job_of_unknown_length_has_no_time_and_says_why(whole: Whole, reason: str) -> None:
    candidate = side_of("candidate", 10.0, whole=whole, price_per_hour=1.0)
    (found,) = with_full_run([candidate], candidate)
    assert (found.whole_s, found.whole_cost) == (None, None)
    assert reason in found.missing["whole_s"]
    assert reason in found.missing["whole_cost"]


def test_a_side_without_a_price_has_a_time_and_no_cost() -> None:
    candidate = side_of("candidate", 10.0, whole=STEPS, missing={"price_per_hour": "no price="})
    (found,) = with_full_run([candidate], candidate)
    assert found.whole_s is not None
    assert (found.whole_cost, found.missing["whole_cost"]) == (None, "no price=")
