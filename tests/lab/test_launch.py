"""`multinode launch` on the lab: real sshd, real torchrun, real LLaMA-Factory."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from multinode.lab.spec import Lab
from tests.lab.launching import (
    DEADLINE_S,
    REPOSITORY,
    SCRIPT,
    Command,
    agents,
    assert_succeeded,
    command_line,
    processes_of,
    wait_for,
)

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.timeout(300), pytest.mark.usefixtures("lab")]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path / "runs")


def test_a_llamafactory_training_runs_on_both_nodes(command: Command) -> None:
    make_tiny = [sys.executable, "scripts/make_tiny.py"]
    subprocess.run(make_tiny, cwd=REPOSITORY, check=True, capture_output=True, timeout=DEADLINE_S)
    document = command.document("launch", "--hosts", "lab", "configs/tiny_sft.yaml", "--set", "max_steps=16", "--json")
    assert document["schema"] == "multinode.launch/1"
    assert_succeeded(document)
    assert [(node["name"], node["node_rank"], node["exit_code"]) for node in document["nodes"]] == [
        ("node0", 0, 0),
        ("node1", 1, 0),
    ]
    assert document["world_size"] == 4
    assert document["first_failure"] is None
    assert document["steps"] == 16
    assert document["last_loss"] < document["first_loss"] - 1
    assert 0 < document["step_time_ms"]["median"] <= document["step_time_ms"]["p95"]
    # The Trainer counts from its own begin to its own end; over the same steps we must see the same speed.
    assert document["all_steps_samples_per_s"] == pytest.approx(document["trainer_samples_per_s"], rel=0.02)
    assert not processes_of(document["run_id"])
    assert not agents()


def test_a_plain_script_runs_with_one_worker_a_node(command: Command) -> None:
    document = command.document(
        "launch", "--hosts", "lab", "--workers-per-node", "1", "--json", "--", SCRIPT, "--steps", "12"
    )
    assert_succeeded(document)
    assert document["world_size"] == 2
    assert document["steps"] == 12
    assert document["step_time_ms"]["median"] > 0
    # What DDP is given tells the samples; there are no tokens in them.
    rate = document["samples_per_s"] * document["step_time_ms"]["median"] / 1000
    assert rate == pytest.approx(2 * 16, rel=0.5)
    assert document["strategy"] == "DDP"
    assert "tokens" in document["missing"]["tokens_per_s"]
    log = (command.runs / document["run_id"] / "logs" / "node-0.log").read_text()
    assert "step 12 of 12" in log
    assert not agents()


def test_the_run_directory_has_every_noun(command: Command) -> None:
    done = command.run("launch", "--hosts", "lab", "--workers-per-node", "1", "--", SCRIPT, "--steps", "3")
    assert done.returncode == 0, done.stderr
    directory = command.runs / command.run_id()
    names = {path.name for path in directory.iterdir()}
    assert names >= {
        "hostfile.txt",
        "cluster.json",
        "facts.json",
        "findings.json",
        "plan.json",
        "run.json",
        "summary.json",
    }
    assert directory.stat().st_mode & 0o077 == 0
    plan = json.loads((directory / "plan.json").read_text())
    assert [node["ifname"] for node in plan["nodes"]] == ["ens1f0", "ens1f0"]
    assert [node["command"]["env"]["NCCL_SOCKET_IFNAME"] for node in plan["nodes"]] == ["=ens1f0", "=ens1f0"]
    logs = command.document("logs", "last", "--json")
    assert [node["name"] for node in logs["nodes"]] == ["node0", "node1"]
    assert "step 3 of 3" in logs["nodes"][0]["log"]
    shown = command.document("show", "last", "--json")
    assert (shown["run"]["status"], shown["summary"]["steps"]) == ("succeeded", 3)
    assert '"kind": "nic"' in (directory / "samples" / "node-1" / "node.jsonl").read_text()
    assert '"kind": "step"' in (directory / "samples" / "node-1" / "rank-1.jsonl").read_text()


def test_the_first_failure_names_node_and_rank_and_the_others_are_stopped(command: Command) -> None:
    document = command.document(
        "launch", "--hosts", "lab", "--workers-per-node", "1", "--json", "--",
        SCRIPT, "--steps", "100000", "--fail-at", "15", "--fail-rank", "1",
    )  # fmt: skip
    assert document["status"] == "failed"
    failure = document["first_failure"]
    assert (failure["node"], failure["rank"]) == ("node1", 1)
    assert "RuntimeError: asked to fail at step 15" in failure["message"]
    assert "asked to fail" in failure["log_tail"]
    assert not processes_of(document["run_id"])
    assert not agents()


def test_a_failed_run_exits_1_and_shows_the_workers_own_traceback_first(command: Command) -> None:
    done = command.run(
        "launch", "--hosts", "lab", "--workers-per-node", "1", "--", SCRIPT, "--steps", "100000", "--fail-at", "3"
    )
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    error = next(
        index for index, line in enumerate(lines) if line.startswith("error: node1: rank 1 raised RuntimeError")
    )
    assert any("node1 | Traceback" in line for line in lines[:error])
    assert "multinode/" not in "".join(line for line in lines[:error] if 'File "' in line)


def test_a_secret_reaches_the_worker_and_nothing_that_others_read(lab: Lab, command: Command, tmp_path: Path) -> None:
    secret = "s3cr3t-of-this-test"
    hostfile = tmp_path / "hosts"
    text = Path(lab.hostfile).read_text()
    hostfile.write_text(text.replace(" slots=", f" env.HF_TOKEN={secret} slots="))
    with command.running(
        "launch", "--hosts", str(hostfile), "--workers-per-node", "1", "--", SCRIPT, "--steps", "100000"
    ) as process:
        run_id = command.run_id()
        wait_for(lambda: command.steps(1) > 3)
        workers = [pid for pid in processes_of(run_id) if SCRIPT in command_line(pid)]
        assert all(f"HF_TOKEN={secret}".encode() in Path(f"/proc/{pid}/environ").read_bytes() for pid in workers)
        assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if secret in _read(path)]
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=DEADLINE_S)
    assert secret not in printed
    # The hostfile is kept as the user wrote it, for the user alone; everything else must not have it.
    kept = [path for path in command.runs.rglob("*") if path.is_file() and path.name != "hostfile.txt"]
    assert kept
    assert not [path for path in kept if secret in _read(path)]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
