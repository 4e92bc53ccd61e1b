"""Every failure that the lab can make is made, and the check names it: right check, right node, nothing else."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from multinode.lab.cluster import Lab, load_lab
from multinode.lab.faults import (
    Address,
    Clock,
    DiskFull,
    Fault,
    FileMissing,
    FileText,
    Interface,
    LinkDown,
    LinkSlow,
    Mtu,
    NodeState,
    Package,
    Ports,
    Route,
    SshdState,
    Variable,
    clear_faults,
    make_fault,
)
from tests.lab.launching import DEADLINE_S, REPOSITORY, Command, agents, listener

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]

JOB = "configs/tiny_sft.yaml"
MODEL = f"{REPOSITORY}/assets/tiny/model"

# The fault, and what the check must say: severity, node, check, a part of the message, a part of the hint.
FAULTS: list[tuple[Fault, str, str, str, str]] = [
    (SshdState(node="node1", how="stop"), "error", "ssh", "refused", "start it on the node"),
    (SshdState(node="node1", how="freeze"), "error", "ssh", "not as sshd does in time", "MaxStartups"),
    (SshdState(node="node1", how="crowded"), "error", "ssh", "not as sshd does in time", "MaxStartups"),
    (SshdState(node="node1", how="new-host-key"), "error", "ssh", "host key has changed", "ssh-keygen -f"),
    (SshdState(node="node1", how="refuse-key"), "error", "ssh", "refused our keys for user 'root'", "ssh-copy-id"),
    (LinkDown(node="node1", ifname="eth0"), "error", "ssh", "no SSH connection", "the node is down"),
    (LinkDown(node="node1"), "error", "link", "ens1f0", "ens1f0"),
    (Ports(node="node1", first=30000, last=60999, action="drop"), "error", "ports", "collective will hang", "ufw"),
    (Ports(node="node1", first=30000, last=60999, action="reject"), "error", "ports", "collective will hang", "ufw"),
    (Ports(node="node1", first=1, last=65535, action="drop"), "error", "ports", "on any port", "firewall"),
    (Ports(node="node0", first=29500, last=29500, action="drop"), "error", "master-port", "29500", "--master-port"),
    (DiskFull(node="node1"), "error", "machine", "disk", "make room"),
    (Package(node="node1", name="torch", version="2.4.1"), "error", "versions", "torch is 2.4.1", "torch==2.13.0"),
    (Package(node="node1", name="transformers", version="4.0"), "error", "versions", "transformers", "pip install"),
    (FileMissing(node="node1", path=MODEL), "error", "paths", "assets/tiny/model", "scp -F"),
    (FileText(node="node1", path=f"{MODEL}/config.json", text="{}"), "error", "content", "config.json", "rsync"),
    (Clock(node="node1", offset_s=90.0), "warning", "clock", "clock", "timedatectl"),
    (Address(node="node1", address="10.213.1.99/24"), "warning", "interface", "ens1f1", "ens1f1"),
    (Route(node="node1", peer="node0"), "warning", "interface", "eth0", "ip route"),
]
# Those that cannot hurt a launch by multinode are notes.
NOTES: list[tuple[Fault, str, str]] = [
    (Variable(node="node1", name="RANK", value="3"), "variables", "RANK"),
]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    make_tiny = [sys.executable, "scripts/make_tiny.py"]
    subprocess.run(make_tiny, cwd=REPOSITORY, check=True, capture_output=True, timeout=DEADLINE_S)
    return Command(tmp_path / "runs")


@contextlib.contextmanager
def faults(*made: Fault) -> Iterator[None]:
    lab = load_lab()
    assert lab is not None
    try:
        for fault in made:
            make_fault(lab, fault)
        yield
    finally:
        clear_faults(lab)


def check(command: Command, *options: str) -> tuple[int, dict[str, Any]]:
    code, document = command.code_and_document("check", "--hosts", "lab", JOB, "--json", *options)
    return code, document


def serious(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [finding for finding in document["findings"] if finding["severity"] != "note"]


def test_a_healthy_lab_has_neither_errors_nor_warnings(lab: Lab, command: Command) -> None:
    code, document = check(command)
    assert (code, document["ok"], serious(document)) == (0, True, [])
    assert len(document["streams"]) == len(lab.nodes) * (len(lab.nodes) - 1)
    assert not agents()


@pytest.mark.parametrize(("fault", "severity", "name", "message", "hint"), FAULTS, ids=lambda value: str(value)[:60])
def test_a_fault_is_named_and_gone_when_it_is_mended(  # noqa: PLR0917 - a row of the table
    command: Command, lab: Lab, fault: Fault, severity: str, name: str, message: str, hint: str
) -> None:
    assert lab.nodes
    with faults(fault):
        code, document = check(command)
    (finding,) = serious(document)
    assert (finding["severity"], finding["node"], finding["check"]) == (severity, fault.node, name)
    assert message in finding["message"]
    assert hint in finding["hint"]
    reached = all(node["reached"] for node in document["nodes"])
    assert code == (0 if severity == "warning" else 1 if reached else 3)
    assert [node["name"] for node in document["nodes"] if node["reached"] or node["name"] == fault.node] == [
        "node0",
        "node1",
    ]
    assert serious(check(command, "--no-bandwidth")[1]) == []


@pytest.mark.parametrize(("fault", "name", "part"), NOTES, ids=lambda value: str(value)[:60])
@pytest.mark.usefixtures("lab")
def test_what_multinode_settles_itself_is_a_note(command: Command, fault: Fault, name: str, part: str) -> None:
    with faults(fault):
        code, document = check(command, "--no-bandwidth")
    assert (code, serious(document)) == (0, [])
    notes = [finding for finding in document["findings"] if finding["check"] == name and part in finding["message"]]
    assert len(notes) == 1
    assert notes[0]["hint"]


@pytest.mark.parametrize(
    ("variable", "severity"), [("GLOO_SOCKET_IFNAME=eth7", "error"), ("NCCL_SOCKET_IFNAME==nosuch0", "warning")]
)
def test_a_wrong_interface_in_the_hostfile_is_found(
    command: Command, lab: Lab, tmp_path: Path, variable: str, severity: str
) -> None:
    lines = Path(lab.hostfile).read_text().splitlines()
    wrong = [f"{line} env.{variable}" if line.startswith("node1 ") else line for line in lines]
    hostfile = tmp_path / "hosts"
    hostfile.write_text("\n".join(wrong) + "\n")
    options = ("--no-bandwidth", "--json")
    code, document = command.code_and_document("check", "--hosts", str(hostfile), JOB, *options)
    (finding,) = serious(document)
    # Nobody reads NCCL's on nodes without a GPU.
    assert (finding["severity"], finding["node"], finding["check"]) == (severity, "node1", "variables")
    assert code == (1 if severity == "error" else 0)
    assert variable.split("=", maxsplit=1)[0] in finding["message"]
    assert "ens1f0" in finding["message"] + finding["hint"]
    hostfile.write_text("\n".join(lines) + "\n")
    assert serious(command.document("check", "--hosts", str(hostfile), JOB, *options)) == []


@pytest.mark.usefixtures("lab")
def test_a_virtual_interface_that_nccl_would_take_is_no_warning_where_ours_is_settled(command: Command) -> None:
    with faults(
        Interface(node="node1", name="br-1234"), Interface(node="node1", name="tailscale0", address="100.64.0.1/10")
    ):
        code, document = check(command, "--no-bandwidth")
    assert (code, serious(document)) == (0, [])


@pytest.mark.usefixtures("lab")
def test_a_link_that_is_slower_than_it_says_is_found_between_the_two(command: Command) -> None:
    # Without the job: on so slow a link it would be warned of as well.
    with faults(LinkSlow(node="node1", rate_gbit_per_s=0.1)):
        code, document = command.code_and_document("check", "--hosts", "lab", "--json")
    (finding,) = serious(document)
    assert (code, finding["severity"], finding["check"]) == (0, "warning", "link")
    assert "between node0 and node1" in finding["message"] or "between node1 and node0" in finding["message"]
    assert "Mbit/s" in finding["message"]
    assert "cables" in finding["hint"]


@pytest.mark.usefixtures("lab")
def test_large_packets_that_vanish_are_found(command: Command) -> None:
    with faults(Mtu(node="node0", mtu=9000), Mtu(node="node1", mtu=9000)):
        code, document = check(command, "--no-bandwidth")
    found = serious(document)
    assert code == 1
    assert {(finding["severity"], finding["check"]) for finding in found} == {("error", "link")}
    assert all("large ones vanish" in finding["message"] and "mtu 1500" in finding["hint"] for finding in found)
    assert serious(check(command)[1]) == []


@pytest.mark.usefixtures("lab")
def test_a_node_that_is_frozen_costs_its_own_deadline_and_the_others_are_complete(command: Command) -> None:
    with faults(NodeState(node="node1", how="freeze")):
        code, document = check(command)
    (finding,) = serious(document)
    assert (code, finding["node"], finding["check"]) == (3, "node1", "ssh")
    first, second = document["nodes"]
    assert (first["reached"], second["reached"]) == (True, False)
    assert {"torch", "llamafactory"} <= set(first["packages"])
    assert document["time_s"] < 60


def test_master_port_in_use_names_who_holds_it(lab: Lab, command: Command) -> None:
    with listener(lab.nodes[0], 29500):
        code, document = check(command)
    (finding,) = serious(document)
    assert (code, finding["node"], finding["check"]) == (1, "node0", "master-port")
    assert "pid" in finding["message"]
    assert "user root" in finding["message"]
    assert "--master-port 29501" in finding["hint"]
