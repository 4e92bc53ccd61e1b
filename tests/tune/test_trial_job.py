from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.job.job import parse_training
from multinode.tune.trial import TrialTraining, can_evaluate, trial_job, trial_steps

YAML = "model_name_or_path: m\nstage: sft\nper_device_train_batch_size: 3\n"


def trained(text: str = "", **fields: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"steps": 64, "parts": 8, "evaluation_samples": 20}
    return trial_job(parse_training(YAML + text, "job.yaml"), TrialTraining(**(usual | fields))).config


@pytest.mark.parametrize(
    ("steps", "every", "between"),
    [(64, 1, 8), (64, 16, 16), (64, 4, 8), (64, 3, 9), (5, 1, 1), (48, 16, 16), (256, 16, 32)],
)
def test_evaluations_end_whole_rounds(steps: int, every: int, between: int) -> None:
    assert TrialTraining(steps=steps, every=every, parts=8, evaluation_samples=1).evaluation_steps == between


@pytest.mark.parametrize(
    ("steps", "every", "between", "last"),
    # The rate has decayed at the end: rather five evaluations that end there than eight that do not.
    [(65, 1, 13, 65), (67, 1, 11, 66), (200, 1, 25, 200), (100, 1, 20, 100), (144, 16, 48, 144), (176, 16, 32, 160)],
)
def test_the_last_evaluation_is_at_the_end_or_close_to_it(steps: int, every: int, between: int, last: int) -> None:
    found = TrialTraining(steps=steps, every=every, parts=8, evaluation_samples=1).evaluation_steps
    assert (found, steps - steps % found) == (between, last)


@given(samples=st.integers(1, 100_000), batch=st.integers(1, 64), every=st.sampled_from([1, 4, 16, 64]))
def test_a_trial_ends_a_round_on_no_fewer_samples(samples: int, batch: int, every: int) -> None:
    steps = trial_steps(samples, batch, every)
    assert steps % every == 0
    assert (steps - every) * batch < samples + batch / 2
    assert steps * batch >= samples - batch / 2
    assert trial_steps(samples, batch, 1) <= steps


def test_a_trial_evaluates_on_samples_that_are_held_out() -> None:
    config = trained(seed=7)
    assert (config["max_steps"], config["seed"]) == (64, 7)
    assert (config["eval_strategy"], config["eval_steps"], config["val_size"]) == ("steps", 8, 20)
    assert config["per_device_eval_batch_size"] == 3
    # What the job holds out itself is as large as it was asked for here; a data set of its own stays.
    assert trained("val_size: 0.1\n")["val_size"] == 20
    own = trained("eval_dataset: mine\n")
    assert (own["eval_dataset"], own["eval_strategy"]) == ("mine", "steps")
    assert "val_size" not in own


@pytest.mark.parametrize(
    ("text", "able"),
    [("", True), ("tokenized_path: t\n", False), ("tokenized_path: t\neval_dataset: d\n", True)],
)
def test_data_that_were_tokenized_before_cannot_be_split(text: str, *, able: bool) -> None:
    assert can_evaluate(parse_training(YAML + text, "job.yaml")) == able
    assert ("eval_strategy" in trained(text)) == able


@pytest.mark.parametrize(("text", "logged"), [("", 8), ("logging_steps: 2\n", 2), ("logging_steps: 500\n", 8)])
def test_each_part_of_a_run_has_a_training_loss(text: str, logged: int) -> None:
    assert trained(text)["logging_steps"] == logged
