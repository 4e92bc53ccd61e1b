from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from multinode.cli.main import build_app
from multinode.errors import UsageError


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory, with a hostfile and a job."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a addr=10.0.0.1 slots=4\nb addr=10.0.0.2 slots=4\n")
    (tmp_path / "sft.yaml").write_text("model_name_or_path: m\nstage: sft\n")


def dry_run(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), ["contrast", "--hosts", "hosts", "--dry-run", *arguments])


@pytest.mark.parametrize(
    ("options", "mode", "workers"),
    [
        ((), "same-workers", [4, 4]),
        (("--workers-per-node", "1"), "same-workers", [2, 2]),
        (("--workers-per-node", "3"), "scale-out", [3, 6]),
    ],
)
def test_a_dry_run_has_each_side_with_its_plan(options: tuple[str, ...], mode: str, workers: list[int]) -> None:
    document = json.loads(dry_run("sft.yaml", "--json", *options).stdout)
    assert (document["schema"], document["mode"]) == ("multinode.contrast-plan/2", mode)
    assert [side["role"] for side in document["sides"]] == ["baseline", "candidate"]
    assert [sum(side["plan"]["rendezvous"]["workers"]) for side in document["sides"]] == workers
    assert not Path("runs").exists()


def test_a_dry_run_prints_the_sides_and_the_command_of_each_node() -> None:
    text = dry_run("--", "train.py").stdout
    assert text.startswith("same-workers: node 0 has 4 slots")
    assert "\nbaseline: 4 workers on a\n" in text
    assert "\ncandidate: 2 workers on each of 2 nodes\n" in text
    assert text.count("train.py") >= 3


def test_more_workers_than_slots_are_refused() -> None:
    result = dry_run("sft.yaml", "--workers-per-node", "5")
    assert isinstance(result.exception, UsageError)
    assert str(result.exception) == "a: 5 workers are requested, but it has 4 slots"


def test_a_dry_run_refuses_what_no_side_could_be_started_with() -> None:
    Path("hosts").write_text("a slots=4 slurm_job=7\nb slots=4\n")
    result = dry_run("sft.yaml")
    assert isinstance(result.exception, UsageError)
    assert str(result.exception) == "hosts: slurm_job= must be on the lines of all nodes or of none"


def test_a_wrong_number_of_baseline_gpus_says_how_many_to_name() -> None:
    error = dry_run("sft.yaml", "--baseline-gpus", "0,1,2").exception
    assert isinstance(error, UsageError)
    assert error.hint == "name 8 GPUs of node 0: --baseline-gpus takes one per worker"
