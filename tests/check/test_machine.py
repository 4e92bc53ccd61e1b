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
from tests.golden import Golden

from .inspecting import but, check_cases, inspection, silent


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


def bridged(addr: str = "172.17.0.3", **changes: Any) -> Inspection:
    nic = Interface(name="eth0", addresses=(f"{addr}/16",), up=True, driver="veth")
    endpoints = {"a": Endpoint(addr="172.17.0.2", ifname="eth0"), "b": Endpoint(addr=addr, ifname="eth0")}
    facts: dict[str, Any] = {"container": "docker", "interfaces": (nic,), **changes}
    return but(inspection(endpoints=endpoints), "b", **facts)


def clocks(*offsets: float | Unknown) -> Inspection:
    known = inspection("abc"[: len(offsets)])
    for name, offset in zip("abc", offsets, strict=False):
        known = but(known, name, clock_offset_s=offset)
    return known


def test_nodes_that_are_no_machines_of_their_own_or_disagree_on_the_time_are_found(golden: Golden) -> None:
    same = booted(inspection(), a=("1", "gpu1", "m"), b=("1", "gpu1", "m"))
    check_cases(
        golden,
        "machine",
        {
            "one machine is listed twice": check_same_machine(same),
            "one machine by its id": check_same_machine(
                booted(inspection(), a=("1", "gpu1", "m"), b=("1", "gpu1.lan", "m"))
            ),
            "one machine by its name": check_same_machine(
                booted(inspection(), a=("1", "gpu1", None), b=("1", "gpu1", None))
            ),
            "two containers of one machine": check_same_machine(
                booted(inspection(), a=("1", "c1", None), b=("1", "c2", None))
            ),
            "a container on Docker's bridge": check_container_network(bridged()),
            "a clock that is ahead": check_clocks(clocks(0.0, 5.25)),
            "a clock that is an hour behind": check_clocks(clocks(-3600.0, 0.0)),
            "this machine is alone with its time": check_clocks(clocks(30.0, 30.1, 29.8)),
            "this machine and c are alone with their time": check_clocks(clocks(30.0, 30.0, 90.0)),
            "two nodes are apart, each near to this machine": check_clocks(clocks(-1.5, 1.5)),
        },
    )


def test_two_containers_of_one_machine_may_have_gpus_of_their_own() -> None:
    hostfile = make.cluster(Node(name="a", gpus=(0,)), Node(name="b", gpus=(1,)))
    silent(check_same_machine(booted(inspection(cluster=hostfile), a=("1", "c1", None), b=("1", "c1", None))))


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


@pytest.mark.parametrize("offsets", [(0.0, 0.0), (1.2, 0.0, -0.7), (UNASKED, UNASKED), (UNASKED, 1.9)])
def test_clocks_that_agree_have_no_finding(offsets: tuple[float | Unknown, ...]) -> None:
    silent(check_clocks(clocks(*offsets)))
