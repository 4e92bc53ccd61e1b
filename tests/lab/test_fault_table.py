"""The fault table of docs/explanation/faults.md, row by row: what happens, what is said, and that nothing is left.

Rows that other files have: test_launch_faults.py (kills, Ctrl-C, a closed terminal), test_stall.py (hangs),
test_lifecycle.py (a killed controller that is replaced).
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from multinode.lab.cluster import Lab, load_lab, ns_command
from multinode.lab.faults import Clock, DiskFull, Fault, LinkDown, NodeState, clear_faults, make_fault
from tests.lab.launching import (
    DEADLINE_S,
    SCRIPT,
    Command,
    agents,
    assert_succeeded,
    kill,
    listener,
    processes_of,
    wait_for,
)
from tests.lab.test_lifecycle import COUNTING, expect_all, lines

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.timeout(300), pytest.mark.usefixtures("lab")]

LAUNCH = ("launch", "--hosts", "lab", "--grace", "2", "--json")
ENDLESS = "100000"


@pytest.fixture
def scripts(shared_dir: Path) -> Path:
    (shared_dir / "counting.py").write_text(COUNTING)
    return shared_dir


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    running = Command(tmp_path / "runs")
    yield running
    for path in running.runs.glob("*/run.json"):
        wait_for(lambda path=path: not processes_of(path.parent.name))  # type: ignore[misc]  # a default binds it
    wait_for(lambda: not agents())


@contextmanager
def fault(made: Fault) -> Iterator[None]:
    lab = load_lab()
    assert lab is not None
    make_fault(lab, made)
    try:
        yield
    finally:
        clear_faults(lab)


def document(controller: subprocess.Popen[str]) -> dict[str, Any]:
    """What a controller in the background printed when it ended."""
    printed, _ = controller.communicate(timeout=DEADLINE_S)
    found: dict[str, Any] = json.loads(printed[printed.index("{\n") :])
    return found


def script(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def started(command: Command) -> str:
    """The run's id, once every rank has said something."""
    run_id = command.run_id()
    wait_for(lambda: len(lines(command, run_id)) == 4)
    return run_id


def test_supervisor_and_sentinel_killed_at_once(command: Command, scripts: Path) -> None:
    with command.running(*LAUNCH, "--", f"{scripts}/counting.py", ENDLESS, "0.1") as controller:
        run_id = started(command)
        torchrun = min(processes_of(run_id))
        supervisor = _parent(torchrun)
        sentinel = _parent(supervisor)
        assert {supervisor, sentinel} <= set(agents())
        kill(sentinel)
        kill(supervisor)
        ended = document(controller)
    assert (ended["status"], controller.returncode) == ("failed", 1)
    assert "supervisor" in ended["first_failure"]["message"]
    assert not processes_of(run_id)


def test_a_node_that_loses_its_power(command: Command, scripts: Path) -> None:
    with command.running(*LAUNCH, "--lease", "6", "--", f"{scripts}/counting.py", ENDLESS, "0.1") as controller:
        run_id = started(command)
        with fault(NodeState(node="node1", how="kill")):
            ended = document(controller)
    assert (ended["status"], controller.returncode) == ("lost", 3)
    assert ended["first_failure"]["node"] == "node1"
    assert [node["state"] for node in ended["nodes"]] == ["ended", "lost"]
    assert not processes_of(run_id)


def test_an_ssh_connection_that_is_cut_is_made_anew_without_a_gap(command: Command, scripts: Path, lab: Lab) -> None:
    with command.running(*LAUNCH, "--", f"{scripts}/counting.py", "150", "0.1") as controller:
        run_id = started(command)
        current = load_lab()
        assert current is not None
        for pid in _children(current.nodes[1].sshd.pid):
            kill(pid)
        ended = document(controller)
    assert (ended["status"], len(lab.nodes)) == ("succeeded", 2)
    expect_all(command, run_id, 150)


