from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from multinode.check.connection_test import ConnectivityPlan, ConnectivityTest
from multinode.cluster.hostfile import parse_hostfile
from multinode.lab.faults import LinkSlow
from multinode.lab.state import Lab
from multinode.transport.agent import AgentTransport
from multinode.transport.openssh import OpensshTransport

from .faulting import Make

pytestmark = [pytest.mark.lab, pytest.mark.timing]

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


def test_a_ring_fills_every_link_both_ways_at_once(test: ConnectivityTest) -> None:
    streamed = test.stream(RING, 1.0)
    assert [(one.source, one.target, one.error) for one in streamed] == [(*pair, None) for pair in RING]
    # What an MTU of 1500 leaves of 1 Gbit/s is 0.941. More would be a fault of the measurement, less may be the
    # machine's.
    assert all(0.5 < (one.gbit_per_s or 0.0) < 0.96 for one in streamed)


def test_a_link_that_is_slow_one_way_shows_in_that_way_alone(test: ConnectivityTest, fault: Make) -> None:
    fault(LinkSlow(node="node1", rate_gbit_per_s=0.1, way="send"))
    (slow,) = test.stream((("node1", "node0"),), 0.5)
    (whole,) = test.stream((("node0", "node1"),), 0.5)
    assert (slow.gbit_per_s or 0.0) < 0.12
    assert (whole.gbit_per_s or 0.0) > 0.5
