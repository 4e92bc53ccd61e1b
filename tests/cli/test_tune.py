"""`multinode tune` on nodes that do not exist: what is refused, planned, and shown of what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from multinode.cli.main import build_app
from multinode.errors import UsageError
from multinode.job.engines.engine import choose_engine
from multinode.tune.measure import Tuned
from multinode.tune.request import TuningRequest
from tests.golden import Golden
from tests.tune.tuning import HOSTS, YAML, Elsewhere, tuning_request

SHAPE = ("job.yaml", "--hosts", "hosts", "--steps", "64", "--candidates", "3", "--eval-samples", "8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a hostfile and a job."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MULTINODE_RUNS", str(tmp_path / "runs"))
    (tmp_path / "hosts").write_text(HOSTS)
    (tmp_path / "job.yaml").write_text(YAML)
    return tmp_path


def run(*arguments: str, verb: str = "tune") -> Result:
    return CliRunner().invoke(build_app(), [verb, *arguments])


def typed(**fields: Any) -> TuningRequest:
    """What the command line asks for."""
    asked = tuning_request(**fields)
    engine = choose_engine(asked.launch.job)  # type: ignore[arg-type]
    return msgspec.structs.replace(asked, launch=msgspec.structs.replace(asked.launch, engine=engine))


@pytest.fixture
def tuned(folder: Path) -> Tuned:
    """A tuning that was measured, and is won by an average that costs nothing."""
    return Elsewhere(folder / "runs", loss_by_round=0.0).tune(typed())


def test_what_was_measured_is_shown_again_and_no_node_is_asked(tuned: Tuned) -> None:
    result = run(*SHAPE, "--seeds", "2")
    assert result.exit_code == 0, result.exception
    assert result.stdout.startswith("Recommended: local SGD every 16 steps in fp16. It reaches ")
    launched = f"multinode launch --with {tuned.directory}/tuned.yaml --hosts hosts job.yaml"
    assert f"Launch it   {launched}" in result.stdout
    assert f"tuning {tuned.directory.name} has already measured this" in result.stderr
    document = json.loads(run(*SHAPE, "--seeds", "2", "--json").stdout)
    assert document["schema"] == "multinode.tuning/3"
    assert (document["outcome"], document["recommended"]) == ("change", "local-sgd-every-16-steps-in-fp16")


def test_the_winner_goes_where_it_is_asked_for_and_is_what_launch_takes(folder: Path, tuned: Tuned) -> None:
    assert tuned.tuning.recommended is not None
    result = run(*SHAPE, "--seeds", "2", "--output", "winner.yaml")
    assert result.exit_code == 0, result.exception
    assert "average: local:16:fp16" in (folder / "winner.yaml").read_text()
    planned = run("--with", "winner.yaml", "job.yaml", "--hosts", "hosts", "--dry-run", "--json", verb="launch")
    plan = json.loads(planned.stdout)
    assert (plan["levers"]["averaging"]["every"], sum(plan["rendezvous"]["workers"])) == (16, 2)
    assert plan["levers"]["averaging"]["dtype"] == "fp16"


def test_a_tuning_is_listed_and_shown(tuned: Tuned) -> None:
    shown = run(tuned.directory.name, verb="show")
    assert shown.exit_code == 0, shown.exception
    assert "Recommended: local SGD every 16 steps in fp16" in shown.stdout
    assert json.loads(run(tuned.directory.name, "--json", verb="show").stdout)["tuning"]["outcome"] == "change"
    listed = json.loads(run("--json", verb="runs").stdout)["runs"]
    assert {one["kind"] for one in listed} == {"tuning"}


@pytest.mark.usefixtures("tuned")
def test_a_plan_counts_what_is_left(folder: Path) -> None:
    result = run(*SHAPE, "--seeds", "3", "--dry-run", "--budget", "1h")
    assert result.exit_code == 0, result.exception
    assert "local SGD every 16 steps in fp16" in result.stdout
    assert "for 5 runs; the budget is 1 h 00 min" in " ".join(result.stdout.split())
    document = json.loads(run(*SHAPE, "--seeds", "3", "--dry-run", "--json").stdout)
    assert (document["waiting"], document["seeds"], document["budget_s"]) == (5, 3, 1200.0)
    document = json.loads(run(*SHAPE, "--learning-rates", "4e-3,1e-3", "--dry-run", "--json").stdout)
    assert document["learning_rates"] == [1e-3, 4e-3]
    assert len(list((folder / "runs").glob("*/tuning.json"))) == 1


def test_a_dry_run_refuses_what_could_not_be_started(folder: Path) -> None:
    (folder / "hosts").write_text("a slots=2 slurm_job=7\nb slots=2\n")
    for more in ((), ("--dry-run",)):
        error = run(*SHAPE, *more).exception
        assert str(error) == "hosts: slurm_job= must be on the lines of all nodes or of none"


@pytest.mark.usefixtures("folder")
def test_what_cannot_be_tuned_is_refused_before_any_node_is_asked(golden: Golden) -> None:
    every = (
        ("--hosts", "hosts", "--judge", "speed", "--learning-rates", "1e-3,2e-3"),
        (*SHAPE, "--judge", "speed"),
        (*SHAPE, "--steps", "7"),
        (*SHAPE, "--nodes", "1"),
        ("--hosts", "hosts", "--", "train.py"),
        (*SHAPE, "--budget", "soon"),
        (*SHAPE, "--learning-rates", "1e-3"),
        (*SHAPE, "--learning-rates", "1e-3,nan"),
        (*SHAPE, "--learning-rates", "1e-3,1e-3,2e-3"),
        (*SHAPE, "--output", "nowhere/tuned.yaml"),
        (*SHAPE, "--set", "per_device_train_batch_size=auto"),
    )
    for more in ((), ("--dry-run",)):
        refused = {" ".join(arguments): run(*more, *arguments).exception for arguments in every}
        assert all(isinstance(error, UsageError) for error in refused.values())
        golden.check_errors("refused_tune", refused)
