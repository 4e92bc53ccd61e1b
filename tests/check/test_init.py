from __future__ import annotations

import json
from typing import Any

import pytest

from multinode.check.check import describe_nodes
from multinode.cluster.cluster import Node
from multinode.transport.agent import AgentArchive, AgentTransport
from multinode.transport.fake import FakeTransport
from tests import make


def described(*nodes: dict[str, Any]) -> str:
    """The hostfile of nodes that say this of themselves."""

    def handle(node: Node, _command: str, _stdin: bytes) -> list[bytes]:
        return [json.dumps({"kind": "facts", "cores": 8, **nodes["ab".index(node.name)]}).encode()]

    agent = AgentTransport(FakeTransport(handle), AgentArchive(b""))
    cluster = make.cluster(*"ab"[: len(nodes)])
    return describe_nodes(agent, cluster).text


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"memory_total_gib": 64.0}, "8 cores, 64 GiB of memory"),
        ({"memory_total_gib": 64.0, "memory_limit_gib": 16.0}, "8 cores, 16 GiB of memory"),
        ({}, "8 cores\n"),
    ],
)
def test_the_memory_of_a_node_is_what_it_may_use(facts: dict[str, float], words: str) -> None:
    assert words in described(facts)


def having(address: str) -> dict[str, Any]:
    return {"interfaces": [{"name": "enp1s0f1np1", "addresses": [address], "up": True, "speed_gbit_per_s": 200.0}]}


@pytest.mark.parametrize(
    ("addresses", "words"),
    [
        # They change at a reboot; netplan's link-local addresses are what two boxes on one cable have.
        (("169.254.10.1/16", "169.254.77.2/16"), "a slots=1 ifname=enp1s0f1np1\n"),
        (("10.0.0.1/24", "10.0.0.2/24"), "a slots=1 addr=10.0.0.1 ifname=enp1s0f1np1\n"),
    ],
)
def test_a_link_local_address_is_found_by_its_interface_at_each_launch(addresses: tuple[str, str], words: str) -> None:
    assert words in described(*map(having, addresses))