def test_no_way_to_a_node_for_half_a_minute(command: Command, scripts: Path) -> None:
    with command.running(*LAUNCH, "--", f"{scripts}/counting.py", "450", "0.1") as controller:
        run_id = started(command)
        with fault(LinkDown(node="node1", ifname="eth0")):
            time.sleep(30)
        ended = document(controller)
    assert_succeeded(ended)
    expect_all(command, run_id, 450)


def test_the_training_link_goes_for_twenty_seconds_and_comes_back(command: Command) -> None:
    with command.running(*LAUNCH, "--workers-per-node", "1", "--", SCRIPT, "--steps", "3000") as controller:
        run_id = command.run_id()
        wait_for(lambda: command.steps(0) > 3)
        with fault(LinkDown(node="node1")):
            time.sleep(20)
        ended = document(controller)
    assert (ended["status"], ended["steps"]) == ("succeeded", 3000)
    assert not processes_of(run_id)


def test_a_training_link_that_goes_for_good_is_told_and_ended_by_the_stall_clock(command: Command) -> None:
    stall = ("--stall", "20", "--on-stall", "stop")
    with command.running(*LAUNCH, *stall, "--workers-per-node", "1", "--", SCRIPT, "--steps", "1000000") as controller:
        run_id = command.run_id()
        wait_for(lambda: command.steps(0) > 3)
        with fault(LinkDown(node="node1")):
            ended = document(controller)
            assert not processes_of(run_id)
    assert (ended["status"], controller.returncode) == ("failed", 1)
    assert ended["first_failure"]["kind"] in {"hang", "connection", "timeout"}
    assert ended["stalls"]


def test_a_full_disk_on_a_node(command: Command, scripts: Path) -> None:
    with command.running(*LAUNCH, "--", f"{scripts}/counting.py", ENDLESS, "0.02") as controller:
        run_id = started(command)
        with fault(DiskFull(node="node1")):
            ended = document(controller)
    assert (ended["status"], controller.returncode) == ("failed", 1)
    assert (ended["first_failure"]["node"], ended["first_failure"]["kind"]) == ("node1", "disk_full")
    assert not processes_of(run_id)


def test_a_full_disk_on_the_controller(command: Command, scripts: Path, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(full)], check=True)
    try:
        small = Command(full / "runs")
        done = small.run(
            *LAUNCH, "--", script(scripts, "burst.py", "print('x' * 1_000_000)\nimport time; time.sleep(60)")
        )
        (run_id,) = [path.name for path in (full / "runs").iterdir()]
        assert done.returncode == 1
        assert "No space left" in done.stderr
        assert "df -h" in done.stderr
        wait_for(lambda: not processes_of(run_id) and not agents())
    finally:
        subprocess.run(["umount", str(full)], check=True)
    assert not list(command.runs.glob("*"))


def test_a_master_port_that_is_taken_after_the_check(command: Command, lab: Lab) -> None:
    with listener(lab.nodes[0], 29500):
        code, ended = command.code_and_document(*LAUNCH, "--no-check", "--", SCRIPT, "--steps", "3")
    assert (code, ended["status"]) == (1, "failed")
    assert (ended["first_failure"]["node"], ended["first_failure"]["kind"]) == ("node0", "connection")


def test_a_worker_that_ignores_term_is_killed_after_the_grace(command: Command, scripts: Path) -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + COUNTING
    with command.running(*LAUNCH, "--", script(scripts, "stubborn.py", stubborn), ENDLESS, "0.1") as controller:
        run_id = started(command)
        controller.send_signal(signal.SIGINT)
        ended = document(controller)
    assert (ended["status"], controller.returncode) == ("stopped", 130)
    assert [node["processes_left"] for node in ended["nodes"]] == [0, 0]
    assert not processes_of(run_id)


def test_a_second_ctrl_c_does_not_wait_for_the_grace(command: Command, scripts: Path) -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + COUNTING
    launch = ("launch", "--hosts", "lab", "--grace", "100", "--json")
    with command.running(*launch, "--", script(scripts, "stubborn.py", stubborn), ENDLESS, "0.1") as controller:
        run_id = started(command)
        began = time.monotonic()
        controller.send_signal(signal.SIGINT)
        time.sleep(1)
        controller.send_signal(signal.SIGINT)
        ended = document(controller)
        assert time.monotonic() - began < 60
    assert ended["status"] == "stopped"
    assert not processes_of(run_id)


