from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from multinode.cli.main import build_app
from multinode.errors import UsageError
from multinode.profile.figures import BalanceOutlook, NodePace
from multinode.stats.estimate import Estimate
from tests import make
from tests.golden import Golden

ZERO2 = '{\n  "zero_optimization": {\n    "stage": 2\n  }\n}\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a hostfile and a job that names a DeepSpeed JSON."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a addr=10.0.0.1 ifname=eth0\nb addr=10.0.0.2 ifname=eth0\n")
    (tmp_path / "sft.yaml").write_text("model_name_or_path: m\nstage: sft\ndeepspeed: ds.json\n")
    (tmp_path / "ds.json").write_text(ZERO2)
    return tmp_path


def dry_run(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), ["launch", "--hosts", "hosts", "--dry-run", *arguments])


def sent(result: Result) -> dict[str, str]:
    """The files that node 0 is sent first, by name."""
    assert result.exit_code == 0, result.exception
    return {file["path"]: file["text"] for file in json.loads(result.stdout)["nodes"][0]["files"]}


def test_an_edited_deepspeed_json_travels_and_its_diff_is_shown(folder: Path, golden: Golden) -> None:
    result = dry_run("sft.yaml", "--json", "--deepspeed-set", "zero_optimization.overlap_comm=true")
    files = sent(result)
    assert json.loads(files["deepspeed.json"]) == {"zero_optimization": {"stage": 2, "overlap_comm": True}}
    assert "/deepspeed.json\n" in files["job.yaml"]
    golden.check("deepspeed_diff.txt", result.stderr)
    assert (folder / "ds.json").read_text() == ZERO2


def test_no_secret_of_the_job_is_printed(folder: Path) -> None:
    (folder / "ds.json").write_text('{\n  "comet": {\n    "api_key": "s3cret"\n  },\n  "steps_per_print": 1\n}\n')
    for form in ((), ("--json",)):
        edits = ("--deepspeed-set", "steps_per_print=2", "--set", "hub_token=s3cret", "--env", "HF_TOKEN=s3cret")
        result = dry_run("sft.yaml", *form, *edits, "--setup", "export A_TOKEN=s3cret")
        assert result.exit_code == 0
        assert "s3cret" not in result.stdout + result.stderr
        script = dry_run(*form, "--", "train.py", "--hub-token", "s3cret", "--token=s3cret")
        assert "s3cret" not in script.stdout + script.stderr
        assert "train.py" in script.stdout


def test_an_edit_that_changes_nothing_says_so(folder: Path) -> None:
    result = dry_run("sft.yaml", "--deepspeed-set", "zero_optimization.stage=2")
    assert (result.exit_code, result.stderr) == (0, "--deepspeed-set does not change the JSON\n")
    assert dry_run(str(folder / "sft.yaml")).stderr == ""


def test_what_a_stranger_wrote_into_the_json_does_nothing_to_the_terminal(folder: Path, golden: Golden) -> None:
    (folder / "ds.json").write_text('{\n\t"note": "\N{RIGHT-TO-LEFT OVERRIDE}",\n\t"steps_per_print": 1\n}\n')
    result = dry_run("sft.yaml", "--deepspeed-set", "steps_per_print=2")
    golden.check("deepspeed_diff_escaped.txt", result.stderr)


def test_a_job_can_be_run_without_its_deepspeed(folder: Path) -> None:
    files = sent(dry_run(str(folder / "sft.yaml"), "--json", "--set", "deepspeed=null"))
    assert list(files) == ["job.yaml"]
    assert yaml.safe_load(files["job.yaml"])["deepspeed"] is None


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("option", ["--set", "--deepspeed-set"])
def test_a_script_has_nothing_to_set(option: str) -> None:
    result = dry_run(option, "a=1", "--", "train.py")
    assert isinstance(result.exception, UsageError)
    assert str(result.exception) == f"{option} changes a YAML job; this is a script"


