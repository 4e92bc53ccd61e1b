"""The fault table of docs/explanation/faults.md, row by row: what happens, what is said, and that nothing is left.

Rows that other files have: test_launch_faults.py (kills, a closed terminal), test_stall.py (hangs), test_lifecycle.py
(a killed controller that is replaced), test_restart.py (a full disk of a node), test_troubles.py (one of the
controller).
"""

from __future__ import annotations

import hashlib
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from multinode.lab.cluster import ns_command, require_lab
from multinode.lab.state import Lab, node_processes
from tests.equipment.faults import LinkDown
from tests.lab.faulting import faults
from tests.lab.launching import (
    SCRIPT,
    Command,
    agents,
    assert_no_agents,
    assert_succeeded,
    command_line,
    kill,
    listener,
    processes_of,
    wait_for,
)
from tests.lab.supervised import (
    LAUNCH,
    TRAIN,
    GoFile,
    expect_all,
    lines,
    parent,
    read_document,
    wait_for_more,
    wait_said,
)

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.usefixtures("lab")]

OPTIONS = (*LAUNCH, "--grace-period", "2")
COUNT = ("--", TRAIN, "--lines")
TORCH = (
    "launch",
    "--hosts",
    "lab",
    "--json",
    "--grace-period",
    "2",
    "--workers-per-node",
    "1",
    "--",
    SCRIPT,
    "--steps",
)


