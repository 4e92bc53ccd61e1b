"""What ends a training other than its own end: on each, nothing of the run is left on any node."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.lab.launching import SCRIPT, Command, agents, assert_no_agents, command_line, kill, processes_of, wait_for
from tests.lab.supervised import LAUNCH, TRAIN, read_document, worker

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.usefixtures("lab")]

OPTIONS = ("--workers-per-node", "1", "--lease", "6", "--grace-period", "3")


class Training:
    """A training in full swing on both nodes."""

    def __init__(self, command: Command, controller: Any) -> None:
        self.controller = controller
        self.run_id = command.run_id()
        wait_for(lambda: command.steps(0) > 3 and command.steps(1) > 3)

    def launchers(self, part: str = "torch.distributed.run") -> list[int]:
        """Launchers of the run whose argv has this in it."""
        return [pid for pid in processes_of(self.run_id) if part in command_line(pid)]

    def ended(self) -> dict[str, Any]:
        """What the controller printed when it ended; by then, nothing is left."""
        document = read_document(self.controller)
        assert not processes_of(self.run_id)
        assert_no_agents()
        return document


@contextmanager
def training_of(command: Command, *job: str) -> Iterator[Training]:
    with command.running(*job) as controller:
        yield Training(command, controller)


@pytest.fixture
def training(command: Command) -> Iterator[Training]:
    with training_of(command, *LAUNCH, *OPTIONS, "--", TRAIN) as training:
        yield training


def test_a_closed_terminal_leaves_nothing(training: Training) -> None:
    training.controller.send_signal(signal.SIGHUP)
    assert training.ended()["status"] == "stopped"


def test_kill_9_of_the_controller_ends_the_run_when_its_lease_does(training: Training) -> None:
    assert processes_of(training.run_id)
    kill(training.controller.pid)
    wait_for(lambda: not processes_of(training.run_id) and not agents(), deadline_s=60)


def test_kill_9_of_torchrun_takes_its_workers_and_the_other_node_along(training: Training) -> None:
    (torchrun,) = training.launchers("--node-rank=1")
    kill(torchrun)
    document = training.ended()
    assert (document["status"], training.controller.returncode) == ("failed", 1)
    failure = document["first_failure"]
    assert (failure["node"], failure["signal"]) == ("node1", "SIGKILL")


def test_kill_9_of_one_worker_names_its_node(command: Command) -> None:
    """Of torchrun's own workers; tests/lab/test_restart.py kills those of the stand-in, and a supervisor."""
    torchrun = ("launch", "--hosts", "lab", "--json", *OPTIONS, "--", SCRIPT, "--steps", "1000000")
    with training_of(command, *torchrun) as training:
        kill(worker(training.run_id, 1))
        document = training.ended()
    assert document["status"] == "failed"
    failure = document["first_failure"]
    assert (failure["node"], failure["rank"], failure["signal"]) == ("node1", 1, "SIGKILL")
