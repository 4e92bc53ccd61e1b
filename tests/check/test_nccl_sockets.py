from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.check.ports import MAX_INTERFACES, select_interfaces, takes_by_prefix
from multinode.cluster.facts import Interface

NAMES = ["lo", "eth0", "eth1", "eth10", "docker0", "ens1f0"]

name = st.from_regex(r"[a-z][a-z0-9.-]{1,11}", fullmatch=True)
names = st.lists(name, max_size=6, unique=True)


def nic(ifname: str, *, running: bool | None = True, address: str | None = "10.0.0.1/24") -> Interface:
    return Interface(name=ifname, addresses=(address,) if address else (), up=True, running=running)


def taken(*interfaces: Interface, spec: str | None = None, version: str | None = "2.27.5") -> list[str]:
    return [one.name for one in select_interfaces(interfaces, spec, version)]


def matched(spec: str, present: Iterable[str]) -> list[str]:
    return taken(*map(nic, present), spec=spec)


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        ("eth1", ["eth1", "eth10"]),
        ("=eth1", ["eth1"]),
        ("=eth1,lo", ["lo", "eth1"]),
        ("eth0,ens", ["eth0", "ens1f0"]),
        ("^docker,lo", ["eth0", "eth1", "eth10", "ens1f0"]),
        ("^=eth1", ["lo", "eth0", "eth10", "docker0", "ens1f0"]),
        ("eth0:5000", ["eth0"]),
        ("eno1", []),
        (",,", NAMES),
        ("^,", []),
    ],
)
def test_the_signs_hold_for_the_whole_list_and_names_are_prefixes(spec: str, found: list[str]) -> None:
    assert matched(spec, NAMES) == found


@given(names.filter(bool), names)
def test_what_is_excluded_and_what_is_taken_are_all_there_is(listed: list[str], present: list[str]) -> None:
    spec = ",".join(listed)
    inside, outside = matched(spec, present), matched(f"^{spec}", present)
    assert sorted((*inside, *outside)) == sorted(present)


@given(name, names)
def test_an_exact_name_takes_itself_alone_and_a_prefix_at_least_that(wanted: str, present: list[str]) -> None:
    exact = matched(f"={wanted}", present)
    assert set(exact) == {wanted} & set(present)
    assert set(exact) <= set(matched(wanted, present))


@pytest.mark.parametrize(
    ("spec", "prefix"), [("eth1", True), ("=eth1", False), ("^=eth1", True), ("^lo", True), ("=", True)]
)
def test_only_an_exact_list_takes_no_more_than_it_names(spec: str, prefix: bool) -> None:  # noqa: FBT001 - a column
    assert takes_by_prefix(spec) is prefix


def test_infiniband_goes_first_and_alone() -> None:
    assert taken(nic("lo"), nic("eth0"), nic("ib0"), nic("ibs3")) == ["ib0", "ibs3"]


def test_all_but_docker_and_loopback_are_taken_together_with_what_nobody_meant() -> None:
    found = taken(nic("lo"), nic("docker0"), nic("eth0"), nic("br-1a2b"), nic("tailscale0"), nic("wg0"))
    assert found == ["eth0", "br-1a2b", "tailscale0", "wg0"]


def test_the_last_resorts_come_in_their_order() -> None:
    assert taken(nic("lo"), nic("docker0")) == ["docker0"]
    assert taken(nic("lo")) == ["lo"]
    assert taken(nic("lo"), nic("virbr0"), version="2.28.3") == ["lo"]
    assert taken(nic("virbr0"), version="2.28.3") == ["virbr0"]
    assert taken() == []


@pytest.mark.parametrize(
    ("version", "found"),
    [
        ("2.27.5", ["virbr0", "eth0", "eth1"]),
        ("2.28.2", ["virbr0", "eth0", "eth1"]),
        ("2.28.3", ["eth0"]),
        ("2.29.7", ["eth0"]),
        ("3.0.0", ["eth0"]),
        (None, ["virbr0", "eth0", "eth1"]),
        ("unheard-of", ["virbr0", "eth0", "eth1"]),
    ],
)
def test_libvirt_and_nics_without_a_cable_are_passed_over_only_since_2_28_3(
    version: str | None, found: list[str]
) -> None:
    assert taken(nic("virbr0"), nic("eth0"), nic("eth1", running=False), version=version) == found


def test_a_nic_that_does_not_tell_whether_it_is_running_counts_as_running() -> None:
    assert taken(nic("eth0", running=None), version="2.29.7") == ["eth0"]


def test_an_interface_without_an_address_does_not_count() -> None:
    assert taken(nic("ib0", address=None), nic("eth0")) == ["eth0"]
    assert taken(nic("eth1", address=None), spec="=eth1") == []


def test_a_value_is_obeyed_even_where_it_takes_docker_or_nothing() -> None:
    nics = (nic("lo"), nic("docker0"), nic("eth0"), nic("ib0"))
    assert taken(*nics, spec="docker") == ["docker0"]
    assert taken(*nics, spec="=eth1") == []


def test_a_value_of_one_character_is_no_value() -> None:
    assert taken(nic("lo"), nic("eth0"), spec="l") == ["eth0"]
    assert taken(nic("lo"), nic("eth0"), spec="") == ["eth0"]


def test_no_more_than_sixteen_are_taken() -> None:
    assert len(taken(*(nic(f"eth{number}") for number in range(20)))) == MAX_INTERFACES == 16
