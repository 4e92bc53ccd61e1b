from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from multinode.errors import UsageError
from multinode.lab.access import SSH_CONFIG
from multinode.lab.cgroups import find_groups, find_top
from multinode.lab.cluster import down_lab
from multinode.lab.faults import Cpu, Memory, NodeState, clear_faults, make_fault
from multinode.lab.processes import is_alive
from multinode.lab.state import STATE_DIR, Lab
from multinode.lab.teardown import find_remains

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


def take(shell: Command, node: str, size_mib: int) -> str:
    """The exit code of a process that takes so much on a node."""
    done = shell(node, f"{sys.executable} -c '{TAKE}' {size_mib}; echo $?")
    return done.stdout.strip() or done.stderr


def memory(node: str, limit_mib: int = LIMIT) -> Memory:
    return Memory(node=node, limit_bytes=limit_mib * MIB)


@contextmanager
def waiting(node: str) -> Iterator[subprocess.Popen[str]]:
    """A process on a node that takes too much once it is written a line."""
    program = f"print(1, flush=True); input(); {TAKE}"
    argv = [
        "ssh",
        "-F",
        str(SSH_CONFIG),
        "-o",
        "BatchMode=yes",
        node,
        f"{sys.executable} -c '{program}' {MUCH}; echo $?",
    ]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        yield process


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


def test_what_ran_already_is_held(made: Lab) -> None:
    with waiting("node0") as held, waiting("node1") as free:
        make_fault(made, memory("node0"))
        assert held.communicate("\n", timeout=DEADLINE_S)[0].strip() == KILLED
        assert free.communicate("\n", timeout=DEADLINE_S)[0].strip() == "0"


def test_of_two_limits_the_newest_counts_until_it_is_cleared(made: Lab, shell: Command) -> None:
    make_fault(made, memory("node0", 2 * MUCH))
    make_fault(made, memory("node0"))
    make_fault(made, Cpu(node="node0", share=0.9))
    assert take(shell, "node0", MUCH) == KILLED
    # Newest first: the processor, then the smaller limit, then all.
    assert len(clear_faults(made)) == 3
    assert take(shell, "node0", MUCH) == "0"
    assert find_groups() == []


def launched(training: str, folder: Path, runs: Path) -> tuple[int, dict[str, Any]]:
    """Exit code and run of a training with one worker on each node."""
    script = folder / "training.py"
    script.write_text(training)
    options = ("--hosts", "lab", "--grace", "2", "--json", "--workers-per-node", "1")
    return launching.Command(runs).code_and_document("launch", *options, "--", str(script))


def test_a_launch_tells_the_node_and_the_rank_that_the_kernel_killed(
    made: Lab, shared_dir: Path, tmp_path: Path
) -> None:
    make_fault(made, memory("node1", LAUNCH_LIMIT))
    code, ended = launched(STARVED, shared_dir, tmp_path)
    failure = ended["first_failure"]
    assert (code, failure["kind"], failure["node"], failure["rank"]) == (1, "out_of_memory", "node1", 1)
    assert failure["signal"] == "SIGKILL"
    assert [node["oom_kills"] for node in ended["nodes"]] == [0, 1]
    # The supervisor lived to tell, and left nothing.
    assert [node["state"] for node in ended["nodes"]] == ["ended", "ended"]
    assert not launching.processes_of(ended["run_id"])


def test_a_worker_that_somebody_killed_did_not_run_out_of_memory(made: Lab, shared_dir: Path, tmp_path: Path) -> None:
    # Although the kernel killed somebody on the same machine, as /proc/vmstat tells it, meanwhile.
    make_fault(made, memory("node1", LAUNCH_LIMIT))
    code, ended = launched(KILLED_BY_SOMEBODY, shared_dir, tmp_path)
    failure = ended["first_failure"]
    assert (code, failure["kind"], failure["node"], failure["rank"]) == (1, "killed", "node0", 0)
    assert [node["oom_kills"] for node in ended["nodes"]] == [0, 1]


def test_the_node_sees_its_limit_and_cannot_change_it(made: Lab, shell: Command) -> None:
    make_fault(made, memory("node0"))
    (group,) = find_groups()
    top = find_top("memory")
    assert top is not None
    place = f"/sys/fs/cgroup/{group.name}" if top.unified else f"/sys/fs/cgroup/memory/{group.name}"
    file = "memory.max" if top.unified else "memory.limit_in_bytes"
    assert shell("node0", f"cat {place}/{file}").stdout == f"{LIMIT * MIB}\n"
    assert "Read-only" in shell("node0", f"echo 0 > {place}/{file}").stderr


@pytest.mark.parametrize("lost", [None, "state"])
def test_down_leaves_no_group_even_without_its_records(made: Lab, lost: str | None) -> None:
    make_fault(made, memory("node0"))
    make_fault(made, memory("node1"))
    make_fault(made, NodeState(node="node1", how="kill"))
    assert find_remains().cgroups == tuple(map(str, find_groups()))
    assert len(find_groups()) == 2
    if lost:
        shutil.rmtree(STATE_DIR)
    assert down_lab().cgroups
    assert find_groups() == []
    assert not find_remains()


def test_a_killed_node_comes_back_without_its_limit(made: Lab, shell: Command) -> None:
    make_fault(made, memory("node1"))
    make_fault(made, NodeState(node="node1", how="kill"))
    assert len(clear_faults(made)) == 2
    assert find_groups() == []
    assert take(shell, "node1", MUCH) == "0"


def test_the_command_makes_it_and_status_says_so(made: Lab) -> None:
    done = launching.call_here("lab", "fault", "memory", "all", "--limit", "700MiB")
    assert done.stdout.splitlines() == [
        f"{node.name}: its processes have 700 MiB of memory together" for node in made.nodes
    ]
    listed = json.loads(launching.call_here("lab", "fault", "list", "--json").stdout)["faults"]
    assert listed[1] == {"kind": "memory", "node": "node1", "limit_bytes": 700 * MIB}
    assert "faults in force: 2" in launching.call_here("lab", "status").stderr


@pytest.mark.parametrize(
    ("limit", "said"),
    [("1M", "a node cannot do with 1 MiB"), ("100000G", "is no limit"), ("much", "is not a size")],
)
def test_a_limit_that_is_none_is_refused(made: Lab, limit: str, said: str) -> None:
    done = launching.call_here("lab", "fault", "memory", made.nodes[0].name, "--limit", limit)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr
    assert find_groups() == []


def test_a_machine_without_the_controller_says_so_in_a_line(made: Lab) -> None:
    top = find_top("memory")
    assert top is not None
    # A mount over it hides it, for this command alone.
    hide = f'mount -t tmpfs none {top.place} && exec "$@"'
    command = [sys.executable, "-m", "multinode", "lab", "fault", "memory", made.nodes[0].name, "--limit", "700MiB"]
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


def test_a_fault_of_too_little_is_refused_before_anything_is_made() -> None:
    with pytest.raises(UsageError, match="a node cannot do with 10 MiB"):
        memory("node0", 10)
