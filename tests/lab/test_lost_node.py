"""A node that vanishes in a training is the first failure, what its peers raise are consequences, and all is ended."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from multinode.records.log import clean_log
from tests.equipment.faults import Fault, LinkDown, NodeState
from tests.lab.launching import DEADLINE_S, MULTINODE, REPOSITORY, Command, processes_of, wait_for
from tests.lab.supervised import STAND_IN, TRAIN

pytestmark = [pytest.mark.lab]

LEASE_S = 5.0
# The lease has run out and the grace period of 2 s is over long before.
OVER_S = LEASE_S + 25.0


class Terminal:
    """A wide terminal, and what it was sent."""

    def __init__(self) -> None:
        self._ours, self.theirs = os.openpty()
        self.sent = bytearray()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def close(self) -> str:
        """The lines that were drawn, the live table's as often as it was."""
        os.close(self.theirs)
        self._thread.join(DEADLINE_S)
        os.close(self._ours)
        return clean_log(self.sent.decode(errors="replace").replace("\r\n", "\n"))

    def _read(self) -> None:
        while True:
            try:
                self.sent += os.read(self._ours, 1 << 16)
            except OSError:
                return


@contextmanager
def on_terminal(command: Command, terminal: Terminal, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    environ = os.environ | {"MULTINODE_RUNS": str(command.runs), "TERM": "xterm", "COLUMNS": "180", "LINES": "50"}
    environ.pop("NO_COLOR", None)
    controller = subprocess.Popen(
        [*MULTINODE, *arguments],
        cwd=REPOSITORY,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=terminal.theirs,
        stderr=terminal.theirs,
    )
    try:
        yield controller
    finally:
        controller.kill()
        controller.wait(DEADLINE_S)


@pytest.mark.parametrize(
    ("vanish", "peer_says"),
    [
        (NodeState(node="node1", how="kill"), "Timed out waiting 10000ms for recv operation to complete"),
        (LinkDown(node="node1", ifname="eth0"), "Connection closed by peer"),
    ],
    ids=["power", "management-link"],
)
@pytest.mark.usefixtures("lab")
def test_a_node_that_vanishes_is_the_first_failure_and_nothing_is_left_on_it_or_its_peers(
    vanish: Fault, peer_says: str, fault: Callable[[Fault], None], command: Command
) -> None:
    options = ("--workers-per-node", "1", "--lease", f"{LEASE_S}", "--grace-period", "2", "--no-check")
    variables = ("--env", f"PYTHONPATH={STAND_IN}", "--env", "COLLECTIVE_TIMEOUT_S=10")
    terminal = Terminal()
    with on_terminal(command, terminal, "launch", "--hosts", "lab", *options, *variables, "--", TRAIN) as controller:
        run_id = command.run_id()
        wait_for(lambda: command.steps(1) > 5)
        assert processes_of(run_id, 1)
        vanished_s = time.time()
        fault(vanish)
        # Nobody can reach it: it ends the training by itself.
        wait_for(lambda: not processes_of(run_id, 1), deadline_s=OVER_S)
        code = controller.wait(DEADLINE_S)
    said = terminal.close()
    # The survivor was seen to by the controller, before it ended.
    assert processes_of(run_id, 0) == []
    assert code == 3

    drawn = [line for line in said.split("\n") if line.startswith("node1 ")]
    assert any("running" in line for line in drawn), said
    assert any("lost at " in line for line in drawn), said
    told = said[said.index("error: ") :]
    assert told.startswith("error: node1: contact was lost and not restored"), told
    raised = "node0: rank 0 raised RuntimeError: [gloo/transport/tcp/stand_in] " + peer_says
    assert told.count("error: ") == 1
    assert f"Then {raised}" in " ".join(told.split())

    document = command.document("attach", run_id, "--json")
    failure = document["first_failure"]
    assert (document["status"], failure["node"], failure["kind"]) == ("lost", "node1", "node_lost")
    assert failure["consequences"] == [raised]
    assert abs(failure["time_s"] - vanished_s) < 5
    assert [node["state"] for node in document["nodes"]] == ["ended", "lost"]
    assert document["nodes"][0]["status"]["processes_left"] == 0
    assert document["nodes"][1]["lost_s"] == failure["time_s"]
    assert document["summary"]["steps"] > 0

    # Lines are as wide as a terminal.
    shown = " ".join(command.run("show", run_id).stdout.split())
    lost, consequence = (shown.index(text) for text in ("node1: contact was lost", raised))
    assert lost < consequence
