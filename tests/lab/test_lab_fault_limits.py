"""A node that is held to a part of the processors or of the memory: its jobs, what runs already, and its own view."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from multinode.lab.cluster import down_lab, exec_in_node, find_groups, find_remains
from multinode.lab.state import STATE_DIR, Lab, is_alive
from multinode.records.samples import CgroupSample, CpuSample, Sample, parse_samples
from tests.equipment.cgroups import Controller, find_top
from tests.equipment.faults import Cpu, Fault, Memory, NodeState, clear_faults, make_fault

from . import launching
from .conftest import DEADLINE_S
from .faulting import Command

pytestmark = [pytest.mark.lab]

MIB = 1 << 20
LIMIT, LITTLE, MUCH = 250, 50, 400
# A launcher imports torch.
LAUNCH_LIMIT, LAUNCH_MUCH = 600, 900
KILLED = "137"

# Takes so many MiB, every page of them.
TAKE = "import sys; size = int(sys.argv[1]) << 20; held = bytearray(size); held[::4096] = bytes(size // 4096)"
# Rank 1 takes too much, and rank 0 goes on; neither imports torch, so all else on the node is small.
STARVED = f"""
import os, sys, time
if os.environ["RANK"] == "1":
    sys.argv[1:] = ["{LAUNCH_MUCH}"]
    {TAKE}
time.sleep(60)
"""
# The kernel kills a child of rank 1, which goes on and says so; then somebody kills rank 0.
KILLED_BY_SOMEBODY = f"""
import os, signal, socket, subprocess, sys, time
if os.environ["RANK"] == "1":
    child = subprocess.run([sys.executable, "-c", {TAKE!r}, "{LAUNCH_MUCH}"])
    time.sleep(1)
    socket.create_connection((os.environ["MASTER_ADDR"], 29777)).send(bytes([-child.returncode]))
    time.sleep(60)
