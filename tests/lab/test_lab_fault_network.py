from __future__ import annotations

from typing import Any

import pytest

from multinode.lab.network import measure_stream
from multinode.lab.state import Lab, LabNode
from tests.equipment.faults import (
    Address,
    Interface,
    LinkDown,
    LinkSlow,
    Mtu,
    Ports,
    Route,
    clear_faults,
)

from .faulting import CONNECTED, DROPPED, REFUSED, Command, Make, connect, quick_ssh, send, server

pytestmark = pytest.mark.lab


def test_a_link_that_is_down_carries_nothing_and_says_so(lab: Lab, shell: Command, fault: Make) -> None:
    node0, node1 = lab.nodes
    with server(node0, 7001):
        assert connect(node1, node0.addr, 7001) == CONNECTED
        fault(LinkDown(node="node0"))
        assert connect(node1, node0.addr, 7001, seconds=1.0) != CONNECTED
        assert shell("node0", "cat /sys/class/net/ens1f0/carrier").stdout == "0\n"
        assert connect(node1, node0.management_addr, 7001) == CONNECTED
        clear_faults(lab)
        assert connect(node1, node0.addr, 7001) == CONNECTED


def test_a_management_link_that_is_down_takes_ssh_away(lab: Lab, fault: Make) -> None:
    fault(LinkDown(node="node1", ifname="eth0"))
    assert quick_ssh("node1").returncode == 255
    assert quick_ssh("node0").stdout == "node0\n"
    clear_faults(lab)
    assert quick_ssh("node1").stdout == "node1\n"


def is_fast(source: LabNode, target: LabNode) -> bool:
    """Whether a stream reaches the rate of the lab at least once: a busy core may hold up one of them."""
    return any(measure_stream(source, target).goodput_gbit_per_s > 0.7 for _ in range(3))


@pytest.mark.timing
def test_a_slow_link_carries_less_than_its_nic_says(lab: Lab, shell: Command, fault: Make) -> None:
    node0, node1 = lab.nodes
    fault(LinkSlow(node="node1", rate_gbit_per_s=0.05))
    for source, target in ((node0, node1), (node1, node0)):
        assert measure_stream(source, target).goodput_gbit_per_s < 0.06
    assert shell("node1", "cat /sys/class/net/ens1f0/speed").stdout == "1000\n"
    clear_faults(lab)
    assert measure_stream(node0, node1).goodput_gbit_per_s > 0.2


@pytest.mark.timing
@pytest.mark.parametrize(("way", "slow"), [("send", (1, 0)), ("receive", (0, 1))])
def test_a_link_that_is_slow_one_way_carries_all_the_other_way(
    lab: Lab, fault: Make, way: Any, slow: tuple[int, int]
) -> None:
    source, target = (lab.nodes[rank] for rank in slow)
    fault(LinkSlow(node="node1", rate_gbit_per_s=0.1, way=way))
    # A bucket that was full lets some more pass at first.
    assert 0.08 < measure_stream(source, target).goodput_gbit_per_s < 0.12
    assert is_fast(target, source)
    assert len(clear_faults(lab)) == 1
    assert clear_faults(lab) == ()
    assert is_fast(source, target)


@pytest.mark.timing
def test_both_ways_of_a_link_may_be_slow_each_in_its_own_way(lab: Lab, fault: Make) -> None:
    node0, node1 = lab.nodes
    fault(LinkSlow(node="node1", rate_gbit_per_s=0.1, way="send"))
    fault(LinkSlow(node="node1", rate_gbit_per_s=0.3, way="receive"))
    assert measure_stream(node1, node0).goodput_gbit_per_s < 0.12
    assert 0.2 < measure_stream(node0, node1).goodput_gbit_per_s < 0.35
    assert len(clear_faults(lab)) == 2
    for source, target in ((node0, node1), (node1, node0)):
        assert is_fast(source, target)


