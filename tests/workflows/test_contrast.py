from __future__ import annotations

import pytest

from multinode.core.job.job import Job, LlamaFactoryJob, ScriptJob, parse_llamafactory
from multinode.errors import UsageError
from multinode.workflows.comparison.contrast import cut_job

EPOCHS = parse_llamafactory("model_name_or_path: m\nstage: sft\nnum_train_epochs: 3\n", "sft.yaml")
SHORT = parse_llamafactory("model_name_or_path: m\nstage: sft\nmax_steps: 12\n", "sft.yaml")
SCRIPT = ScriptJob(argv=("train.py",))


def steps_of(job: Job) -> object:
    assert isinstance(job, LlamaFactoryJob)
    return job.config.get("max_steps")


def test_hours_of_training_are_cut_to_what_a_comparison_needs() -> None:
    cut = cut_job(EPOCHS, None)
    assert steps_of(cut) == 35
    assert isinstance(cut, LlamaFactoryJob)
    # The file itself still says how long the full run is.
    assert "max_steps" in cut.overridden
    assert steps_of(cut_job(EPOCHS, 100)) == 105


def test_a_job_that_is_short_already_is_trained_as_it_is() -> None:
    assert cut_job(SHORT, None) is SHORT
    assert steps_of(cut_job(SHORT, 20)) == 25


def test_few_steps_have_a_shorter_warm_up() -> None:
    # A third of fewer than fifteen steps is warm-up.
    assert steps_of(cut_job(EPOCHS, 6)) == 8


def test_the_whole_job_and_a_script_are_left_as_they_are() -> None:
    assert cut_job(EPOCHS, None, whole=True) is EPOCHS
    assert cut_job(SCRIPT, None) is SCRIPT


def test_what_contradicts_itself_is_refused() -> None:
    with pytest.raises(UsageError, match="--full-run trains all steps, and --steps some"):
        cut_job(EPOCHS, 10, whole=True)
    with pytest.raises(UsageError, match="--steps sets max_steps of a YAML job"):
        cut_job(SCRIPT, 10)
