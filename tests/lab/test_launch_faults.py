"""What ends a training other than its own end: on each, nothing of the run is left on any node."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.launching import DEADLINE_S, SCRIPT, Command, agents, command_line, kill, processes_of, wait_for

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.timeout(300), pytest.mark.usefixtures("lab")]

LAUNCH = ("launch", "--hosts", "lab", "--workers-per-node", "1", "--lease", "6", "--grace", "3", "--json")
JOB = ("--", SCRIPT, "--steps", "1000000")


class Training:
    """A training in full swing on both nodes."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self._context = command.running(*LAUNCH, *JOB)
        self.controller = self._context.__enter__()
        self.run_id = command.run_id()
        wait_for(lambda: command.steps(0) > 3 and command.steps(1) > 3)

    def processes(self, part: str) -> list[int]:
        """Processes of the run whose argv has this in it."""
        return [pid for pid in processes_of(self.run_id) if part in command_line(pid)]

    def document(self) -> dict[str, object]:
        """What the controller printed when it ended."""
        printed, _ = self.controller.communicate(timeout=DEADLINE_S)
        document: dict[str, object] = json.loads(printed[printed.index("{\n") :])
        return document

    def close(self) -> None:
        """Let go of the controller, and do not leave the nodes to the next test."""
        self._context.__exit__(None, None, None)
        wait_for(lambda: not processes_of(self.run_id) and not agents())


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    running = Training(Command(tmp_path / "runs"))
    yield running
    running.close()


def test_ctrl_c_leaves_nothing_when_the_prompt_returns(training: Training) -> None:
    training.controller.send_signal(signal.SIGINT)
    document = training.document()
    assert not processes_of(training.run_id)
    assert not agents()
    assert training.controller.returncode == 130
    assert document["status"] == "stopped"


def test_a_closed_terminal_stops_the_run_too(training: Training) -> None:
    training.controller.send_signal(signal.SIGHUP)
    training.controller.wait(timeout=DEADLINE_S)
    assert not processes_of(training.run_id)
    assert not agents()


def test_kill_9_of_the_controller_ends_the_run_when_its_lease_does(training: Training) -> None:
    assert processes_of(training.run_id)
    kill(training.controller.pid)
    wait_for(lambda: not processes_of(training.run_id) and not agents(), deadline_s=60)


def test_kill_9_of_torchrun_takes_its_workers_and_the_other_node_along(training: Training) -> None:
    torchrun = [pid for pid in training.processes("torch.distributed.run") if "--node-rank=1" in command_line(pid)]
    kill(torchrun[0])
    document = training.document()
    assert not processes_of(training.run_id)
    assert not agents()
    assert document["status"] == "failed"
    assert training.controller.returncode == 1
    failure = document["first_failure"]
    assert isinstance(failure, dict)
    assert (failure["node"], failure["signal"]) == ("node1", "SIGKILL")


def test_kill_9_of_a_supervisor_takes_its_job_and_the_other_node_along(training: Training) -> None:
    supervisors = {_parent(pid) for pid in training.processes("torch.distributed.run")} & set(agents())
    assert len(supervisors) == 2
    kill(min(supervisors))
    document = training.document()
    assert not processes_of(training.run_id)
    assert not agents()
    assert document["status"] == "failed"
    failure = document["first_failure"]
    assert isinstance(failure, dict)
    assert "supervisor" in failure["message"]


def test_kill_9_of_one_worker_names_its_node(training: Training) -> None:
    workers = [pid for pid in training.processes(SCRIPT) if "torch.distributed.run" not in command_line(pid)]
    kill(max(workers))
    document = training.document()
    assert not processes_of(training.run_id)
    assert document["status"] == "failed"
    assert document["first_failure"] is not None


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