def script(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def started(command: Command) -> str:
    """The run's id, once every rank has said something."""
    run_id = command.run_id()
    wait_for(lambda: len(lines(command, run_id)) == 4)
    return run_id


def end_well(command: Command, run_id: str, go_file: GoFile, controller: subprocess.Popen[str]) -> None:
    """Have the run end once more of node 1 has come home; not a line of it was lost."""
    wait_for_more(command, run_id)
    go_file.end()
    assert_succeeded(read_document(controller))
    expect_all(command, run_id)


def test_supervisor_and_sentinel_killed_at_once(command: Command) -> None:
    with command.running(*OPTIONS, *COUNT) as controller:
        run_id = started(command)
        launcher = min(pid for pid in processes_of(run_id) if "torch.distributed.run" in command_line(pid))
        supervisor = parent(launcher)
        sentinel = parent(supervisor)
        assert {supervisor, sentinel} <= set(agents())
        kill(sentinel)
        kill(supervisor)
        ended = read_document(controller)
    assert (ended["status"], controller.returncode) == ("failed", 1)
    assert "supervisor" in ended["first_failure"]["message"]
    assert not processes_of(run_id)


def test_a_connection_that_falls_silent_and_one_that_is_cut_are_made_anew_without_a_gap(
    command: Command, go_file: GoFile
) -> None:
    with command.running(*OPTIONS, *COUNT, *go_file.argument) as controller:
        run_id = started(command)
        with faults(LinkDown(node="node1", ifname="eth0")):
            wait_said(controller, "node1 contact lost at ")
        wait_for_more(command, run_id)
        for pid in _children(require_lab().nodes[1].sshd.pid):
            kill(pid)
        end_well(command, run_id, go_file, controller)


def test_the_training_link_goes_for_a_while_and_comes_back(command: Command, go_file: GoFile) -> None:
    with command.running(*OPTIONS, *COUNT, *go_file.argument) as controller:
        run_id = started(command)
        with faults(LinkDown(node="node1")):
            # What the fault lasts, and the run with it stands still.
            time.sleep(1)
            before = lines(command, run_id)
            time.sleep(4)
            assert lines(command, run_id) == before
        end_well(command, run_id, go_file, controller)


@pytest.mark.thorough
def test_gloo_bridges_twenty_seconds_without_the_training_link(command: Command) -> None:
    with command.running(*TORCH, "3000") as controller:
        run_id = command.run_id()
        wait_for(lambda: command.steps(0) > 3)
        with faults(LinkDown(node="node1")):
            time.sleep(20)
        ended = read_document(controller)
    assert (ended["status"], ended["summary"]["steps"]) == ("succeeded", 3000)
    assert not processes_of(run_id)


@pytest.mark.parametrize(
    ("stall_s", "launch"),
    [
        pytest.param("6", (*OPTIONS, *COUNT), id="stand-in"),
        pytest.param("20", (*TORCH, "1000000"), id="torch", marks=pytest.mark.thorough),
    ],
)
def test_a_training_link_that_goes_for_good_is_told_and_ended_by_the_stall_clock(
    command: Command, stall_s: str, launch: tuple[str, ...]
) -> None:
    verb, *options = launch
    with command.running(verb, "--hang-timeout", stall_s, "--on-hang", "stop", *options) as controller:
        run_id = command.run_id()
        wait_for(lambda: command.steps(0) > 3)
        with faults(LinkDown(node="node1")):
            ended = read_document(controller)
            assert not processes_of(run_id)
    assert (ended["status"], controller.returncode) == ("failed", 1)
    failure = ended["first_failure"]
    assert (failure["node"], failure["kind"], failure["message"]) == ("node1", "hardware", "ens1f0 lost its link")
    assert failure["consequences"]
    assert ended["stalls"]


def test_a_master_port_that_is_taken_after_the_check(command: Command, lab: Lab) -> None:
    with listener(lab.nodes[0], 29500):
        code, ended = command.code_and_document(*OPTIONS, "--master-port", "29500", *COUNT)
    assert (code, ended["status"]) == (1, "failed")
    assert (ended["first_failure"]["node"], ended["first_failure"]["kind"]) == ("node0", "connection")


def test_ctrl_c_kills_a_worker_that_ignores_term_after_the_grace(command: Command) -> None:
    with command.running(*OPTIONS, *COUNT, "--ignore-term") as controller:
        run_id = started(command)
        controller.send_signal(signal.SIGINT)
        ended = read_document(controller)
    assert (ended["status"], controller.returncode) == ("stopped", 130)
    assert [node["status"]["processes_left"] for node in ended["nodes"]] == [0, 0]
    assert not processes_of(run_id)
    assert_no_agents()


def test_a_burst_of_a_hundred_megabytes_of_log(command: Command, shared_dir: Path) -> None:
    # One worker on node 0 writes; what came home is compared by its hash, and the controller stays small.
    burst = """
import hashlib, os
line = b"%09d " + b"x" * 89 + b"\\n"
digest = hashlib.sha256()
if os.environ["RANK"] == "0":
    for start in range(0, 1_000_000, 1000):
        data = b"".join(line % number for number in range(start, start + 1000))
        digest.update(data)
        while data:
            data = data[os.write(1, data):]
    open("DIGEST", "w").write(digest.hexdigest())
""".replace("DIGEST", f"{shared_dir}/digest")
    done = command.run(*OPTIONS, "--workers-per-node", "1", "--", script(shared_dir, "burst.py", burst))
    assert done.returncode == 0, done.stdout
    (log,) = command.runs.glob("*/logs/node-0.log")
    ours = b"".join(line for line in log.read_bytes().splitlines(keepends=True) if line[9:11] == b" x")
    cat = [*ns_command(require_lab().nodes[0]), "cat", f"{shared_dir}/digest"]
    there = subprocess.run(cat, capture_output=True, text=True, check=True).stdout
    assert len(ours) == 100_000_000
    assert hashlib.sha256(ours).hexdigest() == there


def test_four_launches_and_stops_leak_nothing(command: Command) -> None:
    def left() -> list[int]:
        """Open files of each node's sshd and first process, and its processes."""
        nodes = require_lab().nodes
        pids = [pid for node in nodes for pid in (node.sshd.pid, node.init.pid)]
        files = [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids]
        return files + [len(node_processes(node)) for node in nodes]

    def settled() -> list[int]:
        """Once it does not change for a second: what the test before left may be on its way out."""
        now = left()
        time.sleep(1)
        return now if now == left() else []

    temporary = _temporary()
    before = wait_for(settled)
    for _ in range(2):
        code, run = command.code_and_document(*OPTIONS, "--detach", *COUNT)
        assert (code, run["status"]) == (0, "running")
        code, run = command.code_and_document("stop", run["run_id"], "--grace-period", "0", "--json")
        assert (code, run["status"]) == (0, "stopped")
        code, run = command.code_and_document(*OPTIONS, *COUNT, "--steps", "2")
        assert (code, run["status"]) == (0, "succeeded")
    wait_for(
        lambda: all(now <= then for now, then in zip(left(), before, strict=True)),
        state=lambda: (before, left(), _on_nodes()),
    )
    assert_no_agents()
    assert _temporary() == temporary


def _on_nodes() -> list[str]:
    return [command_line(pid) for node in require_lab().nodes for pid in node_processes(node)]


def _temporary() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).iterdir() if "multinode" in path.name}


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
