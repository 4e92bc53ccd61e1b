from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from multinode.cli.main import build_app
from tests.golden import Golden


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
    assert (document["schema"], document["mode"]) == ("multinode.contrast-plan/3", mode)
    assert [side["role"] for side in document["sides"]] == ["baseline", "candidate"]
    assert [sum(side["plan"]["rendezvous"]["workers"]) for side in document["sides"]] == workers
    assert not Path("runs").exists()


def test_a_dry_run_prints_the_sides_and_the_command_of_each_node(golden: Golden) -> None:
    text = dry_run("--master-port", "29500", "--", "train.py").stdout
    golden.check("contrast_plan.txt", re.sub(r"\d{8}-\d{6}-\w{4}", "RUN", text))


def test_what_no_side_could_be_started_with_is_refused(golden: Golden) -> None:
    lines = ("--workers-per-node 5", "--baseline-gpus 0,1,2")
    refused = {line: dry_run("sft.yaml", *line.split()).exception for line in lines}
    refused["-- vllm serve m"] = dry_run("--", "vllm", "serve", "m").exception
    Path("hosts").write_text("a slots=4 slurm_job=7\nb slots=4\n")
    golden.check_errors("refused_contrast", refused | {"slurm_job= on one line": dry_run("sft.yaml").exception})
