from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from multinode.check.link import check_link_up, check_links
from multinode.check.rule import Inspection
from multinode.cluster.dataplane import Endpoint
from multinode.stats.unknown import or_empty
from tests.golden import Golden

from .inspecting import but, check_cases, inspection, silent

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


def two_nics() -> Inspection:
    """Nodes with a second, faster NIC, which the hostfile names too."""
    known = inspection("abc")
    places = {name: replace(place, ifnames=("eth0", "eth1")) for name, place in known.endpoints.items()}
    known = replace(known, endpoints=places)
    for name in "abc":
        (first,) = or_empty(known.facts[name].interfaces)
        second = replace(first, name="eth1", addresses=(), mtu=9000, speed_gbit_per_s=10.0)
        known = but(known, name, interfaces=(first, second))
    return known


def second_of_b(**changes: Any) -> Inspection:
    known = two_nics()
    first, second = or_empty(known.facts["b"].interfaces)
    return but(known, "b", interfaces=(first, replace(second, **changes)))


def on_b(names: str = "ab", **changes: Any) -> Inspection:
    return linked(inspection(names), "b", **changes)


def test_what_is_wrong_with_a_link_is_found_on_its_node(golden: Golden) -> None:
    jumbo = linked(linked(inspection("abc"), "a", mtu=9000), "c", mtu=9000)
    check_cases(
        golden,
        "link",
        {
            "down": check_link_up(on_b(up=False)),
            "up, not running": check_link_up(on_b(running=False)),
            "slower than the NIC": check_links(on_b(nic_gbit_per_s=10.0)),
            "slower than the other nodes": check_links(on_b("abc", speed_gbit_per_s=0.1)),
            "half duplex": check_links(on_b(duplex="half")),
            "a smaller MTU than most": check_links(jumbo),
            "a larger MTU, of two nodes": check_links(on_b(mtu=9000)),
            "many errors": check_links(on_b(errors=5000, packets=10**8)),
            "the second NIC has another MTU": check_links(second_of_b(mtu=1500)),
            "the second NIC is slow": check_links(second_of_b(speed_gbit_per_s=1.0)),
            "the second NIC is down": check_link_up(second_of_b(up=False)),
        },
    )


def test_a_nic_at_its_own_rate_with_few_errors_for_its_packets_is_well() -> None:
    silent(check_links(on_b(nic_gbit_per_s=1.0)))
    for errors, packets in ((5000, 10**11), (50, 1000), (None, None)):
        silent(check_links(on_b(errors=errors, packets=packets)))


def test_every_nic_that_the_hostfile_names_is_compared_with_those_of_its_rank() -> None:
    silent(check_links(two_nics()), check_link_up(two_nics()))
    # One that is not there is another check's business.
    silent(check_links(second_of_b(name="eth7")), check_link_up(second_of_b(name="eth7")))


def test_the_first_nic_of_the_hostfile_is_looked_at_also_where_the_address_is_on_the_second() -> None:
    known = inspection()
    (first,) = or_empty(known.facts["a"].interfaces)
    place = replace(known.endpoints["a"], ifname="eth1", ifnames=("eth0", "eth1"))
    known = replace(known, endpoints=known.endpoints | {"a": place})
    known = but(known, "a", interfaces=(replace(first, mtu=9000), replace(first, name="eth1", mtu=4000)))
    assert [(nics["a"].name, "b" in nics) for nics in known.rails] == [("eth0", True), ("eth1", False)]
