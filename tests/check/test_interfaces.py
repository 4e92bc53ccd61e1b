from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from multinode.check.check import check_all
from multinode.check.connectivity import Attempted, ConnectivityResult
from multinode.check.interfaces import (
    check_hostnames,
    check_media,
    check_routes,
    check_subnets,
    check_unset_interface,
)
from multinode.check.rule import Inspection
from multinode.cluster.cluster import Node
from multinode.cluster.dataplane import Endpoint
from multinode.cluster.facts import UNASKED, Interface, Route
from multinode.stats.unknown import Unknown, or_empty
from tests import make

from .inspecting import but, expect, inspection, only, silent

LOOPBACK = Interface(name="lo", addresses=("127.0.0.1/8",), up=True, running=True, kind="loopback")
DOCKER = Interface(name="docker0", addresses=("172.17.0.1/16",), running=False, kind="bridge", driver="bridge")
BRIDGE = Interface(name="br-1a2b3c", addresses=("172.18.0.1/16",), up=True, running=True, kind="bridge")
TUNNEL = Interface(name="wg0", addresses=("10.9.0.1/24",), up=True, running=True, kind="virtual", driver="wireguard")


def nic(name: str, address: str, **more: Any) -> Interface:
    return Interface(name=name, addresses=(address,), up=True, running=True, **more)


def two(*nics: Interface, routes: tuple[Route, ...] = (), **facts: Any) -> Inspection:
    """Nodes a and b with addr= in the hostfile; a has these NICs beside its data plane, 10.0.0.1 on eth0."""
    nodes = tuple(Node(name=name, addr=f"10.0.0.{number}") for number, name in enumerate("ab", 1))
    well = inspection(cluster=make.cluster(*nodes))
    mine = or_empty(well.facts["a"].interfaces)
    return but(well, "a", interfaces=(LOOPBACK, *nics, *mine), routes=routes, **facts)


def everywhere(before: Inspection, **changes: Any) -> Inspection:
    return but(before, before.facts, **changes)


def unsettled(before: Inspection) -> Inspection:
    return replace(before, endpoints={})


def met(before: Inspection) -> Inspection:
    """The same after a has reached b."""
    attempt = Attempted(node="a", peer="b", addr="10.0.0.2", port=29500)
    return replace(before, connectivity=ConnectivityResult(attempts=(attempt,)))


def test_nodes_that_are_well_have_no_findings() -> None:
    good = two(DOCKER, routes=(Route(peer="10.0.0.1", source="10.0.0.1"), Route(peer="10.0.0.2", source="10.0.0.1")))
    good = everywhere(good, nccl_version="2.27.5")
    assert [one for one in check_all(good) if one.code in {"interface", "hostname"}] == []


def test_a_node_alone_has_no_network_to_judge() -> None:
    alone = but(
        inspection("a"), "a", interfaces=(LOOPBACK, BRIDGE), hostname_address="127.0.1.1", nccl_version="2.27.5"
    )
    alone = replace(alone, endpoints={"a": Endpoint(addr="127.0.0.1", ifname="lo")})
    assert [one for one in check_all(alone) if one.code in {"interface", "hostname"}] == []


def test_the_only_node_that_answers_is_not_judged_by_its_loopback() -> None:
    lone = two(BRIDGE, hostname_address="127.0.1.1", nccl_version="2.27.5")
    lone = replace(lone, facts={"a": lone.facts["a"]}, endpoints={"a": Endpoint(addr="127.0.0.1", ifname="lo")})
    assert [one for one in check_all(lone) if one.code in {"interface", "hostname"}] == []


def test_no_route_to_a_peer_comes_with_the_command_that_makes_one() -> None:
    expect(
        check_routes(two(routes=(Route(peer="10.0.0.2", source=Unknown("Network is unreachable")),))),
        "error",
        "a",
        "no route to b (10.0.0.2: Network is unreachable)",
        check="interface",
        hint="on a:\nsudo ip route replace 10.0.0.0/24 dev eth0 src 10.0.0.1",
    )


def test_what_is_no_address_is_no_missing_route() -> None:
    nodes = (Node(name="a", addr="10.0.0.1"), Node(name="b", addr="b.example"))
    routes = (Route(peer="b.example", source=Unknown("not an IPv4 address")),)
    silent(check_routes(but(inspection(cluster=make.cluster(*nodes)), "a", routes=routes)))


ASTRAY = (Route(peer="10.0.0.2", source="192.0.2.7", ifname="eth1"),)


