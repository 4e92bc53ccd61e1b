from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from multinode.cli import sweep
from multinode.errors import UsageError
from multinode.records.run import Run
from multinode.records.run_directory import RunDirectory
from multinode.series.grid import GridRecord
from multinode.series.series import GRID_FILE
from tests.golden import Golden
from tests.sweep.sweeping import Elsewhere, sweep_of

BATCH = "per_device_train_batch_size"
LAYOUT = ("--nodes", "1,2", "--workers-per-node", "1")
METHODS = ("--grid", f"{BATCH}=4,1", "--grid", "finetuning_type=lora,full")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a hostfile, a job, and DeepSpeed JSONs that it does not name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MULTINODE_RUNS", str(tmp_path / "runs"))
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    (tmp_path / "sft.yaml").write_text("model_name_or_path: m\nstage: sft\nmax_steps: 500\n")
    (tmp_path / "z2.json").write_text('{"zero_optimization": {"stage": 2}}')
    return tmp_path


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.callback()(lambda: None)
    sweep.register(app)
    return CliRunner().invoke(app, ["sweep", "--hosts", "hosts", *arguments])


def dry_run(*arguments: str) -> dict[str, Any]:
    result = run("--dry-run", "--json", *arguments)
    assert result.exit_code == 0, result.exception
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def refusal(*arguments: str) -> UsageError:
    error = run("--dry-run", *arguments).exception
    assert isinstance(error, UsageError), error
    return error


@pytest.mark.usefixtures("folder")
def test_a_dry_run_lists_the_cells_offline() -> None:
    result = run("sft.yaml", *LAYOUT, *METHODS, "--repeats", "2", "--dry-run")
    assert result.exit_code == 0, result.exception
    lines = result.stdout.splitlines()
    assert lines[0] == f"1  1x1-lora-batch1  --nodes 1 --workers-per-node 1 --set finetuning_type=lora --set {BATCH}=1"
    assert len(lines) == 9
    assert lines[-1] == "8 cells, 2 times each: 16 runs to make"


@pytest.mark.usefixtures("folder")
def test_the_document_keeps_the_users_order_and_has_no_axis_of_one_value() -> None:
    document = dry_run("sft.yaml", *METHODS, "--set", "cutoff_len=512", "--steps", "6")
    assert document["schema"] == "multinode.grid/3"
    assert document["grid"]["settings"] == {BATCH: [4, 1], "finetuning_type": ["lora", "full"]}
    assert [cell["cell"]["label"] for cell in document["cells"]] == [
        f"2-nodes-{method}-batch{batch}" for method in ("lora", "full") for batch in (4, 1)
    ]
    assert document["steps"] == 6
    assert (
        document["fingerprint"]
        != dry_run("sft.yaml", *METHODS, "--set", "cutoff_len=256", "--steps", "6")["fingerprint"]
    )


@pytest.mark.usefixtures("folder")
def test_repeats_are_made_in_turns_unless_told_otherwise() -> None:
    repeated = dry_run("sft.yaml", "--repeats", "3")["grid"]
    assert (repeated["repeats"], repeated["interleave"]) == (3, True)
    assert dry_run("sft.yaml", "--repeats", "3", "--no-interleave")["grid"]["interleave"] is False


def test_a_setting_may_name_another_file_and_each_cell_has_its_own(folder: Path) -> None:
    before = dry_run("sft.yaml", "--grid", "deepspeed=z2.json,null")
    assert [cell["cell"]["label"] for cell in before["cells"]] == ["2-nodes-z2", "2-nodes-no-deepspeed"]
    # What the file holds decides the figures, too.
    (folder / "z2.json").write_text('{"zero_optimization": {"stage": 1}}')
    assert dry_run("sft.yaml", "--grid", "deepspeed=z2.json,null")["fingerprint"] != before["fingerprint"]


@pytest.mark.usefixtures("folder")
def test_a_script_has_a_grid_of_its_arguments() -> None:
    arguments = (
        "--grid-arg",
        "--batch-size=8,2",
        "--grid-arg",
        "--lr=1e-4",
        "--nodes",
        "1",
        "--",
        "train.py",
        "--fp16",
    )
    document = dry_run(*arguments)
    assert document["grid"]["settings"] == {"batch_size": [8, 2]}
    assert [cell["cell"]["label"] for cell in document["cells"]] == ["1-node-batch8", "1-node-batch2"]
    # One value is no axis, and an argument all the same: another one is another sweep.
    assert (
        dry_run(*("--lr=2e-4" if word == "--lr=1e-4" else word for word in arguments))["fingerprint"]
        != (document["fingerprint"])
    )
    # A batch that runs out of memory is seen before a larger one is tried.
    assert run("--dry-run", *arguments).stdout.splitlines()[0] == "1  1-node-batch2  --nodes 1 -- --batch-size=2"


@pytest.mark.usefixtures("folder")
def test_a_script_has_no_keys_and_a_yaml_no_arguments() -> None:
    document = dry_run(*LAYOUT, "--", "train.py", "--lr", "1")
    assert [cell["cell"]["label"] for cell in document["cells"]] == ["1x1", "2x1"]