def test_large_frames_vanish_where_both_nics_have_a_larger_mtu(lab: Lab, fault: Make) -> None:
    node0, node1 = lab.nodes
    with server(node1, 7002, 300_000), server(node0, 7002, 300_000), server(node1, 7003, 100):
        fault(Mtu(node="node0", mtu=9000))
        assert send(node0, node1.addr, 7002, 300_000) == "arrived"
        fault(Mtu(node="node1", mtu=9000))
        assert send(node0, node1.addr, 7002, 300_000, seconds=1.5) == "lost"
        assert send(node1, node0.addr, 7002, 300_000, seconds=1.5) == "lost"
        assert send(node0, node1.addr, 7003, 100) == "arrived"
    clear_faults(lab)
    with server(node1, 7004, 300_000):
        assert send(node0, node1.addr, 7004, 300_000) == "arrived"


@pytest.mark.parametrize(("action", "outcome"), [("drop", DROPPED), ("reject", REFUSED)])
def test_ports_are_closed_on_the_training_nic_alone(lab: Lab, fault: Make, action: Any, outcome: int) -> None:
    node0, node1 = lab.nodes
    with server(node1, 7100), server(node1, 7111), server(node0, 7105):
        fault(Ports(node="node1", first=7100, last=7110, action=action))
        assert connect(node0, node1.addr, 7100, seconds=1.0) == outcome
        assert connect(node0, node1.addr, 7111) == CONNECTED
        assert connect(node0, node1.management_addr, 7100) == CONNECTED
        assert connect(node1, node0.addr, 7105) == CONNECTED
        clear_faults(lab)
        assert connect(node0, node1.addr, 7100) == CONNECTED


def test_a_second_nic_in_the_training_subnet(lab: Lab, shell: Command, fault: Make) -> None:
    node0, node1 = lab.nodes
    fault(Address(node="node0", address="10.213.1.100/24"))
    assert shell("node0", "ip -4 -o address show to 10.213.1.0/24 | wc -l").stdout.strip() == "2"
    with server(node0, 7005):
        for address in (node0.addr, "10.213.1.100"):
            assert connect(node1, address, 7005) == CONNECTED
        clear_faults(lab)
        assert connect(node1, node0.addr, 7005) == CONNECTED
        assert connect(node1, "10.213.1.100", 7005, seconds=1.0) != CONNECTED
    assert shell("node0", "test -e /sys/class/net/ens1f1").returncode == 1


def test_an_interface_more_is_up_and_running(lab: Lab, shell: Command, fault: Make) -> None:
    fault(Interface(node="node0", name="tailscale0", address="100.64.0.1/10"))
    told = shell("node0", "cat /sys/class/net/tailscale0/operstate; ip -4 -brief address show tailscale0").stdout
    assert told.split()[0] == "up"
    assert "100.64.0.1/10" in told
    clear_faults(lab)
    assert "tailscale0" not in shell("node0", "ls /sys/class/net").stdout


def test_a_route_sends_training_traffic_through_the_management_nic(lab: Lab, shell: Command, fault: Make) -> None:
    node0, node1 = lab.nodes

    def sent_bytes(ifname: str) -> int:
        return int(shell("node0", f"cat /sys/class/net/{ifname}/statistics/tx_bytes").stdout)

    fault(Route(node="node0", peer="node1"))
    with server(node1, 7006, 3_000_000):
        before = sent_bytes("eth0"), sent_bytes("ens1f0")
        assert send(node0, node1.addr, 7006, 3_000_000) == "arrived"
        assert sent_bytes("eth0") - before[0] > 3_000_000
        assert sent_bytes("ens1f0") - before[1] < 1_000_000
        clear_faults(lab)
        before = sent_bytes("eth0"), sent_bytes("ens1f0")
        assert send(node0, node1.addr, 7006, 3_000_000) == "arrived"
        assert sent_bytes("ens1f0") - before[1] > 3_000_000
