from __future__ import annotations

from typing import Any

import pytest

from multinode.check.connectivity import Attempted, ConnectivityResult
from multinode.check.machine import check_clocks, check_container_network, check_same_machine
from multinode.check.rule import Inspection
from multinode.cluster.cluster import Node
from multinode.cluster.dataplane import Endpoint
from multinode.cluster.facts import UNASKED, Interface
from multinode.stats.unknown import Unknown, or_unknown
from tests import make

from .inspecting import but, expect, inspection, only, silent


def booted(known: Inspection, **boots: Any) -> Inspection:
    for name, (boot_id, hostname, machine_id) in boots.items():
        known = but(known, name, boot_id=boot_id, hostname=hostname, machine_id=or_unknown(machine_id))
    return known


def test_machines_of_their_own_have_no_finding() -> None:
    # Two copies of one image have one machine id, as the nodes of a lab do.
    known = booted(inspection(), a=("1", "gpu1", "m"), b=("2", "gpu2", "m"))
    silent(check_same_machine(known))
    unknown = booted(inspection(), a=(UNASKED,) * 3, b=(UNASKED,) * 3)
    silent(check_same_machine(unknown))


def test_a_machine_that_is_listed_twice_is_an_error_on_the_later_node() -> None:
    expect(
        check_same_machine(booted(inspection(), a=("1", "gpu1", "m"), b=("1", "gpu1", "m"))),
        "error",
        "b",
        "same machine as a (both are gpu1)",
    )
    by_id = booted(inspection(), a=("1", "gpu1", "m"), b=("1", "gpu1.lan", "m"))
    assert only(check_same_machine(by_id)).severity == "error"
    by_name = booted(inspection(), a=("1", "gpu1", None), b=("1", "gpu1", None))
    assert only(check_same_machine(by_name)).severity == "error"


def test_two_containers_of_one_machine_are_a_warning_unless_their_gpus_are_apart() -> None:
    known = booted(inspection(), a=("1", "c1", None), b=("1", "c2", None))
    expect(check_same_machine(known), "warning", "b", "c2 and c1")
    hostfile = make.cluster(Node(name="a", gpus=(0,)), Node(name="b", gpus=(1,)))
    apart = booted(inspection(cluster=hostfile), a=("1", "c1", None), b=("1", "c1", None))
    silent(check_same_machine(apart))


def bridged(addr: str = "172.17.0.3", **changes: Any) -> Inspection:
    nic = Interface(name="eth0", addresses=(f"{addr}/16",), up=True, driver="veth")
    endpoints = {"a": Endpoint(addr="172.17.0.2", ifname="eth0"), "b": Endpoint(addr=addr, ifname="eth0")}
    facts: dict[str, Any] = {"container": "docker", "interfaces": (nic,), **changes}
    return but(inspection(endpoints=endpoints), "b", **facts)


def test_a_container_on_dockers_bridge_is_a_warning() -> None:
    expect(check_container_network(bridged()), "warning", "b", "172.17.0.3", hint="--network=host")


@pytest.mark.parametrize(
    "known",
    [
        inspection(),
        bridged(container=UNASKED),
        bridged("10.0.0.2"),
        bridged(interfaces=(Interface(name="eth0", addresses=("172.17.0.3/16",), up=True, driver="mlx5_core"),)),
    ],
)
def test_other_containers_are_left_alone(known: Inspection) -> None:
    silent(check_container_network(known))


def test_a_container_that_was_reached_is_reachable() -> None:
    attempt = Attempted(node="a", peer="b", addr="172.17.0.3", port=29500)
    known = bridged()
    reached = inspection(
        endpoints=known.endpoints, facts=known.facts, connectivity=ConnectivityResult(attempts=(attempt,))
    )
    silent(check_container_network(reached))


def clocks(*offsets: float | Unknown) -> Inspection:
    known = inspection("abc"[: len(offsets)])
    for name, offset in zip("abc", offsets, strict=False):
        known = but(known, name, clock_offset_s=offset)
    return known


@pytest.mark.parametrize("offsets", [(0.0, 0.0), (1.2, 0.0, -0.7), (UNASKED, UNASKED), (UNASKED, 1.9)])
def test_clocks_that_agree_have_no_finding(offsets: tuple[float | Unknown, ...]) -> None:
    silent(check_clocks(clocks(*offsets)))


def test_a_clock_that_is_off_is_told_with_its_way() -> None:
    finding = expect(check_clocks(clocks(0.0, 5.25)), "warning", "b", "5.2 s ahead of this machine's", check="clock")
    assert finding.hint == "on b:\nsudo timedatectl set-ntp true"
    assert "1 h 00 min behind" in only(check_clocks(clocks(-3600.0, 0.0))).message


def test_a_controller_that_is_alone_with_its_time_is_the_one_that_is_wrong() -> None:
    finding = only(check_clocks(clocks(30.0, 30.1, 29.8)))
    assert (finding.node, "30.0 s behind those of the nodes" in finding.message) == (None, True)
    both = list(check_clocks(clocks(30.0, 30.0, 90.0)))
    assert [one.node for one in both] == [None, "c"]
    assert "1 min 00 s ahead of those of the other nodes" in both[1].message


def test_two_nodes_may_be_apart_while_each_is_near_the_controller() -> None:
    finding = only(check_clocks(clocks(-1.5, 1.5)))
    assert (finding.node, "3.0 s ahead of that of a" in finding.message) == ("b", True)