@pytest.mark.usefixtures("folder")
def test_what_cannot_be_is_refused_before_anything_is_measured(golden: Golden) -> None:
    every = (
        ("--steps", "6", "--minutes", "1"),
        ("--grid", "a=1", "--grid", "a=2"),
        ("--grid", "a=1,2", "--set", "a=2"),
        ("--grid-arg", "--a=1,2", "--", "x.py", "--a", "2"),
        ("--grid-arg", "--a=1,2", "--grid-arg", "--a=3", "--", "x.py"),
        ("--grid-arg", "--a=1,1", "--", "x.py"),
        ("--grid-arg", "--a=1,", "--", "x.py"),
        ("--grid-arg", "--a", "--", "x.py"),
        ("--grid-arg", "--hf-token=a,b", "--", "x.py"),
        ("--grid-arg", "--a=1,2"),
        ("--grid", "a="),
        ("--nodes", "one"),
        ("--nodes", "1,3"),
        ("--workers-per-node", "1,4"),
        ("--deadline", "soon"),
        ("--baseline", "2x2"),
        ("--prices", "prices.yaml"),
        ("--json", "--format", "csv"),
        ("--grid", "deepspeed=z2.json,z3.json"),
        ("--grid", "a=1,2", "--", "train.py"),
    )
    lines = [arguments if "--" in arguments else ("sft.yaml", *arguments) for arguments in every]
    assert (
        refusal("sft.yaml", "--sort", "nonsense").message == "the table has no column 'nonsense': did you mean nodes?"
    )
    golden.check_errors("refused_sweep", {" ".join(line): refusal(*line) for line in lines})


def test_a_dry_run_tells_of_the_sweep_that_would_go_on(folder: Path) -> None:
    record = dry_run("sft.yaml", *METHODS)
    directory = RunDirectory.create(folder / "runs", "20260101-000000-abcd")
    record["cells"][1]["state"], record["cells"][1]["run_ids"] = "measured", ["r"]
    RunDirectory.create(folder / "runs", "r").write_bytes("summary.json", b"{}")
    (directory.path / GRID_FILE).write_text(json.dumps(record))
    result = run("sft.yaml", *METHODS, "--dry-run")
    assert "sweep 20260101-000000-abcd was started with the same command" in result.stderr
    assert "(measured)" in result.stdout.splitlines()[0]
    assert result.stdout.splitlines()[-1] == "4 cells: 3 runs to make"


def test_a_dry_run_counts_what_failed_where_that_is_to_be_made_again(folder: Path) -> None:
    record = dry_run("sft.yaml", *METHODS)
    for cell in record["cells"]:
        cell["state"], cell["failed_runs"] = "failed", 1
    directory = RunDirectory.create(folder / "runs", "20260101-000000-abcd")
    (directory.path / GRID_FILE).write_text(json.dumps(record))
    assert run("sft.yaml", *METHODS, "--dry-run").stdout.splitlines()[-1] == "4 cells: 0 runs to make"
    assert run("sft.yaml", *METHODS, "--dry-run", "--retry-failed").stdout.splitlines()[-1] == "4 cells: 4 runs to make"


def test_a_baseline_that_has_no_speed_does_not_cost_the_table(folder: Path) -> None:
    ended = Elsewhere(folder / "runs", lambda label: "missing_file" if "batch4" in label else 10.0)
    ended.sweep(sweep_of({BATCH: (1, 4)}))
    stored = ended.grid()
    assert isinstance(stored, GridRecord)
    (path,) = (folder / "runs").glob(f"*/{GRID_FILE}")
    wanted = dry_run("sft.yaml", "--grid", f"{BATCH}=1,4", "--nodes", "1")["fingerprint"]
    path.write_text(path.read_text().replace(stored.fingerprint, wanted))
    labels = [cell.cell.label for cell in stored.cells]
    label = labels[1]
    result = run("sft.yaml", "--grid", f"{BATCH}=1,4", "--nodes", "1", "--baseline", label)
    assert result.exit_code == 1, result.exception
    assert f"warning: --baseline: row '{label}' has no samples/s for comparison" in result.stderr
    assert labels[0] in result.stdout
    assert "--retry-failed" in result.stderr


def test_a_finished_sweep_is_shown_again_and_no_node_is_asked(folder: Path) -> None:
    """The hostfile's nodes do not exist: whoever asked one would fail."""
    ended = Elsewhere(folder / "runs", lambda label: "missing_file" if "batch4" in label else "out_of_gpu_memory")
    ended.sweep(sweep_of({BATCH: (1, 4)}))
    stored = ended.grid()
    assert isinstance(stored, GridRecord)
    (path,) = (folder / "runs").glob(f"*/{GRID_FILE}")
    wanted = dry_run("sft.yaml", "--grid", f"{BATCH}=1,4")["fingerprint"]
    path.write_text(path.read_text().replace(stored.fingerprint, wanted))

    result = run("sft.yaml", "--grid", f"{BATCH}=1,4")
    assert result.exit_code == 0, result.exception
    assert "OOM" in result.stdout
    ended_s = RunDirectory(path.parent).read("run.json", Run)
    assert ended_s is not None
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(ended_s.ended_s))
    assert f"sweep {path.parent.name} has already measured this, until {when};" in result.stderr
    document = json.loads(run("sft.yaml", "--grid", f"{BATCH}=1,4", "--json").stdout)
    assert [cell["state"] for cell in document["cells"]] == ["out_of_memory", "skipped"]


@pytest.mark.parametrize("grid", [METHODS, ("--grid", f"{BATCH}=1")])
def test_a_dry_run_refuses_what_no_cell_could_be_started_with(folder: Path, grid: tuple[str, ...]) -> None:
    (folder / "hosts").write_text("a slots=2 slurm_job=7\nb slots=2\n")
    assert str(refusal("sft.yaml", *grid)) == "hosts: slurm_job= must be on the lines of all nodes or of none"
    (folder / "hosts").write_text("a slots=2\nb slots=2\n")
    said = str(refusal("sft.yaml", *grid, "--grad-compress", "fp16", "--set", "deepspeed=z2.json"))
    assert said.startswith("--grad-compress")
    # A cell that fails alone is a result of the sweep.
    engines = ("--grid", "deepspeed=z2.json,null", "--grad-compress", "fp16")
    assert len(dry_run("sft.yaml", *engines)["cells"]) == 2