def test_a_route_from_a_network_that_the_peer_is_not_in_is_an_error() -> None:
    expect(
        check_routes(two(nic("eth1", "192.0.2.7/24"), routes=ASTRAY)),
        "error",
        "a",
        "listens at 10.0.0.1 (eth0) and sends to b from 192.0.2.7 (eth1)",
        hint="sudo ip route replace 10.0.0.0/24 dev eth0 src 10.0.0.1",
    )


def test_a_route_over_another_network_that_both_share_or_that_works_is_a_warning() -> None:
    astray = two(nic("eth1", "192.0.2.7/24"), routes=ASTRAY)
    assert only(check_routes(met(astray))).severity == "warning"
    theirs = or_empty(astray.facts["b"].interfaces)
    shared = but(astray, "b", interfaces=(*theirs, nic("eth1", "192.0.2.8/24")))
    finding = only(check_routes(shared))
    assert finding.severity == "warning"
    assert "half of the traffic" in finding.message


def test_the_right_address_that_is_sent_out_by_another_nic_is_a_warning() -> None:
    astray = (Route(peer="10.0.0.2", source="10.0.0.1", ifname="eth1"),)
    expect(check_routes(two(nic("eth1", "192.0.2.7/24"), routes=astray)), "warning", "a", "(eth1)")
    well = (Route(peer="10.0.0.2", source="10.0.0.1", ifname="eth0"),)
    silent(check_routes(two(nic("eth1", "192.0.2.7/24"), routes=well)))


def test_the_way_to_a_peer_in_another_subnet_needs_a_router() -> None:
    nodes = (Node(name="a", addr="10.0.0.1"), Node(name="b", addr="10.0.7.2"))
    far = but(two(), "b", interfaces=(nic("eth0", "10.0.7.2/24"),))
    far = replace(far, cluster=make.cluster(*nodes))
    finding = only(
        check_routes(but(far, "a", routes=(Route(peer="10.0.7.2", source=Unknown("Network is unreachable")),)))
    )
    assert "on a (ROUTER: the gateway in the network of eth0):\nsudo ip route replace 10.0.7.0/24 via ROUTER" in str(
        finding.hint
    )


def test_peers_that_are_sent_to_in_the_same_wrong_way_are_one_finding() -> None:
    nodes = tuple(Node(name=name, addr=f"10.0.0.{number}") for number, name in enumerate("abc", 1))
    routes = tuple(Route(peer=f"10.0.0.{number}", source=Unknown("Network is unreachable")) for number in (2, 3))
    many = inspection("abc", cluster=make.cluster(*nodes))
    assert "no route to b and c" in only(check_routes(but(many, "a", routes=routes))).message


def test_two_nics_in_one_subnet_are_told_once_and_by_name() -> None:
    routes = (Route(peer="10.0.0.2", source="10.0.0.9", ifname="eth1"),)
    twice = two(nic("eth1", "10.0.0.9/24"), routes=routes)
    silent(check_routes(twice))
    expect(
        check_subnets(twice),
        "warning",
        "a",
        "eth0 and eth1 are both in 10.0.0.0/24",
        hint="sudo ip address del 10.0.0.9/24 dev eth1",
    )


def test_the_address_that_ssh_came_over_is_not_to_be_taken_away() -> None:
    finding = only(check_subnets(two(nic("eth1", "10.0.0.9/24"), ssh_address="10.0.0.9")))
    assert "address del" not in str(finding.hint)


def test_a_nic_that_is_down_and_a_second_address_share_no_subnet() -> None:
    down = Interface(name="eth1", addresses=("10.0.0.9/24",), up=False)
    silent(check_subnets(two(down)))
    second = Interface(name="eth0", addresses=("10.0.0.1/24", "10.0.0.8/24"), up=True)
    silent(check_subnets(but(two(), "a", interfaces=(LOOPBACK, second))))


def test_what_nccl_would_take_by_itself_is_one_note_for_all_nodes() -> None:
    settled = everywhere(two(), interfaces=(LOOPBACK, BRIDGE, nic("eth0", "10.0.0.1/24")), nccl_version="2.27.5")
    expect(
        check_unset_interface(settled),
        "note",
        None,
        "NCCL 2.27.5 would use br-1a2b3c and eth0 on a and b, but br-1a2b3c does not reach the other nodes",
        hint="export NCCL_SOCKET_IFNAME==eth0",
    )


