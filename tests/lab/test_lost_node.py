"""A node that vanishes while a job runs: it is the first failure, and what its peers raise are consequences."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from multinode.lab.faults import Fault, LinkDown, NodeState
from tests.lab.launching import DEADLINE_S, Command, wait_for

pytestmark = [pytest.mark.lab]

# Two workers that hear from each other ten times per second, and fail as gloo does when they no longer do.
_PAIR = """\
import os, socket, time
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["NODE_RANK"] == "0":
    peer = socket.create_server(place).accept()[0]
else:
    while True:
        try:
            peer = socket.create_connection(place)
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
peer.settimeout(8)
print("paired", flush=True)
try:
    while True:
        peer.sendall(b".")
        if not peer.recv(1):
            raise ConnectionError("the other end has closed")
        time.sleep(0.1)
except OSError as error:
    raise RuntimeError(f"[gloo/transport/tcp/pair.cc:534] Connection closed by peer: {error}") from None
"""


@pytest.mark.parametrize(
    "vanish",
    [NodeState(node="node1", how="kill"), LinkDown(node="node1", ifname="eth0")],
    ids=["power", "management-link"],
)
@pytest.mark.usefixtures("lab")
def test_a_node_that_vanishes_is_the_first_failure_and_its_peers_errors_are_consequences(
    vanish: Fault, fault: Callable[[Fault], None], shared_dir: Path, command: Command
) -> None:
    script = shared_dir / "pair.py"
    script.write_text(_PAIR)
    options = (
        "--workers-per-node",
        "1",
        "--lease",
        "5",
        "--grace-period",
        "2",
        "--no-check",
        "--engine",
        "exec",
        "--json",
    )
    with command.running("launch", "--hosts", "lab", *options, "--", "python3", str(script)) as controller:
        run_id = command.run_id()
        logs = command.runs / run_id / "logs"
        wait_for(lambda: [path for path in logs.glob("*.log") if "paired" in path.read_text()][1:])
        vanished_s = time.time()
        fault(vanish)
        printed, _ = controller.communicate(timeout=DEADLINE_S)
    document = json.loads(printed[printed.index("{\n") :])
    failure = document["first_failure"]
    assert (document["status"], controller.returncode) == ("lost", 3)
    assert (failure["node"], failure["kind"]) == ("node1", "node_lost")
    assert [node["state"] for node in document["nodes"]] == ["ended", "lost"]
    assert abs(failure["time_s"] - vanished_s) < 5
    assert document["nodes"][1]["lost_s"] == failure["time_s"]
    # A program that is no worker of torchrun's records no exception of its own; the first failure was this one before.
    consequence = "node0: the job ended with exit code 1"
    assert failure["consequences"] == [consequence]
    assert "Connection closed by peer" in (logs / "node-0.log").read_text()
    shown = command.run("show", run_id).stdout
    assert "node1: contact was lost" in shown
    assert consequence in shown
    assert document["nodes"][0]["processes_left"] == 0
