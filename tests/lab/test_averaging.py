"""Less communication on the lab: local SGD and PowerSGD of a plain loop, DiLoCo of LLaMA-Factory, and their figures."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from multinode.lab.cluster import ns_command
from multinode.lab.state import Lab
from tests.lab.launching import Command
from tests.lab.supervised import REAL_TORCH

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.usefixtures("module_lab")]

TRAIN = str(Path(__file__).with_name("train_mlp.py"))
# Of train_mlp.py: 64 inputs, four layers of this width, one output.
WIDTH, DEPTH = 512, 4
PARAMETERS = 64 * WIDTH + WIDTH + DEPTH * (WIDTH * WIDTH + WIDTH) + WIDTH + 1
SHAPE = ("--steps", "24", "--width", str(WIDTH), "--depth", str(DEPTH), "--batch", "8")


def summary_of(command: Command, *arguments: str) -> dict[str, Any]:
    """The summary of a run that went well."""
    done = command.run("launch", "--hosts", "lab", "--no-check", "--json", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    summary: dict[str, Any] = command.document("show", "last", "--json")["summary"]
    return summary


def test_local_sgd_of_two_workers_a_node_sends_a_part_and_ends_equal(tmp_path: Path) -> None:
    command = Command(tmp_path / "runs")
    levers = ("--average", "local:4:fp16", "--workers-per-node", "2")
    found = summary_of(command, *REAL_TORCH, *levers, "--", TRAIN, *SHAPE)
    assert found["strategy"] == "local SGD: DDP inside each node, 2 nodes averaged every 4 steps"
    rounds = found["rounds"]
    # From the first one after the warm-up on.
    assert (rounds["every"], rounds["dtype"], rounds["rounds"], rounds["early"]) == (4, "fp16", 4, 0)
    assert rounds["size_bytes"] == 2 * PARAMETERS
    assert rounds["drift"] > 0
    # One worker of each node sends, once in four steps, in two bytes; and what is small beside it.
    sent = found["comm"]["bytes_per_step"]
    expected = pytest.approx(2 * PARAMETERS / 4, rel=0.03)
    assert sent["expected"] == expected
    assert sent["nic"] == pytest.approx(sent["expected"], rel=0.05)
    assert not [each for each in found["comm"]["findings"] if each["code"].startswith("unexplained")]
    log = command.run("logs", "last").stdout
    sums = dict(re.findall(r"rank (\d) of 4: parameters sum to (-?\d+\.\d+)", log))
    assert sorted(sums) == ["0", "1", "2", "3"]
    assert len(set(sums.values())) == 1
    shown = " ".join(command.run("show", "last", "--details").stdout.split())
    assert "local SGD: DDP inside each node, 2 nodes averaged every 4 steps" in shown
    assert "4 measured; each averages" in shown


def test_power_sgd_sends_two_thin_matrices_and_keeps_workers_equal(tmp_path: Path) -> None:
    command = Command(tmp_path / "runs")
    lever = ("--grad-compress", "powersgd:4:3", "--workers-per-node", "1")
    found = summary_of(command, *REAL_TORCH, *lever, "--", TRAIN, *SHAPE)
    assert found["strategy"] == "DDP"
    # Of 64 to 512, four times 512 to 512, whole vectors: biases, and the last layer of one output.
    thin = 4 * (4 * (64 + WIDTH) + DEPTH * 4 * 2 * WIDTH + WIDTH + DEPTH * WIDTH + WIDTH + 1)
    sent = found["comm"]["bytes_per_step"]
    assert sent["calls"] == pytest.approx(thin, rel=0.01)
    assert sent["expected"] == sent["calls"]
    # A slow step has time for more acknowledgements.
    assert sent["nic"] == pytest.approx(thin, rel=0.1)
    sums = dict(re.findall(r"rank (\d) of 2: parameters sum to (-?\d+\.\d+)", command.run("logs", "last").stdout))
    assert len(sums) == 2
    assert len(set(sums.values())) == 1


@pytest.mark.usefixtures("tiny")
def test_diloco_of_llamafactory_closes_a_round_before_each_checkpoint(
    module_lab: Lab, tmp_path: Path, shared_dir: Path
) -> None:
    command = Command(tmp_path / "runs")
    output = shared_dir / "diloco"
    settings = {
        "max_steps": "16",
        "finetuning_type": "lora",
        "save_strategy": "steps",
        "save_steps": "10",
        "output_dir": str(output),
    }
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    lever = ("--average", "diloco:4:0.7:0.9", "--workers-per-node", "1", "--engine", "torchrun")
    found = summary_of(command, *REAL_TORCH, *lever, "configs/tiny_sft.yaml", *words)
    assert found["strategy"] == "DiLoCo: DDP inside each node, 2 nodes averaged every 4 steps"
    assert (found["rounds"]["outer_lr"], found["rounds"]["momentum"]) == (0.7, 0.9)
    paths = list(command.runs.glob("*/samples/*/*.jsonl"))
    records = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    for rank in (0, 1):
        ended = [(one["steps"], one["reason"]) for one in records if one["kind"] == "sync" and one["rank"] == rank]
        assert ended == [(4, "round"), (4, "round"), (2, "checkpoint"), (4, "round"), (2, "checkpoint")]
    assert found["last_loss"] < found["first_loss"]
    for rank, node in enumerate(module_lab.nodes):
        listed = subprocess.run([*ns_command(node), "ls", f"{output}/checkpoint-10"], capture_output=True, check=True)
        assert f"multinode_sync_{rank}.pt" in listed.stdout.decode().split()
