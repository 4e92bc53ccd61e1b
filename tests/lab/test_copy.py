"""A copy over a network of three nodes: refused where there is no room, broken off in the middle, and gone on with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from multinode.lab.state import Lab, LabSpec

from .conftest import stand_lab
from .launching import Command, assert_no_agents, wait_for

pytestmark = [pytest.mark.lab]

MIB = 1 << 20
SIZE = 64 * MIB
# Two and a half seconds for all of it.
SPEC = LabSpec(node_count=3, rate_gbit_per_s=0.2, python=sys.executable, disk_bytes=256 * MIB)
MODEL = "/root/model of node0"
COPY = ("copy", "--hosts", "lab", MODEL)
Shell = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def lab(_clean_machine: None) -> Lab:
    return stand_lab(SPEC)


def test_a_copy_needs_room_everywhere_and_goes_on_where_it_was_killed(lab: Lab, command: Command, shell: Shell) -> None:
    make = f"mkdir '{MODEL}' && cd '{MODEL}' && head -c {SIZE} /dev/urandom > weights && echo 1 > config"
    assert shell("node0", make).returncode == 0
    assert shell("node2", "fallocate -l 200M /root/full").returncode == 0
    full = command.run(*COPY)
    assert full.returncode == 1
    assert "node2: the copy needs 64 MiB in /root, but only " in full.stderr
    assert [shell(node, "ls -A /root | grep model").stdout for node in ("node1", "node2")] == ["", ""]
    assert shell("node2", "rm /root/full").returncode == 0

    came = "find '/root/.model of node0.multinode-copy' -type f -printf '%s\\n'"
    with command.running(*COPY) as copying:
        wait_for(lambda: sum(map(int, shell("node2", came).stdout.split())) > SIZE // 4)
        copying.kill()
    assert_no_agents()
    assert [shell(node, f"ls '{MODEL}'").returncode for node in ("node1", "node2")] == [2, 2]

    code, report = command.code_and_document(*COPY, "--json")
    assert code == 0, report
    source, *copied = report["nodes"]
    assert (source["name"], source["state"]) == ("node0", "source")
    assert [node["state"] for node in copied] == ["copied", "copied"]
    assert all(0 < node["received_bytes"] < SIZE * 3 // 4 + 4 * MIB for node in copied)
    assert len({shell(node.name, f"cd '{MODEL}' && sha256sum *").stdout for node in lab.nodes}) == 1
    assert shell("node1", f"ss -Hltn src {lab.nodes[1].addr}").stdout == ""
    again = command.run(*COPY)
    assert (again.returncode, again.stdout.count("already identical")) == (0, 2)
