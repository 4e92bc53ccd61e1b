from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from multinode.core.cluster.hostfile import parse_hostfile
from multinode.lab.faults import LinkSlow
from multinode.lab.state import Lab
from multinode.preflight.network.reach import Agenda, Hall
from multinode.transport.agent import AgentTransport
from multinode.transport.ssh import SshTransport

from .faulting import Make

pytestmark = [pytest.mark.lab, pytest.mark.timing]

RING = (("node0", "node1"), ("node1", "node0"))


@pytest.fixture(scope="module")
def hall(module_lab: Lab) -> Iterator[Hall]:
    """Both nodes, with their ports open on the training network."""
    nodes = parse_hostfile(Path(module_lab.hostfile).read_text(), module_lab.hostfile).nodes
    transport = SshTransport()
    agent = AgentTransport(transport)
    addresses = {node.name: node.addr for node in module_lab.nodes}
    with Hall(agent, nodes, addresses, Agenda(pairs=(), master_port=29500)) as meeting:
        yield meeting
    agent.close()
    transport.close()


@pytest.mark.parametrize("count", [1, 4])
def test_a_ring_fills_every_link_both_ways_at_once(hall: Hall, count: int) -> None:
    streamed = hall.stream(RING, 1.0, count)
    assert [(one.source, one.target, one.error) for one in streamed] == [(*pair, None) for pair in RING]
    # What an MTU of 1500 leaves of 1 Gbit/s is 0.941. More would be a fault of the measurement, less may be the
    # machine's.
    assert all(0.5 < (one.gbit_per_s or 0.0) < 0.96 for one in streamed)


def test_a_link_that_is_slow_one_way_shows_in_that_way_alone(hall: Hall, fault: Make) -> None:
    fault(LinkSlow(node="node1", rate_gbit_per_s=0.1, way="send"))
    (slow,) = hall.stream((("node1", "node0"),), 0.5)
    (whole,) = hall.stream((("node0", "node1"),), 0.5)
    assert (slow.gbit_per_s or 0.0) < 0.12
    assert (whole.gbit_per_s or 0.0) > 0.5


def test_round_trips_take_microseconds(hall: Hall) -> None:
    pinged = hall.ping(RING)
    assert [(one.source, one.target, one.error) for one in pinged] == [(*pair, None) for pair in RING]
    for one in pinged:
        assert one.median_us is not None
        assert one.p95_us is not None
        assert 1 < one.median_us <= one.p95_us < 50_000
