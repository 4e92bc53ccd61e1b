from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from multinode.check.link import check_link_up, check_links
from multinode.check.rule import Inspection
from multinode.cluster.dataplane import Endpoint
from multinode.stats.unknown import or_empty

from .inspecting import but, expect, inspection, only, silent

CHECKS = (check_link_up, check_links, check_links, check_links)


def linked(known: Inspection, name: str, /, **changes: Any) -> Inspection:
    """The same with another NIC in one node."""
    (nic,) = or_empty(known.facts[name].interfaces)
    return but(known, name, interfaces=(replace(nic, **changes),))


def test_links_that_are_well_have_no_finding() -> None:
    veth = linked(inspection(), "b", driver="veth", nic_gbit_per_s=None, running=True, duplex="full", errors=0)
    silent = linked(inspection(), "b", speed_gbit_per_s=None, mtu=None)
    for known in (inspection(), inspection("a"), inspection(facts={}), inspection(endpoints={}), veth, silent):
        assert [list(check(known)) for check in CHECKS] == [[]] * len(CHECKS)


def test_one_node_alone_needs_no_nic() -> None:
    alone = linked(inspection("a"), "a", name="lo", kind="loopback", up=False)
    alone = replace(alone, endpoints={"a": Endpoint(addr="127.0.0.1", ifname="lo")})
    silent(check_link_up(alone))


def test_a_nic_without_a_link_is_an_error() -> None:
    expect(
        check_link_up(linked(inspection(), "b", up=False)),
        "error",
        "b",
        "eth0, the training interface, is down",
        hint="ip link set dev eth0 up",
    )
    assert only(check_link_up(linked(inspection(), "b", running=False))).node == "b"


def test_a_nic_that_could_do_more_is_told() -> None:
    expect(
        check_links(linked(inspection(), "b", nic_gbit_per_s=10.0)),
        "warning",
        "b",
        "runs at 1 Gbit/s, but the NIC supports 10 Gbit/s",
        hint="ethtool eth0",
    )
    silent(check_links(linked(inspection(), "b", nic_gbit_per_s=1.0)))


def test_the_slowest_node_is_told_and_the_fast_ones_are_not() -> None:
    expect(
        check_links(linked(inspection("abc"), "b", speed_gbit_per_s=0.1)),
        "warning",
        "b",
        "runs at 100 Mbit/s, the link of a at 1 Gbit/s",
    )


def test_half_duplex_is_told() -> None:
    finding = only(check_links(linked(inspection(), "b", duplex="half")))
    assert (finding.severity, "half duplex" in finding.message) == ("warning", True)


def test_the_odd_mtu_is_told_with_the_command_that_changes_it() -> None:
    known = linked(linked(inspection("abc"), "a", mtu=9000), "c", mtu=9000)
    expect(check_links(known), "warning", "b", "has MTU 1500, and a has 9000", hint="ip link set dev eth0 mtu 9000")
    two = only(check_links(linked(inspection(), "b", mtu=9000)))
    assert (two.node, "and a has 1500" in two.message) == ("b", True)


def test_errors_matter_by_their_rate_and_their_number() -> None:
    finding = only(check_links(linked(inspection(), "b", errors=5000, packets=10**8)))
    assert (finding.severity, "5000 errors in 100000000 packets" in finding.message) == ("warning", True)
    for errors, packets in ((5000, 10**11), (50, 1000), (None, None)):
        silent(check_links(linked(inspection(), "b", errors=errors, packets=packets)))


def test_every_nic_that_the_hostfile_names_is_compared_with_those_of_its_rank() -> None:
    known = inspection("abc")
    places = {name: replace(place, ifnames=("eth0", "eth1")) for name, place in known.endpoints.items()}
    known = replace(known, endpoints=places)
    for name in "abc":
        (first,) = or_empty(known.facts[name].interfaces)
        second = replace(first, name="eth1", addresses=(), mtu=9000, speed_gbit_per_s=10.0)
        known = but(known, name, interfaces=(first, second))
    silent(check_links(known), check_link_up(known))

    def second_of_b(**changes: Any) -> Inspection:
        first, second = or_empty(known.facts["b"].interfaces)
        return but(known, "b", interfaces=(first, replace(second, **changes)))

    expect(
        check_links(second_of_b(mtu=1500)),
        "warning",
        "b",
        "eth1 has MTU 1500, and a has 9000",
        hint="dev eth1 mtu 9000",
    )
    expect(check_links(second_of_b(speed_gbit_per_s=1.0)), "warning", "b", "eth1 runs at 1 Gbit/s", hint="cable")
    expect(check_link_up(second_of_b(up=False)), "error", "b", "eth1, the training interface, is down", hint="dev eth1")
    # One that is not there is another check's business.
    silent(check_links(second_of_b(name="eth7")), check_link_up(second_of_b(name="eth7")))


def test_the_first_nic_of_the_hostfile_is_looked_at_also_where_the_address_is_on_the_second() -> None:
    known = inspection()
    (first,) = or_empty(known.facts["a"].interfaces)
    place = replace(known.endpoints["a"], ifname="eth1", ifnames=("eth0", "eth1"))
    known = replace(known, endpoints=known.endpoints | {"a": place})
    known = but(known, "a", interfaces=(replace(first, mtu=9000), replace(first, name="eth1", mtu=4000)))
    assert [(nics["a"].name, "b" in nics) for nics in known.rails] == [("eth0", True), ("eth1", False)]
