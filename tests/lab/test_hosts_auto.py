"""`--hosts auto` on node 0, with what each scheduler gives its shell; its nodes reach each other over SSH there."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from multinode.cluster.allocation import MPI_HOSTFILE
from multinode.lab.cluster import login_environment, ns_command
from multinode.lab.nodes import REFRESH_SCRIPT
from multinode.lab.state import Lab, LabNode

from .launching import DEADLINE_S, MULTINODE, REPOSITORY, wait_for
from .supervised import STAND_IN, TRAIN

pytestmark = [pytest.mark.lab]

RUNS = "/var/tmp/auto-runs"
NAMES = "node0\nnode0\nnode1\nnode1\n"
PORT = 2222


def root_of(lab: Lab) -> Path:
    """Node 0's own files."""
    return Path(f"/proc/{lab.nodes[0].init.pid}/root")


def launch_on_node0(lab: Lab, environ: dict[str, str]) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """A run of two steps: its document, the nodes of its plan, and what was told beside it."""
    script = f'. {REFRESH_SCRIPT}; cd {REPOSITORY} && exec env "$@"'
    variables = [f"{name}={value}" for name, value in ({"MULTINODE_RUNS": RUNS} | environ).items()]
    options = (
        "--hosts",
        "auto",
        "--json",
        "--no-check",
        "--env",
        f"PYTHONPATH={STAND_IN}",
        "--",
        TRAIN,
        "--steps",
        "2",
    )
    argv = [*ns_command(lab.nodes[0]), "sh", "-c", script, "sh", *variables, *MULTINODE, "launch", *options]
    done = subprocess.run(
        argv, env=login_environment({}), capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    plan = json.loads((root_of(lab) / RUNS.lstrip("/") / document["run_id"] / "plan.json").read_text())
    return document, plan["nodes"], done.stderr


@contextlib.contextmanager
def file_of(lab: Lab, path: str, text: str) -> Iterator[None]:
    """A file that node 0 alone has."""
    here = root_of(lab) / path.lstrip("/")
    here.parent.mkdir(parents=True, exist_ok=True)
    here.write_text(text)
    yield
    here.unlink()


@contextlib.contextmanager
def sshd_at(lab: Lab, port: int) -> Iterator[None]:
    """A second sshd on every node, as the images of mpi-operator start it; node 0 knows their keys there, too."""
    known = root_of(lab) / "root/.ssh/known_hosts"
    before = known.read_text()
    # `NAME,ADDRESS TYPE KEY` of each node.
    entries = [line.partition(" ") for line in before.splitlines()]
    known.write_text(before + "".join(f"[{names.split(',')[1]}]:{port} {key}\n" for names, _, key in entries))
    running = []
    for node in lab.nodes:
        where = f"ListenAddress={node.management_addr}:{port}"
        running.append(subprocess.Popen([*ns_command(node), "/usr/sbin/sshd", "-D", "-o", where]))
    try:
        wait_for(lambda: all(listens(node, port) for node in lab.nodes))
        yield
    finally:
        known.write_text(before)
        for process in running:
            process.terminate()
            process.wait(timeout=DEADLINE_S)


def listens(node: LabNode, port: int) -> bool:
    """Whether something listens at the port on a node."""
    lines = Path(f"/proc/{node.init.pid}/net/tcp").read_text().splitlines()[1:]
    return any(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A" for line in lines)


def test_what_five_schedulers_give_trains_on_both_nodes(lab: Lab) -> None:
    addresses = [node.management_addr for node in lab.nodes]
    two = "\n".join(addresses)
    cases: list[tuple[str, dict[str, str], str, list[str], int]] = [
        ("dstack", {"DSTACK_NODES_IPS": two, "DSTACK_GPUS_PER_NODE": "2"}, "", addresses, 2),
        ("SkyPilot", {"SKYPILOT_NODE_IPS": two, "SKYPILOT_NUM_GPUS_PER_NODE": "1"}, "", addresses, 1),
        ("Kubeflow", {}, MPI_HOSTFILE, ["node0", "node1"], 2),
        ("PBS", {"PBS_NODEFILE": "/var/tmp/nodes"}, "/var/tmp/nodes", ["node0", "node1"], 2),
        ("OAR", {"OAR_NODEFILE": "/var/tmp/nodes"}, "/var/tmp/nodes", ["node0", "node1"], 1),
    ]
    for scheduler, environ, path, names, workers in cases:
        text = "node0 slots=2\nnode1 slots=2\n" if scheduler == "Kubeflow" else NAMES
        with contextlib.ExitStack() as stack:
            if path:
                stack.enter_context(file_of(lab, path, text))
            if scheduler == "Kubeflow":
                stack.enter_context(sshd_at(lab, PORT))
            document, nodes, told = launch_on_node0(lab, environ)
        assert f"hostfile from {scheduler}:" in told
        assert (document["status"], document["world_size"]) == ("succeeded", 2 * workers)
        assert [node["place"]["node"] for node in nodes] == names