def test_without_a_settled_interface_it_is_a_warning() -> None:
    expect(
        check_unset_interface(unsettled(two(TUNNEL, nccl_version="2.27.5"))),
        "warning",
        "a",
        "wg0 and eth0",
        hint="ifname=",
    )


def test_a_virtual_interface_that_nccl_passes_over_is_no_matter() -> None:
    virbr = Interface(name="virbr0", addresses=("192.168.122.1/24",), up=True, running=True, kind="bridge")
    silent(check_unset_interface(two(virbr, nccl_version="2.28.3")))
    assert "virbr0" in only(check_unset_interface(two(virbr, nccl_version="2.27.5"))).message
    silent(check_unset_interface(two(DOCKER, nccl_version="2.27.5")), check_unset_interface(two(BRIDGE)))


@pytest.mark.parametrize("name", ["br0", "vmbr0", "bond0"])
def test_a_bridge_that_has_the_machines_nic_is_not_called_a_dead_end(name: str) -> None:
    bridge = nic(name, "192.0.2.1/24", kind="bridge")
    silent(check_unset_interface(two(bridge, nccl_version="2.27.5")))


def test_a_data_plane_over_wireless_or_a_tunnel_names_the_wired_nic() -> None:
    wired = nic("eno1", "192.0.2.7/24")
    radio = nic("wlan0", "10.0.0.1/24", kind="wireless")
    on_radio = replace(
        but(two(), "a", interfaces=(LOOPBACK, DOCKER, radio, wired)),
        endpoints={"a": Endpoint(addr="10.0.0.1", ifname="wlan0"), "b": Endpoint(addr="10.0.0.2", ifname="eth0")},
    )
    expect(check_media(on_radio), "warning", "a", "wireless", check="interface", hint="a has: eno1 (192.0.2.7)")
    tunnel = replace(
        but(two(), "a", interfaces=(LOOPBACK, TUNNEL)), endpoints={"a": Endpoint(addr="10.9.0.1", ifname="wg0")}
    )
    finding = only(check_media(tunnel))
    assert "VPN or tunnel (wireguard)" in finding.message
    assert "connect the nodes by cable" in str(finding.hint)


@pytest.mark.parametrize("driver", [None, "veth", "bond", "vlan", "macvlan"])
def test_software_that_leads_to_a_cable_is_no_tunnel(driver: str | None) -> None:
    silent(check_media(but(two(), "a", interfaces=(nic("eth0", "10.0.0.1/24", driver=driver),))))


def test_names_that_resolve_to_loopback_are_one_note_where_the_interface_is_settled() -> None:
    expect(
        check_hostnames(everywhere(two(), hostname_address="127.0.1.1")),
        "note",
        None,
        "the name of a and b resolves to 127.0.1.1, which is loopback",
        check="hostname",
        hint="export GLOO_SOCKET_IFNAME=eth0",
    )


def test_and_a_warning_where_it_is_not() -> None:
    expect(check_hostnames(unsettled(two(hostname_address="127.0.1.1"))), "warning", "a")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"hostname_address": Unknown("Name or service not known")}, "no address (Name or service not known)"),
        ({"hostname_address": "203.0.113.5"}, "203.0.113.5, which is no address of the node"),
        ({"hostname_address": "172.17.0.1"}, "172.17.0.1, which is on docker0"),
        ({"hostname_address": "nonsense"}, "nonsense"),
    ],
)
def test_names_that_lead_elsewhere(facts: dict[str, Any], words: str) -> None:
    assert words in only(check_hostnames(two(DOCKER, **facts))).message


@pytest.mark.parametrize("address", ["10.0.0.1", "192.0.2.7", UNASKED])
def test_a_name_that_resolves_to_a_nic_of_the_node_or_was_not_asked_for_is_well(address: str | Unknown) -> None:
    silent(check_hostnames(two(nic("eth1", "192.0.2.7/24"), hostname_address=address)))


def test_a_tunnel_that_is_the_data_plane_is_told_by_its_own_rule_alone() -> None:
    on_tunnel = but(two(), "a", interfaces=(LOOPBACK, TUNNEL), nccl_version="2.27.5", hostname_address="10.9.0.1")
    on_tunnel = replace(on_tunnel, endpoints={"a": Endpoint(addr="10.9.0.1", ifname="wg0")})
    silent(check_unset_interface(on_tunnel), check_hostnames(on_tunnel))
    assert "wg0" in only(check_media(on_tunnel)).message
