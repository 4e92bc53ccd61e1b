from __future__ import annotations

import pytest

from multinode.contrast.judge import with_full_run
from multinode.model.workload import FullRun
from multinode.stats.unknown import Unknown, known, reason_of
from tests.contrast.made_up_sides import side_of

STEPS = FullRun(steps=1000)


def test_both_sides_train_the_samples_that_the_steps_of_the_candidate_have() -> None:
    baseline = side_of("baseline", 20.0, whole=STEPS, price_per_hour=1.0)  # 4 samples per step
    candidate = side_of("candidate", 30.0, nodes=2, whole=STEPS, price_per_hour=3.0)  # 8
    one, both = with_full_run((baseline, candidate), candidate)
    assert known(one.whole_s).value == pytest.approx(8000 / 20)
    assert known(both.whole_s).value == pytest.approx(8000 / 30)
    assert known(one.whole_s).low < known(one.whole_s).value < known(one.whole_s).high
    assert one.whole_cost == pytest.approx(400 / 3600)
    assert both.whole_cost == pytest.approx(8000 / 30 / 3600 * 3)


def test_epochs_are_of_the_data_whatever_the_batch() -> None:
    sides = [side_of(role, 10.0, whole=FullRun(epochs=3.0), dataset_samples=400) for role in ("baseline", "candidate")]
    times = [
        known(side.whole_s).value for side in with_full_run(sides, sides[1]) if not isinstance(side.whole_s, Unknown)
    ]
    assert times == pytest.approx([120.0, 120.0])


def test_without_a_known_batch_a_step_has_the_samples_that_it_was_seen_to_have() -> None:
    candidate = side_of("candidate", 10.0, settings=None, step_ms=500.0, whole=STEPS)
    (found,) = with_full_run([candidate], candidate)
    assert known(found.whole_s).value == pytest.approx(500.0)


@pytest.mark.parametrize(
    ("whole", "reason"),
    [
        (FullRun(), "does not set its number of steps"),
        (FullRun(epochs=2.0), "the number of samples in the dataset is unknown"),
    ],
)
def test_a_whole_job_of_unknown_length_has_no_time_and_says_why(whole: FullRun, reason: str) -> None:
    candidate = side_of("candidate", 10.0, whole=whole, price_per_hour=1.0)
    (found,) = with_full_run([candidate], candidate)
    assert reason in reason_of(found.whole_s)
    assert reason in reason_of(found.whole_cost)


def test_a_side_without_a_price_has_a_time_and_no_cost() -> None:
    candidate = side_of("candidate", 10.0, whole=STEPS, price_per_hour=Unknown("no price="))
    (found,) = with_full_run([candidate], candidate)
    assert not isinstance(found.whole_s, Unknown)
    assert found.whole_cost == Unknown("no price=")
