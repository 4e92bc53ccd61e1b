"""Nodes that share ~/.multinode, as on a file server, and whose kernel is one, as of containers on one machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from multinode.lab.cluster import ns_command
from multinode.lab.state import Lab
from tests.lab.launching import Command, processes_of, wait_for
from tests.lab.supervised import LAUNCH, TRAIN, GoFile, lines, read_document

pytestmark = [pytest.mark.lab]

# Takes a directory of this machine into a node as it is, where a node has a view of its own of all others:
# open_tree(2) and move_mount(2).
MOUNT = """
import ctypes, os, sys
place, init, target = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
tree = libc.syscall(428, -100, place.encode(), 1 | 0o2000000)
with open(f"/proc/{init}/ns/mnt") as namespace:
    assert tree >= 0 and libc.setns(namespace.fileno(), 0x20000) == 0, os.strerror(ctypes.get_errno())
os.makedirs(target, mode=0o700, exist_ok=True)
assert libc.syscall(429, tree, b"", -100, target.encode(), 4) == 0, os.strerror(ctypes.get_errno())
"""
_HOME = "/root/.multinode"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
ENDLESS = ("--engine", "exec", "--", "sh", "-c", "while :; do sleep 1; done")


@pytest.fixture
def shared_home(lab: Lab, shared_dir: Path) -> Iterator[Path]:
    """One ~/.multinode for all nodes, which then have the boot id of the one kernel, too."""
    shared_dir.chmod(0o700)
    for node in lab.nodes:
        subprocess.run([sys.executable, "-c", MOUNT, str(shared_dir), str(node.init.pid), _HOME], check=True)
        subprocess.run([*ns_command(node), "umount", _BOOT_ID], check=True)
    yield shared_dir
    for node in lab.nodes:
        place = f"/run/boot-{node.name}"
        back = f"umount --lazy {_HOME}; echo {node.boot_id} > {place}; mount --bind {place} {_BOOT_ID}"
        subprocess.run([*ns_command(node), "sh", "-c", back], check=True)


def test_clean_leaves_live_runs_in_a_shared_home_alone_and_stop_ends_them(
    lab: Lab, command: Command, shared_home: Path
) -> None:
    code, left = command.code_and_document(*LAUNCH, "--detach", *ENDLESS)
    assert (code, left["status"]) == (0, "running")
    run_id = left["run_id"]
    ranks = {f"{run_id}.{rank}" for rank in range(len(lab.nodes))}
    assert {path.name for path in (shared_home / "runs").iterdir()} == ranks
    for words in (["--older-than", "0"], [run_id], ["last"]):
        code, cleaned = command.code_and_document("clean", *words, "--hosts", "lab", "--json")
        assert (code, [node["removed"] for node in cleaned["nodes"]]) == (0, [[], []])
        for node, other in zip(cleaned["nodes"], reversed(lab.nodes), strict=True):
            assert set(node["kept"]) == ranks
            assert node["machines"] == {f"{run_id}.{other.node_rank}": other.name}
    told = command.run("clean", "--older-than", "0", "--hosts", "lab").stdout
    assert f"kept because still running on another machine: {run_id}.1 (node1)" in told
    assert {path.name for path in (shared_home / "runs").iterdir()} == ranks
    boots = {json.loads((shared_home / "runs" / name / "supervisor.json").read_text())["boot_id"] for name in ranks}
    assert len(boots) == 1, "they have one kernel"
    code, stopped = command.code_and_document("stop", run_id, "--grace-period", "2", "--json")
    assert (code, stopped["status"]) == (0, "stopped")
    assert not processes_of(run_id)
    # Each node removes its own or that of the other: they have ended.
    assert command.run("clean", "last", "--hosts", "lab").returncode == 0
    wait_for(lambda: not list((shared_home / "runs").iterdir()))


def test_a_clean_meanwhile_does_not_end_a_training_that_is_followed(
    command: Command, shared_home: Path, go_file: GoFile
) -> None:
    with command.running(*LAUNCH, "--", TRAIN, "--lines", *go_file.argument) as controller:
        run_id = command.run_id()
        wait_for(lambda: lines(command, run_id).get(3, []))
        assert command.run("clean", "--older-than", "0", "--hosts", "lab").returncode == 0
        go_file.end()
        assert read_document(controller)["status"] == "succeeded"
    assert (shared_home / "runs" / f"{run_id}.1" / "log").is_file()
