from __future__ import annotations

import msgspec

from multinode.cluster.cluster import Node
from multinode.cluster.dataplane import Endpoint, choose_endpoints
from multinode.cluster.facts import Interface, NodeFacts, RdmaPort
from multinode.stats.unknown import or_unknown
from tests import make
from tests.golden import Golden, error_of

LOOPBACK = Interface(name="lo", addresses=("127.0.0.1/8",), up=True, kind="loopback")
DOCKER = Interface(name="docker0", addresses=("172.17.0.1/16",), up=True, kind="bridge")


def nic(name: str, address: str, *, gbit: float | None = None, up: bool = True) -> Interface:
    return Interface(name=name, addresses=(address,), up=up, speed_gbit_per_s=gbit)


def facts(name: str, *interfaces: Interface, ssh: str | None = None) -> NodeFacts:
    address = or_unknown(ssh, "SSH_CONNECTION is not set")
    return NodeFacts(node=name, interfaces=(LOOPBACK, DOCKER, *interfaces), ssh_address=address)


def choose(nodes: list[Node], *found: NodeFacts) -> list[tuple[str | None, str | None]]:
    endpoints = choose_endpoints(make.cluster(*nodes), {fact.node: fact for fact in found})
    return [(endpoint.addr, endpoint.ifname) for endpoint in endpoints]


A, B = Node(name="a"), Node(name="b")


def test_the_one_network_in_common_is_taken_though_the_interfaces_have_other_names() -> None:
    assert choose([A, B], facts("a", nic("eno1", "10.0.0.1/24")), facts("b", nic("enp5s0", "10.0.0.2/24"))) == [
        ("10.0.0.1", "eno1"),
        ("10.0.0.2", "enp5s0"),
    ]


def test_of_two_networks_the_faster_is_taken_by_its_slowest_nic() -> None:
    fast_here_only = facts("a", nic("eth0", "10.0.0.1/24", gbit=1), nic("eth1", "10.1.0.1/24", gbit=100))
    found = facts("b", nic("eth0", "10.0.0.2/24", gbit=1), nic("eth1", "10.1.0.2/24", gbit=0.1))
    assert choose([A, B], fast_here_only, found)[0] == ("10.0.0.1", "eth0")
    both_fast = facts("b", nic("eth0", "10.0.0.2/24", gbit=1), nic("eth1", "10.1.0.2/24", gbit=10))
    assert choose([A, B], fast_here_only, both_fast) == [("10.1.0.1", "eth1"), ("10.1.0.2", "eth1")]


def test_among_networks_of_one_speed_the_one_that_ssh_came_over_is_taken() -> None:
    first = facts("a", nic("eth0", "10.0.0.1/24"), nic("eth1", "10.1.0.1/24"), ssh="10.1.0.1")
    second = facts("b", nic("eth0", "10.0.0.2/24"), nic("eth1", "10.1.0.2/24"), ssh="10.1.0.2")
    assert choose([A, B], first, second) == [("10.1.0.1", "eth1"), ("10.1.0.2", "eth1")]


def both(name: str, host: int, ssh: str | None = None) -> NodeFacts:
    addresses = (f"10.0.0.{host}/24", f"fd00::{host}/64")
    return facts(name, Interface(name="eth0", addresses=addresses, up=True), ssh=ssh)


def test_of_a_nic_with_addresses_of_both_kinds_ipv4_is_taken_unless_the_hostfile_says_otherwise() -> None:
    found = both("a", 1, "fd00::1"), both("b", 2, "fd00::2")
    assert choose([A, B], *found) == [("10.0.0.1", "eth0"), ("10.0.0.2", "eth0")]
    named = [Node(name=name, addr=f"fd00::{host}") for name, host in (("a", 1), ("b", 2))]
    assert choose(named, *found) == [("fd00::1", "eth0"), ("fd00::2", "eth0")]


def test_a_network_of_ipv6_alone_is_found() -> None:
    found = facts("a", nic("eth0", "fd00::1/64")), facts("b", nic("eth0", "fd00::2/64"))
    assert choose([A, B], *found) == [("fd00::1", "eth0"), ("fd00::2", "eth0")]


def test_a_nic_that_is_down_is_passed_over() -> None:
    first = facts("a", nic("eth0", "10.0.0.1/24", gbit=100, up=False), nic("eth1", "10.1.0.1/24"))
    second = facts("b", nic("eth0", "10.0.0.2/24", gbit=100), nic("eth1", "10.1.0.2/24"))
    assert choose([A, B], first, second) == [("10.1.0.1", "eth1"), ("10.1.0.2", "eth1")]


def test_an_address_of_the_hostfile_brings_its_interface_and_its_speed() -> None:
    node = Node(name="a", addr="10.1.0.1")
    found = facts("a", nic("eth0", "10.0.0.1/24", gbit=1), nic("eth1", "10.1.0.1/24", gbit=25))
    endpoints = choose_endpoints(make.cluster(node, Node(name="b", addr="10.1.0.2")), {"a": found})
    assert endpoints[0] == Endpoint(addr="10.1.0.1", ifname="eth1", link_gbit_per_s=25)


