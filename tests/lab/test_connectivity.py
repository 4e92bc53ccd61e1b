from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from multinode.check.connectivity import ConnectivityPlan, ConnectivityTest
from multinode.cluster.hostfile import parse_hostfile
from multinode.lab.state import Lab
from multinode.transport.agent import AgentTransport
from multinode.transport.openssh import OpensshTransport
from tests.equipment.faults import LinkSlow

from .faulting import Make

pytestmark = [pytest.mark.lab, pytest.mark.timing]

RING_GBIT_PER_S = 0.2
RING = (("node0", "node1"), ("node1", "node0"))


@pytest.fixture(scope="module")
def test(module_lab: Lab) -> Iterator[ConnectivityTest]:
    """Both nodes, with their ports open on the training network."""
    nodes = parse_hostfile(Path(module_lab.hostfile).read_text(), module_lab.hostfile).nodes
    transport = OpensshTransport()
    agent = AgentTransport(transport)
    addresses = {node.name: node.addr for node in module_lab.nodes}
    with ConnectivityTest(agent, nodes, addresses, ConnectivityPlan(pairs=(), master_port=29500)) as test:
        yield test
    agent.close()
    transport.close()


def test_a_ring_fills_every_link_both_ways_at_once(test: ConnectivityTest, fault: Make) -> None:
    # A rate at which no machine's processors are the limit.
    for node in ("node0", "node1"):
        fault(LinkSlow(node=node, rate_gbit_per_s=RING_GBIT_PER_S))
    streamed = test.stream(RING, 1.0)
    assert [(one.source, one.target, one.error) for one in streamed] == [(*pair, None) for pair in RING]
    # An MTU of 1500 leaves 0.941 of the rate. Of a link that carries one way at a time, each way would get half.
    assert all(0.7 < (one.gbit_per_s or 0.0) / RING_GBIT_PER_S < 1.05 for one in streamed)


def test_a_link_that_is_slow_one_way_shows_in_that_way_alone(test: ConnectivityTest, fault: Make) -> None:
    fault(LinkSlow(node="node1", rate_gbit_per_s=0.1, way="send"))
    (slow,) = test.stream((("node1", "node0"),), 0.5)
    (whole,) = test.stream((("node0", "node1"),), 0.5)
    assert (slow.gbit_per_s or 0.0) < 0.12
    assert (whole.gbit_per_s or 0.0) > 0.5
