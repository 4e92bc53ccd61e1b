"""Launches whose workers are Python without torch (stand_in/), for tests of supervision: quick to start and to end."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.lab.launching import DEADLINE_S, RUN_DEADLINE_S, Command, processes_of, wait_for

STAND_IN = Path(__file__).parent / "stand_in"
TRAIN = str(STAND_IN / "train.py")
# Workers have the torch that is installed; what starts them on each node need not.
REAL_TORCH = ("--env", f"PYTHONPATH={STAND_IN}", "--env", "REAL_TORCH=1")
# What the checks find has tests of its own.
LAUNCH = ("launch", "--hosts", "lab", "--json", "--no-check", "--env", f"PYTHONPATH={STAND_IN}")
LINE = re.compile(rb"rank (\d+) line (\d+) end\n")


class GoFile:
    """A file that nodes see: a training with `--until` it ends when it is told to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.argument = ("--until", str(path))
        path.write_text("")

    def end(self) -> None:
        """Have the training end well. In place: a node would not see another file of that name."""
        self.path.write_text("end")


def read_document(controller: subprocess.Popen[str]) -> dict[str, Any]:
    """What a controller in the background printed when it ended."""
    return document_in(controller.communicate(timeout=DEADLINE_S)[0])


def document_in(printed: str) -> dict[str, Any]:
    """The document after the messages."""
    found: dict[str, Any] = json.loads(printed[printed.index("{\n") :])
    return found


def wait_said(controller: subprocess.Popen[str], text: str) -> None:
    """Until a controller in the background has said this."""
    assert controller.stdout is not None
    end = time.monotonic() + RUN_DEADLINE_S
    for line in controller.stdout:
        if text in line:
            return
        assert time.monotonic() < end, f"it did not say in time: {text}"
    pytest.fail(f"it ended and did not say: {text}")


def lines(command: Command, run_id: str) -> dict[int, list[int]]:
    """Numbers of the lines that came home, by rank, in their order."""
    found: dict[int, list[int]] = {}
    for path in sorted((command.runs / run_id).glob("logs/*")):
        for rank, number in LINE.findall(path.read_bytes()):
            found.setdefault(int(rank), []).append(int(number))
    return found


def wait_for_more(command: Command, run_id: str) -> None:
    """Until more of the last rank has come home."""
    before = len(lines(command, run_id).get(3, []))
    wait_for(lambda: len(lines(command, run_id).get(3, [])) > before + 10)


def expect_all(command: Command, run_id: str) -> int:
    """Every line of every rank came home, once and in order; how many each rank wrote."""
    found = lines(command, run_id)
    count = len(found[0])
    assert found == {rank: list(range(count)) for rank in range(4)}
    return count


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