def test_an_interface_of_the_hostfile_brings_its_address_even_where_it_is_a_bridge() -> None:
    assert choose([Node(name="a", ifname="docker0")], facts("a")) == [("172.17.0.1", "docker0")]


def test_one_node_that_names_its_address_tells_the_others_which_network_it_is() -> None:
    named = Node(name="a", addr="10.1.0.1")
    first = facts("a", nic("eth0", "10.0.0.1/24", gbit=10), nic("eth1", "10.1.0.1/24", gbit=1))
    second = facts("b", nic("eth0", "10.0.0.2/24", gbit=10), nic("eth1", "10.1.0.2/24", gbit=1))
    assert choose([named, B], first, second) == [("10.1.0.1", "eth1"), ("10.1.0.2", "eth1")]


RAILS = (nic("ens1f0", "10.1.0.1/24", gbit=100), nic("ens1f1", "10.2.0.1/24", gbit=100))


def test_of_several_interfaces_the_first_that_is_named_has_the_address_and_all_are_kept() -> None:
    node = Node(name="a", ifname="ens1f1,ens1f0")
    place, _ = choose_endpoints(make.cluster(node, B), {"a": facts("a", *RAILS)})
    assert (place.addr, place.ifname, place.ifnames) == ("10.2.0.1", "ens1f1", ("ens1f1", "ens1f0"))
    # addr= may be on any of them.
    placed = msgspec.structs.replace(node, addr="10.1.0.1")
    place, _ = choose_endpoints(make.cluster(placed, B), {"a": facts("a", *RAILS)})
    assert (place.addr, place.ifname) == ("10.1.0.1", "ens1f0")
    (unprobed,) = choose_endpoints(make.cluster(node), {})
    assert unprobed.ifnames == ("ens1f1", "ens1f0")


def test_the_others_join_the_network_of_the_first_interface_that_a_node_names() -> None:
    found = facts("b", nic("ens1f0", "10.1.0.2/24", gbit=200), nic("ens1f1", "10.2.0.2/24", gbit=10))
    assert choose([Node(name="a", ifname="ens1f1,ens1f0"), B], facts("a", *RAILS), found)[1] == ("10.2.0.2", "ens1f1")


def test_what_the_node_does_not_have_is_refused_with_what_it_has(golden: Golden) -> None:
    eno1 = facts("a", nic("eno1", "10.0.0.1/24")), facts("b", nic("eno1", "10.0.0.2/24"))
    ports = tuple(RdmaPort(device=device, port=1) for device in ("mlx5_0", "mlx5_1"))
    railed = msgspec.structs.replace(facts("a", *RAILS), rdma=ports)
    lines: dict[str, tuple[Node, tuple[NodeFacts, ...]]] = {
        "another address": (Node(name="a", addr="10.0.0.9"), eno1),
        "another interface": (Node(name="a", ifname="ens1f0"), eno1),
        "the address of another interface": (Node(name="a", addr="10.0.0.1", ifname="ens1f0"), eno1),
        "one interface of two": (Node(name="a", ifname="ens1f0,ens9"), (railed,)),
        "one interface of two, and an address": (Node(name="a", addr="10.1.0.1", ifname="ens1f0,ens9"), (railed,)),
        "one RDMA device of two": (Node(name="a", hca="mlx5_0,mlx5_2"), (railed,)),
        "a second port": (Node(name="a", hca="mlx5_0:2"), (railed,)),
        "an RDMA device, and there is none": (Node(name="a", hca="mlx5_0"), (facts("a", *RAILS),)),
        # Docker and loopback are on every node, and join none.
        "no network in common": (A, (facts("a", nic("eno1", "10.0.0.1/24")), facts("b", nic("eno1", "10.0.9.2/24")))),
    }
    golden.check_errors(
        "dataplane", {case: error_of(choose, [node, B], *found) for case, (node, found) in lines.items()}
    )
    whole = Node(name="a", ifname="ens1f0,ens1f1", hca="mlx5_0:1,mlx5_1")
    assert choose([whole, B], railed)[0] == ("10.1.0.1", "ens1f0")


def test_a_node_alone_talks_to_itself_over_loopback() -> None:
    assert choose([A], facts("a", nic("eno1", "10.0.0.1/24"))) == [("127.0.0.1", "lo")]
    assert choose([A]) == [("127.0.0.1", "lo")]


def test_without_a_probe_the_hostfile_is_believed_and_every_gap_is_named() -> None:
    nodes = (Node(name="a", addr="10.0.0.1", ifname="ens1f0"), Node(name="b"))
    full, bare = choose_endpoints(make.cluster(*nodes), {})
    assert full == Endpoint(addr="10.0.0.1", ifname="ens1f0")
    assert (bare.addr, bare.ifname) == ("b", None)
    assert [text.split(":")[0] for text in bare.assumed] == ["addr", "ifname"]