@pytest.mark.parametrize(
    ("named", "said"), [("ds.json", "zero_hpz_partition_size: 2 groups the workers"), ("elsewhere.json", "")]
)
def test_a_json_that_only_accelerate_names_is_read_for_what_unequal_nodes_cannot_do(
    folder: Path, named: str, said: str
) -> None:
    (folder / "hosts").write_text("a addr=10.0.0.1 ifname=eth0 slots=2\nb addr=10.0.0.2 ifname=eth0 slots=1\n")
    (folder / "ds.json").write_text('{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}')
    config = f"distributed_type: DEEPSPEED\ndeepspeed_config: {{deepspeed_config_file: {named}}}\n"
    (folder / "acc.yaml").write_text(config)
    result = dry_run("--engine", "accelerate", "--accelerate-config", "acc.yaml", "--", "train.py")
    assert result.exit_code == (1 if said else 0)
    assert said in str(result.exception)


@pytest.mark.usefixtures("folder")
def test_made_up_data_travel_and_are_all_that_is_trained_on() -> None:
    files = sent(dry_run("sft.yaml", "--json", "--synthetic", "--set", "cutoff_len=64", "--set", "max_steps=5"))
    assert sorted(files) == ["deepspeed.json", "job.yaml", "synthetic/dataset_info.json", "synthetic/text.txt"]
    assert {"stage: pt", "dataset: synthetic", "cutoff_len: 64"} <= set(files["job.yaml"].splitlines())
    # 5 steps of 8 samples on each of 2 workers, each sample from one line.
    assert json.loads(files["synthetic/dataset_info.json"])["synthetic"]["num_samples"] == 5 * 8 * 2


def test_a_dry_run_refuses_what_a_launch_refuses_without_asking_a_node(folder: Path, golden: Golden) -> None:
    (folder / "acc.yaml").write_text("num_processes: 4\n")
    every = (
        "--synthetic sft.yaml",
        "--synthetic sft.yaml --set max_steps=5 --set stage=dpo",
        "--synthetic sft.yaml --set max_steps=5 --set dataset=mine",
        "--synthetic -- train.py",
        "--restarts 1 --detach -- train.py",
        "--min-nodes 1 -- train.py",
        "--restarts 1 --scale-batch -- train.py",
        "--restarts 1 --node-wait soon -- train.py",
        "--restarts 3 sft.yaml",
        "--restarts 3 --min-nodes 5 -- train.py",
        "--engine llamafactory -- train.py",
        "--engine exec sft.yaml",
        "--engine slurm -- train.py",
        "--accelerate-config acc.yaml -- train.py",
        "--env NOT_SET_ANYWHERE -- train.py",
        "--notify http://example.com/x -- train.py",
        "--export floppy:a -- train.py",
        "--metrics-port 9 --export prometheus:metrics -- train.py",
    )
    results = {line: dry_run(*line.split()) for line in every}
    assert {result.stdout for result in results.values()} == {""}
    refused = {line: result.exception for line, result in results.items()}
    assert all(isinstance(error, UsageError) for error in refused.values())
    golden.check_errors("refused_launch", refused)


def test_a_file_of_options_is_launched_with_and_what_is_typed_counts_before_it(folder: Path) -> None:
    (folder / "plain.yaml").write_text("model_name_or_path: m\nstage: sft\nlearning_rate: 0.1\n")
    (folder / "tuned.yaml").write_text(
        "workers-per-node: 2\naverage: local:16:fp16\nset: {learning_rate: 0.5, max_steps: 7}\n"
    )
    plan = json.loads(dry_run("plain.yaml", "--json", "--with", "tuned.yaml").stdout)
    assert (plan["rendezvous"]["workers"], plan["levers"]["averaging"]["every"]) == ([2, 2], 16)
    assert plan["levers"]["averaging"]["dtype"] == "fp16"
    assert {"learning_rate: 0.5", "max_steps: 7"} <= set(plan["nodes"][0]["files"][0]["text"].splitlines())

    typed = ("--average", "local:4", "--set", "max_steps=9", "--workers-per-node", "1", "--nodes", "2")
    plan = json.loads(dry_run("plain.yaml", "--json", "--with", "tuned.yaml", *typed).stdout)
    assert (plan["rendezvous"]["workers"], plan["levers"]["averaging"]["every"]) == ([1, 1], 4)
    assert plan["levers"]["averaging"]["dtype"] is None
    assert {"learning_rate: 0.5", "max_steps: 9"} <= set(plan["nodes"][0]["files"][0]["text"].splitlines())

    (folder / "alone.yaml").write_text("nodes: 1\ndeepspeed-set: {steps_per_print: 3}\n")
    plan = json.loads(dry_run("sft.yaml", "--json", "--with", "alone.yaml").stdout)
    assert len(plan["nodes"]) == 1
    (deepspeed,) = (file["text"] for file in plan["nodes"][0]["files"] if file["path"] == "deepspeed.json")
    assert json.loads(deepspeed)["steps_per_print"] == 3
    (folder / "fp16.yaml").write_text("grad-compress: fp16\n")
    plan = json.loads(dry_run("plain.yaml", "--json", "--with", "fp16.yaml").stdout)
    assert plan["levers"] == {"compression": {"kind": "fp16"}}
    (folder / "wrong.yaml").write_text("nodes: 1\ngradient: fp16\n")
    refused = dry_run("plain.yaml", "--with", "wrong.yaml").exception
    assert isinstance(refused, UsageError)
    assert str(refused).startswith("wrong.yaml:2: 'gradient': ")