connection, _ = socket.create_server(("", 29777)).accept()
os.kill(os.getpid(), connection.recv(1)[0])
"""

# Works for a second, and says how much of it it had a core.
BUSY = (
    "import time; a, b = time.monotonic(), time.process_time()\n"
    "while time.monotonic() - a < 1: pass\n"
    "print((time.process_time() - b) / (time.monotonic() - a))"
)
LIMITED = 0.3
# A period that was just begun and a busy machine blur both; with a whole core it gets far more than this.
MOST = 0.42


def take(shell: Command, node: str, size_mib: int) -> str:
    """The exit code of a process that takes so much on a node."""
    done = shell(node, f"{sys.executable} -c '{TAKE}' {size_mib}; echo $?")
    return done.stdout.strip() or done.stderr


def memory(node: str, limit_mib: int = LIMIT) -> Memory:
    return Memory(node=node, limit_bytes=limit_mib * MIB)


def limit(controller: Controller, node: str) -> Fault:
    return Cpu(node=node, share=LIMITED) if controller == "cpu" else memory(node)


def share_of(shell: Command, node: str) -> float:
    return float(shell(node, f"{sys.executable} -c '{BUSY}'").stdout)


def test_who_takes_more_is_killed_there_and_nobody_else(made: Lab, shell: Command) -> None:
    make_fault(made, memory("node1"))
    assert take(shell, "node1", MUCH) == KILLED
    assert take(shell, "node1", LITTLE) == "0"
    assert take(shell, "node0", MUCH) == "0"
    node = made.nodes[1]
    assert is_alive(node.init)
    assert is_alive(node.sshd)
    clear_faults(made)
    assert take(shell, "node1", MUCH) == "0"
    assert find_groups() == []


def launched(command: launching.Command, training: str, folder: Path) -> tuple[int, dict[str, Any]]:
    """Exit code and run of a training with one worker on each node."""
    script = folder / "training.py"
    script.write_text(training)
    options = ("--hosts", "lab", "--grace-period", "2", "--json", "--workers-per-node", "1")
    return command.code_and_document("launch", *options, "--", str(script))


def test_a_launch_tells_the_node_and_the_rank_that_the_kernel_killed(
    made: Lab, shared_dir: Path, command: launching.Command
) -> None:
    make_fault(made, memory("node1", LAUNCH_LIMIT))
    code, ended = launched(command, STARVED, shared_dir)
    failure = ended["first_failure"]
    assert (code, failure["kind"], failure["node"], failure["rank"]) == (1, "out_of_memory", "node1", 1)
    assert failure["signal"] == "SIGKILL"
    assert [node["status"]["oom_kills"] for node in ended["nodes"]] == [0, 1]
    # The supervisor lived to tell, and left nothing.
    assert [node["state"] for node in ended["nodes"]] == ["ended", "ended"]


def test_a_worker_that_somebody_killed_did_not_run_out_of_memory(
    made: Lab, shared_dir: Path, command: launching.Command
) -> None:
    # Although the kernel killed somebody on the same machine, as /proc/vmstat tells it, meanwhile.
    make_fault(made, memory("node1", LAUNCH_LIMIT))
    code, ended = launched(command, KILLED_BY_SOMEBODY, shared_dir)
    failure = ended["first_failure"]
    assert (code, failure["kind"], failure["node"], failure["rank"]) == (1, "killed", "node0", 0)
    assert [node["status"]["oom_kills"] for node in ended["nodes"]] == [0, 1]


@pytest.mark.timing
def test_a_busy_loop_gets_its_share_until_cleared(made: Lab, shell: Command) -> None:
    before = share_of(shell, "node1")
    make_fault(made, Cpu(node="node1", share=LIMITED))
    assert share_of(shell, "node1") == pytest.approx(LIMITED, abs=MOST - LIMITED)
    # The other node has what it had, if others leave it that.
    assert share_of(shell, "node0") > before / 2
    clear_faults(made)
    assert share_of(shell, "node1") > before / 2
    assert find_groups() == []


def test_what_ran_already_is_held_and_so_is_lab_exec(made: Lab, shell: Command) -> None:
    pid = shell("node0", "sh -c 'while :; do :; done' >/dev/null 2>&1 & echo $!").stdout
    make_fault(made, Cpu(node="node0", share=LIMITED))
    (group,) = find_groups()
    usage, began = _usage_s(made), time.monotonic()
    time.sleep(1)
    used, elapsed = _usage_s(made) - usage, time.monotonic() - began
    shell("node0", f"kill {pid}")
    assert 0 < used < MOST * elapsed
    assert exec_in_node(made.nodes[0], ["grep", "-q", group.name, "/proc/self/cgroup"]) == 0
    assert exec_in_node(made.nodes[1], ["grep", "-q", group.name, "/proc/self/cgroup"]) == 1


@pytest.mark.timing
def test_a_run_records_the_limit_of_its_job(made: Lab, command: launching.Command) -> None:
    make_fault(made, Cpu(node="node1", share=LIMITED))
    busy = (sys.executable, "-c", BUSY.replace("< 1", "< 3"))
    done = command.run("launch", "--hosts", "lab", "--workers-per-node", "1", "--engine", "exec", "--", *busy)
    assert done.returncode == 0, done.stderr
    free, held = (_samples(command, node_rank) for node_rank in range(2))
    assert {one.quota_cores for one in free if isinstance(one, CgroupSample)} == {None}
    limits = [one for one in held if isinstance(one, CgroupSample)]
    assert {one.quota_cores for one in limits} == {LIMITED}
    # On a busy machine others hold it back as well, and the limit less often.
    assert limits[-1].throttled_us > limits[0].throttled_us
    assert limits[-1].throttled_periods > limits[0].throttled_periods
    cores = [one.job_cores for one in held if isinstance(one, CpuSample) and one.job_cores is not None]
    assert 0 < max(cores) < 2 * MOST


@pytest.mark.parametrize(("controller", "lost"), [("cpu", None), ("memory", "state")])
def test_down_leaves_no_group_even_without_its_records(made: Lab, controller: Controller, lost: str | None) -> None:
    make_fault(made, limit(controller, "node0"))
    make_fault(made, limit(controller, "node1"))
    make_fault(made, NodeState(node="node1", how="kill"))
    assert find_remains().cgroups == tuple(map(str, find_groups()))
    assert len(find_groups()) == 2
    if lost:
        shutil.rmtree(STATE_DIR)
    assert down_lab().cgroups
    assert find_groups() == []
    assert not find_remains()


def test_a_machine_without_the_controller_says_so_in_a_line(made: Lab) -> None:
    top = find_top("memory")
    assert top is not None
    # A mount over it hides it, for this command alone.
    hide = f'mount -t tmpfs none {top.place} && exec "$@"'
    command = ["scripts/lab-fault", made.nodes[0].name, "memory", "limit_bytes=734003200"]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", hide, "sh", *command],
        cwd=launching.REPOSITORY,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 2
    assert "error: no control groups with the memory controller are mounted here" in done.stderr
    assert "mount -t cgroup -o memory" in done.stderr


def _samples(command: launching.Command, node_rank: int) -> list[Sample]:
    """What the sampler of one node recorded in the only run there is."""
    (path,) = command.runs.glob(f"*/samples/node-{node_rank}/node.jsonl")
    return list(parse_samples(path.read_bytes().splitlines()))


def _usage_s(lab: Lab) -> float:
    """Processor seconds of node 0's children of process 1 and below, as /proc has them."""
    ticks = 0
    namespace = Path(f"/proc/{lab.nodes[0].init.pid}/ns/pid").stat().st_ino
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "ns/pid").stat().st_ino == namespace:
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        except OSError:
            continue
    return ticks / 100
