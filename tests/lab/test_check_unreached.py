"""What keeps a node from being reached, each on a node of its own: the check names it, and the others are complete."""

from __future__ import annotations

import sys

import pytest

from multinode.lab.cluster import up_lab
from multinode.lab.state import Lab, LabSpec
from tests.equipment.faults import Fault, LinkDown, NodeState, SshdState, make_fault
from tests.lab.launching import Command, assert_no_agents

pytestmark = [pytest.mark.lab]

# The fault of node 1, of node 2 and so on, a part of the message, and a part of the hint.
FAULTS: list[tuple[Fault, str, str]] = [
    (SshdState(node="node1", how="stop"), "refused", "start sshd on the node"),
    (SshdState(node="node2", how="freeze"), "sshd does not answer in time", "restart sshd"),
    (SshdState(node="node3", how="crowded"), "sshd closed it before login", "MaxStartups"),
    (SshdState(node="node4", how="new-host-key"), "host key has changed", "ssh-keygen -f"),
    (SshdState(node="node5", how="refuse-key"), "refused your keys for user 'root'", "ssh-copy-id"),
    (LinkDown(node="node6", ifname="eth0"), "no SSH connection", "the node is down"),
    (NodeState(node="node7", how="freeze"), "", ""),
]


@pytest.fixture
def eight(no_lab: None) -> Lab:
    del no_lab
    spec = LabSpec(node_count=8, rate_gbit_per_s=None, python=sys.executable, disk_bytes=2 << 30)
    return up_lab(spec, measure=False)


def test_each_costs_its_own_deadline_and_the_others_are_complete(eight: Lab, command: Command) -> None:
    for fault, _, _ in FAULTS:
        make_fault(eight, fault)
    code, document = command.code_and_document("check", "--hosts", "lab", "--json")
    assert code == 3
    found = {finding["node"]: finding for finding in document["findings"] if finding["severity"] != "note"}
    assert sorted(found) == [fault.node for fault, _, _ in FAULTS]
    assert {(finding["severity"], finding["check"]) for finding in found.values()} == {("error", "ssh")}
    for fault, message, hint in FAULTS:
        assert message in found[fault.node]["message"]
        assert hint in found[fault.node]["hint"]
    first, *others = document["nodes"]
    assert first["reached"]
    assert not any(node["reached"] for node in others)
    assert {"torch", "llamafactory"} <= set(first["packages"])
    assert document["time_s"] < 60
    assert_no_agents()