@pytest.mark.parametrize("words", [("--copy-code",), ("--copy-code", "."), ("--copy-code=.",)])
def test_the_code_that_is_copied_is_counted_and_the_job_starts_in_it(
    folder: Path, words: tuple[str, ...], golden: Golden
) -> None:
    (folder / "train.py").write_text("print(1)")
    (folder / ".env").write_text("TOKEN=s3cret")
    size = sum((folder / name).stat().st_size for name in ("hosts", "sft.yaml", "ds.json", "train.py"))
    result = dry_run(*words, "--", "train.py")
    assert result.exit_code == 0, result.exception
    head = "\n".join(line for line in result.stdout.splitlines() if line.startswith("#"))
    masked = re.sub(r"digest \w+|\d{8}-\d{6}-\w{4}|\b[12]\d{4}\b", "X", head)
    golden.check_texts("copied_code", {"plan": masked, "stderr": result.stderr}, folder, {f"{size} B": "SIZE"})
    assert result.stdout.count("/tree &&\n") == 2
    plan = json.loads(dry_run("sft.yaml", "--set", "output_dir=saves", "--json", *words).stdout)
    assert (plan["code"]["files"], plan["code"]["size_bytes"], plan["code"]["sent"]) == (4, size, {})
    assert {node["command"]["cwd"] for node in plan["nodes"]} == {f"~/.multinode/code/{plan['run_id']}/tree"}
    assert yaml.safe_load(plan["nodes"][0]["files"][0]["text"])["output_dir"] == "~/saves"


def test_what_stands_behind_the_option_is_the_directory_or_the_job(folder: Path, golden: Golden) -> None:
    assert re.findall(r" of (\S+) \(digest", dry_run("--copy-code", "sft.yaml").stdout) == [str(folder)]
    result = dry_run("sft.yaml", "--copy-code=sft.yaml")
    assert isinstance(result.exception, UsageError)
    missing = dry_run("--copy-code", str(folder), "--", "train.py")
    refused = {"--copy-code=sft.yaml": result.exception, "no train.py": missing.exception}
    golden.check_errors("refused_copy_code", refused, folder)


def test_speeds_are_stated_or_those_of_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    plan = json.loads(dry_run("--json", "--balance", "a=2,b=1", "--", "train.py").stdout)
    assert plan["levers"]["balance"]["speeds"] == {"a": 2.0, "b": 1.0}
    monkeypatch.setenv("MULTINODE_RUNS", str(folder / "runs"))
    directory = make.store(folder / "runs", "slow", run={})
    figures = {"own_ms": 1.0, "samples": 4.0, "balanced_samples": 4.0}
    paces = tuple(NodePace(node=name, speed=speed, **figures) for name, speed in (("a", 1.5), ("b", 1.0)))
    told = BalanceOutlook(nodes=paces, gain=Estimate(value=1.2, low=1.1, high=1.3))
    directory.write("summary.json", make.summary(run_id="slow", steps=9, steady_steps=6, balance=told))
    shown = dry_run("--balance", "slow", "--", "train.py").stdout
    notes = [line for line in shown.splitlines() if line.startswith("# note: relative number of samples")]
    golden.check("balance_note.txt", "\n".join(notes))
    directory.write("summary.json", make.summary(run_id="slow", steps=9, steady_steps=6))
    refused = dry_run("--balance", "slow", "--", "train.py").exception
    golden.check_errors("refused_speeds", {"--balance slow": refused})
