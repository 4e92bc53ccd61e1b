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
from tests.golden import Golden

from .inspecting import but, check_cases, inspection, only, silent

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


UNREACHABLE = Unknown("Network is unreachable")


def routed(names: str, addr_of_b: str = "10.0.0.2") -> Inspection:
    """Nodes with addr= in the hostfile; a has no route to the others."""
    addresses = {"a": "10.0.0.1", "b": addr_of_b, "c": "10.0.0.3"}
    nodes = tuple(Node(name=name, addr=addresses[name]) for name in names)
    routes = tuple(Route(peer=addresses[name], source=UNREACHABLE) for name in names[1:])
    return but(inspection(names, cluster=make.cluster(*nodes)), "a", routes=routes)


SECOND = nic("eth1", "192.0.2.7/24")
ASTRAY = two(SECOND, routes=(Route(peer="10.0.0.2", source="192.0.2.7", ifname="eth1"),))
BY_ANOTHER_NIC = two(SECOND, routes=(Route(peer="10.0.0.2", source="10.0.0.1", ifname="eth1"),))
TWICE = two(nic("eth1", "10.0.0.9/24"), routes=(Route(peer="10.0.0.2", source="10.0.0.9", ifname="eth1"),))


def test_a_route_that_leads_astray_comes_with_the_command_that_mends_it(golden: Golden) -> None:
    shared = but(ASTRAY, "b", interfaces=(*or_empty(ASTRAY.facts["b"].interfaces), nic("eth1", "192.0.2.8/24")))
    far = but(routed("ab", "10.0.7.2"), "b", interfaces=(nic("eth0", "10.0.7.2/24"),))
    check_cases(
        golden,
        "interface_routes",
        {
            "no route": check_routes(routed("ab")),
            "no route to two": check_routes(routed("abc")),
            "no route to another subnet": check_routes(far),
            "from a network that the peer is not in": check_routes(ASTRAY),
            "from a network that the peer is not in, and it was reached": check_routes(met(ASTRAY)),
            "over another network that both share": check_routes(shared),
            "from the right address by another NIC": check_routes(BY_ANOTHER_NIC),
            "two NICs in one subnet": check_subnets(TWICE),
            "two NICs in one subnet, SSH over the second": check_subnets(
                two(nic("eth1", "10.0.0.9/24"), ssh_address="10.0.0.9")
            ),
        },
    )


def test_the_way_by_the_nic_for_data_or_another_checks_matter_is_no_finding() -> None:
    silent(check_routes(two(SECOND, routes=(Route(peer="10.0.0.2", source="10.0.0.1", ifname="eth0"),))))
    silent(check_routes(TWICE))


def test_what_is_no_address_is_no_missing_route() -> None:
    nodes = (Node(name="a", addr="10.0.0.1"), Node(name="b", addr="b.example"))
    routes = (Route(peer="b.example", source=Unknown("not an IPv4 address")),)
    silent(check_routes(but(inspection(cluster=make.cluster(*nodes)), "a", routes=routes)))


def test_a_nic_that_is_down_and_a_second_address_share_no_subnet() -> None:
    down = Interface(name="eth1", addresses=("10.0.0.9/24",), up=False)
    silent(check_subnets(two(down)))
    second = Interface(name="eth0", addresses=("10.0.0.1/24", "10.0.0.8/24"), up=True)
    silent(check_subnets(but(two(), "a", interfaces=(LOOPBACK, second))))


VIRBR = Interface(name="virbr0", addresses=("192.168.122.1/24",), up=True, running=True, kind="bridge")


def on(interface: str, addr: str, *nics: Interface, **facts: Any) -> Inspection:
    """The data plane of a is this one of its interfaces."""
    known = but(two(), "a", interfaces=(LOOPBACK, *nics), **facts)
    return replace(known, endpoints={**known.endpoints, "a": Endpoint(addr=addr, ifname=interface)})


def test_an_interface_that_leads_elsewhere_or_is_slow_is_told_by_name(golden: Golden) -> None:
    settled = everywhere(two(), interfaces=(LOOPBACK, BRIDGE, nic("eth0", "10.0.0.1/24")), nccl_version="2.27.5")
    radio = nic("wlan0", "10.0.0.1/24", kind="wireless")
    check_cases(
        golden,
        "interface_choice",
        {
            "NCCL would take a bridge too": check_unset_interface(settled),
            "NCCL would take a tunnel too, and none is settled": check_unset_interface(
                unsettled(two(TUNNEL, nccl_version="2.27.5"))
            ),
            "NCCL would take libvirt's": check_unset_interface(two(VIRBR, nccl_version="2.27.5")),
            "the data goes over Wi-Fi, with a cable beside it": check_media(
                on("wlan0", "10.0.0.1", DOCKER, radio, nic("eno1", "192.0.2.7/24"))
            ),
            "data go through a tunnel": check_media(on("wg0", "10.9.0.1", TUNNEL)),
        },
    )


def test_a_virtual_interface_that_nccl_passes_over_is_no_matter() -> None:
    silent(check_unset_interface(two(VIRBR, nccl_version="2.28.3")))
    silent(check_unset_interface(two(DOCKER, nccl_version="2.27.5")), check_unset_interface(two(BRIDGE)))


@pytest.mark.parametrize("name", ["br0", "vmbr0", "bond0"])
def test_a_bridge_that_has_the_machines_nic_is_not_called_a_dead_end(name: str) -> None:
    bridge = nic(name, "192.0.2.1/24", kind="bridge")
    silent(check_unset_interface(two(bridge, nccl_version="2.27.5")))


@pytest.mark.parametrize("driver", [None, "veth", "bond", "vlan", "macvlan"])
def test_software_that_leads_to_a_cable_is_no_tunnel(driver: str | None) -> None:
    silent(check_media(but(two(), "a", interfaces=(nic("eth0", "10.0.0.1/24", driver=driver),))))


def test_a_name_of_a_node_that_leads_elsewhere_is_told(golden: Golden) -> None:
    check_cases(
        golden,
        "hostname",
        {
            "loopback": check_hostnames(everywhere(two(), hostname_address="127.0.1.1")),
            "loopback, and no interface is settled": check_hostnames(unsettled(two(hostname_address="127.0.1.1"))),
            "no address": check_hostnames(two(hostname_address=Unknown("Name or service not known"))),
            "an address of another machine": check_hostnames(two(hostname_address="203.0.113.5")),
            "Docker's bridge": check_hostnames(two(DOCKER, hostname_address="172.17.0.1")),
            "what is no address": check_hostnames(two(hostname_address="nonsense")),
        },
    )


@pytest.mark.parametrize("address", ["10.0.0.1", "192.0.2.7", UNASKED])
def test_a_name_that_resolves_to_a_nic_of_the_node_or_was_not_asked_for_is_well(address: str | Unknown) -> None:
    silent(check_hostnames(two(nic("eth1", "192.0.2.7/24"), hostname_address=address)))


def test_a_tunnel_that_is_the_data_plane_is_told_by_its_own_rule_alone() -> None:
    on_tunnel = on("wg0", "10.9.0.1", TUNNEL, nccl_version="2.27.5", hostname_address="10.9.0.1")
    on_tunnel = replace(on_tunnel, endpoints={"a": on_tunnel.endpoints["a"]})
    silent(check_unset_interface(on_tunnel), check_hostnames(on_tunnel))
    assert only(check_media(on_tunnel)).node == "a"
