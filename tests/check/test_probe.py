from __future__ import annotations

import json
import time
from typing import Any

import pytest

from multinode.check.probe import peer_addresses, probe
from multinode.cluster.cluster import Node
from multinode.cluster.facts import UNASKED
from multinode.errors import AuthError, NodeFailed
from multinode.transport.agent import AgentArchive, AgentTransport
from multinode.transport.fake import FakeTransport
from tests import make

CLUSTER = make.cluster(Node(name="a", python="~/env/bin/python", addr="10.0.0.1"), "b")


def ask(*answers: Any) -> tuple[FakeTransport, Any]:
    """Probe the nodes, which answer with these records or raise these errors."""

    def handle(node: Node, _command: str, _stdin: bytes) -> list[bytes]:
        answer = answers["ab".index(node.name)]
        if isinstance(answer, Exception):
            raise answer
        return [json.dumps({"kind": "facts", **answer}).encode()]

    fake = FakeTransport(handle)
    agent = AgentTransport(fake, AgentArchive(b""))
    return fake, probe(agent, CLUSTER, controller_cwd="/here", peers=("10.0.0.1",), ports=(29500,), packages=False)


def test_each_node_is_asked_with_its_own_line_and_answers_under_its_own_name() -> None:
    fake, found = ask(
        {"cores": 4, "node": "liar", "of_a_newer_agent": 1}, {"cores": 8, "gpus": [{"index": 0, "name": "x"}]}
    )
    assert [(facts.node, facts.cores, len(facts.gpus)) for facts in found.require().values()] == [
        ("a", 4, 0),
        ("b", 8, 1),
    ]
    requests = {node: json.loads(stdin) for node, _, stdin in fake.ran}
    assert [requests[name]["python"] for name in "ab"] == ["~/env/bin/python", None]
    assert (requests["a"]["controller_cwd"], requests["a"]["peers"]) == ("/here", ["10.0.0.1"])


def test_a_clock_is_compared_with_ours_when_the_answer_comes() -> None:
    _, found = ask({"time_s": time.time() + 100}, {"time_s": time.time() - 3600})
    ahead, behind = (facts.clock_offset_s for facts in found.require().values())
    assert ahead == pytest.approx(100, abs=5)
    assert behind == pytest.approx(-3600, abs=5)
    assert [facts.clock_offset_s for facts in ask({}, {})[1].require().values()] == [UNASKED, UNASKED]


def test_a_clock_that_may_be_right_is_not_said_to_be_off() -> None:
    def answer_late(_node: Node, _command: str, _stdin: bytes) -> list[bytes]:
        told = json.dumps({"kind": "facts", "time_s": time.time()}).encode()
        # The controller is busy, and comes late to read what the node said in time.
        time.sleep(0.2)
        return [told]

    agent = AgentTransport(FakeTransport(answer_late), AgentArchive(b""))
    assert [facts.clock_offset_s for facts in probe(agent, CLUSTER).require().values()] == [0.0, 0.0]


def test_a_node_that_does_not_answer_hides_no_other() -> None:
    _, found = ask(AuthError("refused"), {"cores": 8})
    assert [str(error) for error in found.failed.values()] == ["a: refused"]
    assert [facts.node for facts in found.found.values()] == ["b"]


@pytest.mark.parametrize(
    "lie",
    [
        {"cores": "many"},
        {"packages": ["torch"]},
        {"interfaces": [{"name": "eth0", "addresses": ["not an address"]}]},
        {"interfaces": {"eth0": "10.0.0.1/24"}},
        {"ssh_address": "somewhere"},
        {"gpus": [{"index": 0}]},
        {"run_processes": [{"pid": -1, "run_id": "r.0"}]},
        # What is told of one node stands in commands for another.
        {"packages": {"is": "entries", "values": {"torch": "2;touch /tmp/x"}}},
        {"nccl_version": "2.27\n"},
        {"cuda_version": "$(id)"},
        {"interfaces": [{"name": "eth0;id"}]},
        {"interfaces": [{"name": "eth0", "addresses": ["fd00::%$(id)/64"]}]},
        {"interfaces": [{"name": "eth0", "addresses": ["fd00::1%`id`"]}]},
        {"ssh_address": "fe80::1%$(id)"},
        {"ssh_address": "fe80::1%a b"},
        {"hostname_address": "$(id)"},
        {"routes": [{"peer": "10.0.0.1", "source": "fe80::1%;id"}]},
        {"interfaces": [{"name": "-eth0"}]},
        {"unknown_arguments": {"is": "entries", "values": {"lr": "a b"}}},
        {"cores": {"is": "unknown", "reason": 7}},
        {"contents": [{"path": ".git", "digest": "--force"}]},
    ],
)
def test_a_node_that_lies_has_failed_and_the_plan_never_sees_it(lie: dict[str, Any]) -> None:
    _, found = ask(lie, {"cores": 8})
    (error,) = found.failed.values()
    assert isinstance(error, NodeFailed)
    assert error.node == "a"
    assert "cannot read its facts" in error.message


def test_peers_are_the_addresses_that_the_hostfile_names() -> None:
    assert peer_addresses(CLUSTER.nodes) == ("10.0.0.1",)