def test_a_burst_of_a_hundred_megabytes_of_log(command: Command, scripts: Path) -> None:
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
""".replace("DIGEST", f"{scripts}/digest")
    argv = [sys.executable, "-m", "multinode", *LAUNCH, "--workers-per-node", "1"]
    environment = os.environ | {"MULTINODE_RUNS": str(command.runs)}
    process = subprocess.Popen(
        [*argv, "--", script(scripts, "burst.py", burst)], env=environment, stdout=subprocess.PIPE
    )
    printed, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, printed
    (log,) = command.runs.glob("*/logs/node-0.log")
    ours = b"".join(line for line in log.read_bytes().splitlines(keepends=True) if line[9:11] == b" x")
    lab = load_lab()
    assert lab is not None
    there = subprocess.run(
        [*ns_command(lab.nodes[0]), "cat", f"{scripts}/digest"], capture_output=True, text=True, check=True
    ).stdout
    assert len(ours) == 100_000_000
    assert hashlib.sha256(ours).hexdigest() == there


def test_the_first_failure_is_first_although_a_clock_is_wrong(command: Command, scripts: Path) -> None:
    text = """
import os, time
time.sleep(1)
if os.environ["RANK"] == "0":
    raise ValueError("the first")
time.sleep(2.5)
raise ValueError("a later one")
"""
    with fault(Clock(node="node1", offset_s=-10.0)):
        ended = command.document(
            *LAUNCH, "--grace", "8", "--workers-per-node", "1", "--", script(scripts, "two.py", text)
        )
    assert ended["status"] == "failed"
    failure = ended["first_failure"]
    assert (failure["node"], failure["rank"]) == ("node0", 0)
    assert "the first" in failure["message"]
    assert "Traceback" in failure["log_tail"]


def test_a_job_that_ends_well_on_one_node_and_badly_on_the_other(command: Command, scripts: Path) -> None:
    # Without torchrun, whose nodes wait for each other at the end.
    text = "import os, sys, time\nrank = int(os.environ['NODE_RANK'])\ntime.sleep(2 * rank)\nsys.exit(17 * rank)\n"
    job = ("--", sys.executable, script(scripts, "half.py", text))
    code, ended = command.code_and_document(*LAUNCH, "--engine", "command", *job)
    assert (code, ended["status"]) == (1, "failed")
    assert [node["exit_code"] for node in ended["nodes"]] == [0, 17]
    assert (ended["first_failure"]["node"], ended["first_failure"]["exit_code"]) == ("node1", 17)


def test_ten_launches_and_stops_leak_nothing(command: Command, scripts: Path, lab: Lab) -> None:
    def left() -> list[int]:
        """Open files of each node's sshd and first process, and its processes."""
        current = load_lab()
        assert current is not None
        pids = [pid for node in current.nodes for pid in (node.sshd.pid, node.init.pid)]
        return [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids] + [
            len(_in_namespace(node)) for node in current.nodes
        ]

    temporary = _temporary()
    before = left()
    for _ in range(10):
        code, run = command.code_and_document(*LAUNCH, "--detach", "--", f"{scripts}/counting.py", ENDLESS, "0.1")
        assert (code, run["status"]) == (0, "running")
        code, run = command.code_and_document("stop", run["run_id"], "--grace", "0", "--json")
        assert (code, run["status"]) == (0, "stopped")
    wait_for(lambda: left() == before)
    assert not agents()
    assert _temporary() == temporary
    assert len(lab.nodes) == 2


def _temporary() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).iterdir() if "multinode" in path.name}


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _in_namespace(node: Any) -> list[str]:
    space = Path(f"/proc/{node.init.pid}/ns/pid").readlink()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "ns/pid").readlink() == space:
                found.append(path.name)
        except OSError:
            continue
    return found
