from __future__ import annotations

from pathlib import Path

import msgspec

from multinode.contrast.figures import ASKED, Contrast
from multinode.contrast.judge import compare
from multinode.contrast.measure import cut_job, with_outlook
from multinode.contrast.side import make_side
from multinode.job.job import Job, ScriptJob, TrainingJob, parse_training
from multinode.levers.averaging import Averaging
from multinode.levers.axes import LeverAxes
from multinode.levers.levers import Levers
from multinode.predict.forecast import Forecast, ForecastRequest
from multinode.predict.request import forecast_runs
from multinode.records.plan import LaunchPlan
from multinode.runs.stored_run import StoredRun
from tests.golden import Golden, error_of
from tests.predict.test_recommendations import keep

EPOCHS = parse_training("model_name_or_path: m\nstage: sft\nnum_train_epochs: 3\n", "sft.yaml")
SHORT = parse_training("model_name_or_path: m\nstage: sft\nmax_steps: 12\n", "sft.yaml")
SCRIPT = ScriptJob(argv=("train.py",))


def steps_of(job: Job) -> object:
    assert isinstance(job, TrainingJob)
    return job.config.get("max_steps")


def test_hours_of_training_are_cut_to_what_a_comparison_needs() -> None:
    cut = cut_job(EPOCHS, None)
    assert steps_of(cut) == 35
    assert isinstance(cut, TrainingJob)
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


def test_what_contradicts_itself_is_refused(golden: Golden) -> None:
    golden.check_errors(
        "refused_steps",
        {
            "--full-run --steps 10": error_of(cut_job, EPOCHS, 10, whole=True),
            "--steps 10 of a script": error_of(cut_job, SCRIPT, 10),
        },
    )


def outlook(root: Path, averaging: Averaging | None) -> Contrast:
    """One node against two that average so, on 100 Mbit/s."""
    runs = [keep(root, "c-baseline", 1, 0.0), keep(root, "c-candidate", 2, 100.0)]
    plan = runs[1].read("plan.json", LaunchPlan)
    assert plan is not None
    runs[1].write("plan.json", msgspec.structs.replace(plan, levers=Levers(averaging=averaging)))
    sides = [make_side(role, [StoredRun(run)]) for role, run in zip(("baseline", "candidate"), runs, strict=True)]
    return with_outlook(compare(sides, mode="scale-out", why=ASKED.found(None), job="job.yaml", rule=""), root)


def test_the_break_even_of_nodes_that_average_is_predicted_from_the_one_node(tmp_path: Path) -> None:
    averaging = Averaging(every=16)
    found = outlook(tmp_path, averaging)
    assert found.advice == ()
    assert isinstance(found.forecast, Forecast)
    assert found.forecast.break_even_of.endswith("averaging every 16 steps (local SGD)")
    assert {one.levers.words.get("averaging") for one in found.forecast.scenarios} == {None, averaging.words}
    assert {one.nodes for one in found.forecast.scenarios} == {1, 2, 4}
    request = ForecastRequest(nodes=(2,), levers=LeverAxes(averaging=(averaging,)), link_measured=0.1)
    assert found.forecast.break_even == forecast_runs(tmp_path, ["c-baseline"], request).break_even


def test_the_break_even_of_others_is_predicted_from_both_sides(tmp_path: Path) -> None:
    found = outlook(tmp_path, None)
    assert isinstance(found.forecast, Forecast)
    assert found.forecast.today is not None
    assert "averaging" not in found.forecast.break_even_of
