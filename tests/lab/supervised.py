"""Launches whose workers are Python without torch (stand_in/), for tests of supervision: quick to start and to end."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.launching import DEADLINE_S, Command, agents, processes_of, wait_for

STAND_IN = Path(__file__).parent / "stand_in"
TRAIN = str(STAND_IN / "train.py")
# What the checks find has tests of its own.
LAUNCH = ("launch", "--hosts", "lab", "--json", "--no-check", "--env", f"PYTHONPATH={STAND_IN}")


class GoFile:
    """A file that nodes see: a training with `--until` it ends when it is told to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text("")

    def end(self) -> None:
        """Have the training end well. In place: a node would not see another file of that name."""
        self.path.write_text("end")


@pytest.fixture
def go_file(shared_dir: Path) -> GoFile:
    return GoFile(shared_dir / "until")


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    """The command with a run directory of its own; what still runs is stopped, and nothing may be left anywhere."""
    running = Command(tmp_path / "runs")
    yield running
    for path in running.runs.glob("*/run.json"):
        run_id = path.parent.name
        if processes_of(run_id):
            running.run("stop", run_id, "--grace", "0")
    assert_nothing_left(running)


def assert_nothing_left(command: Command) -> None:
    """Nothing of any run is left on any node, now or in a moment."""
    runs = [path.parent.name for path in command.runs.glob("*/run.json")]
    wait_for(lambda: not agents() and not any(map(processes_of, runs)))


def read_document(controller: subprocess.Popen[str]) -> dict[str, Any]:
    """What a controller in the background printed when it ended."""
    return document_in(controller.communicate(timeout=DEADLINE_S)[0])


def document_in(printed: str) -> dict[str, Any]:
    """The document after the messages."""
    found: dict[str, Any] = json.loads(printed[printed.index("{\n") :])
    return found


def rank_variable(pid: int) -> int | None:
    """The rank of a worker; None of any other process."""
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return next((int(one.removeprefix("RANK=")) for one in variables if one.startswith("RANK=")), None)


def worker(run_id: str, rank: int) -> int:
    """The process of a rank."""
    (pid,) = (pid for pid in processes_of(run_id) if rank_variable(pid) == rank)
    return pid


def parent(pid: int) -> int:
    """Its parent's process id."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
