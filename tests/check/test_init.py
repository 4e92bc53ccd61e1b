from __future__ import annotations

import json
from typing import Any

import pytest

from multinode.check.check import describe_nodes
from multinode.cluster.cluster import Cluster, Node
from multinode.transport.agent import AgentArchive, AgentTransport
from multinode.transport.fake import FakeTransport


def described(**facts: Any) -> str:
    """The hostfile of a node that says this of itself."""

    def handle(_node: Node, _command: str, _stdin: bytes) -> list[bytes]:
        return [json.dumps({"kind": "facts", "cores": 8, **facts}).encode()]

    agent = AgentTransport(FakeTransport(handle), AgentArchive(b""))
    return describe_nodes(agent, Cluster(nodes=(Node(name="a"),), source="hosts")).text


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"memory_total_gib": 64.0}, "8 cores, 64 GiB of memory"),
        ({"memory_total_gib": 64.0, "memory_limit_gib": 16.0}, "8 cores, 16 GiB of memory"),
        ({}, "8 cores\n"),
    ],
)
def test_the_memory_of_a_node_is_what_it_may_use(facts: dict[str, float], words: str) -> None:
    assert words in described(**facts)


@pytest.mark.parametrize("address", ["169.254.3.7/16", "fe80::1/64"])
def test_of_a_link_local_address_the_interface_is_written(address: str) -> None:
    interfaces = [
        {"name": name, "kind": "ethernet", "up": True, "addresses": [at]} for name, at in (("ens1", address),)
    ]
    line = described_pair(interfaces).splitlines()[-1]
    assert "ifname=ens1" in line
    assert "addr=" not in line


def described_pair(interfaces: list[dict[str, Any]]) -> str:
    """The hostfile of two nodes with these interfaces."""

    def handle(_node: Node, _command: str, _stdin: bytes) -> list[bytes]:
        return [json.dumps({"kind": "facts", "cores": 8, "interfaces": interfaces}).encode()]

    agent = AgentTransport(FakeTransport(handle), AgentArchive(b""))
    return describe_nodes(agent, Cluster(nodes=(Node(name="a"), Node(name="b")), source="hosts")).text
