"""Trainings that are launched with --restarts on the lab, and what a later attempt goes on from."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from multinode.lab.cluster import require_lab
from tests.lab.launching import RUN_DEADLINE_S, Command, wait_for
from tests.lab.supervised import STAND_IN

STEPS, EVERY = 200, 20
# In the id of a run; an attempt's has its number behind one more.
RUN_DASHES = 2
LAUNCH = ("launch", "--hosts", "lab", "--json", "--workers-per-node", "1", "--lease", "5", "--grace-period", "2")
# A real training, on nodes that are not checked.
TRAINED = ("--engine", "torchrun", "--env", "OMP_NUM_THREADS=1", "--no-check")
FSDP = ("--set", "fsdp=full_shard auto_wrap", "--set", "fsdp_config={version: 2}")
# Like REAL_TORCH, with workers that shard with FSDP on CPUs.
ON_CPU = ("--env", f"PYTHONPATH={STAND_IN}:{Path(__file__).with_name('sharded')}", "--env", "REAL_TORCH=1")
_STEP = re.compile(r'"step": (\d+)')


def training(output: Path | str, steps: int = STEPS, every: int = EVERY) -> tuple[str, ...]:
    changes = {"max_steps": steps, "save_strategy": "steps", "save_steps": every, "output_dir": output}
    return ("configs/tiny_sft.yaml", *(word for key, value in changes.items() for word in ("--set", f"{key}={value}")))


class Attempts:
    """A run with restarts, as it goes on.

    Args:
        command: it was started with.
    """

    def __init__(self, command: Command) -> None:
        self._command = command
        (whole,) = wait_for(lambda: [path for path in command.runs.glob("*") if path.name.count("-") == RUN_DASHES])
        self.run_id = whole.name

    def name(self, number: int) -> str:
        return f"{self.run_id}-{number}"

    def step(self, number: int, node_rank: int = 1) -> int:
        """The last step that a node's worker has recorded in an attempt."""
        files = (self._command.runs / self.name(number)).glob(f"samples/node-{node_rank}/*.jsonl")
        return max((int(step) for path in files for step in _STEP.findall(path.read_text())), default=0)

    def wait_until(self, number: int, step: int, node_rank: int = 1) -> None:
        wait_for(lambda: self.step(number, node_rank) >= step, deadline_s=RUN_DEADLINE_S)

    def status(self, number: int) -> str:
        path = self._command.runs / self.name(number) / "run.json"
        found: str = json.loads(path.read_text())["status"]
        return found


@contextlib.contextmanager
def launched(command: Command, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], Attempts]]:
    with command.running(*LAUNCH, *arguments) as controller:
        yield controller, Attempts(command)


def on_node(node: str, path: str) -> Path:
    """Where a node's file is seen from here."""
    return Path(f"/proc/{require_lab().node(node).init.pid}/root{path}")


def assert_resumed(attempt: dict[str, Any], before: dict[str, Any], every: int = EVERY) -> None:
    """An attempt went on from a checkpoint of the one before it, and what that lost is told."""
    assert attempt["checkpoint"] == f"checkpoint-{attempt['first_step']}", attempt
    assert attempt["first_step"] % every == 0
    assert before["first_step"] <= attempt["first_step"] <= before["last_step"]
    assert before["lost_steps"] == before["last_step"] - attempt["first_step"]
    # The last checkpoint may have been cut short; the one before it was not.
    assert before["lost_steps"] < 2 * every
    assert before["lost_s"] > 0


def losses(command: Command, run_id: str) -> dict[tuple[int, int], float]:
    """The loss that each rank recorded at each step of an attempt."""
    files = (command.runs / run_id).glob("samples/*/rank-*.jsonl")
    records = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    return {(one["rank"], one["step"]): one["loss"] for one in records if one["kind"] == "loss"}
