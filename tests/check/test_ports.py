from __future__ import annotations

import msgspec
import pytest

from multinode.check.connectivity import Attempted, ConnectivityResult, Listening
from multinode.check.ports import check_master_port, check_ports
from multinode.check.rule import Inspection
from multinode.cluster.facts import Interface, PortFact
from multinode.stats.unknown import Unknown
from tests.golden import Golden

from .inspecting import but, check_cases, inspection, only, silent

PORTS = (29500, 34000, 45000)


def met(names: str = "ab", **failures: dict[int, str]) -> Inspection:
    """All pairs, where `ab={29500: "timed out"}` says how calls of a at b failed."""
    well = inspection(names)
    attempts = tuple(
        Attempted(node=caller, peer=peer, addr=f"10.0.0.{1 + names.index(peer)}", port=port, error=error)
        for caller in names
        for peer in names
        if peer != caller
        for port in PORTS
        for error in [failures.get(caller + peer, {}).get(port)]
    )
    return msgspec.structs.replace(well, connectivity=ConnectivityResult(attempts=attempts))


def every(error: str) -> dict[int, str]:
    return dict.fromkeys(PORTS, error)


def ephemeral(error: str) -> dict[int, str]:
    return dict.fromkeys(PORTS[1:], error)


def test_nodes_that_reach_each_other_have_no_findings() -> None:
    silent(check_ports(met("abc")), check_ports(inspection()))


REFUSED = {29500: "refused"}
TAKEN = (PortFact(port=29500, taken=True, user="python3 (pid 7, user eve)"), PortFact(port=29501, taken=False))


def unbound() -> Inspection:
    """Node a could not listen at the rendezvous port."""
    listening = Listening(node="a", failed={29500: "in use by nginx (pid 3, user root)"})
    return inspection(connectivity=ConnectivityResult(listening=(listening,)))


def test_a_port_that_cannot_be_reached_or_bound_is_found_on_its_node(golden: Golden) -> None:
    late, refused, no_route = (every(error) for error in ("timed out", "refused", "no route"))
    check_cases(
        golden,
        "ports",
        {
            "ephemeral ports of c are blocked": check_ports(
                met("abc", ac=ephemeral("timed out"), bc=ephemeral("timed out"))
            ),
            "the rendezvous port of a is blocked": check_ports(met("abc", ba=REFUSED, ca=REFUSED)),
            "neither node reaches the other, packets are dropped": check_ports(met("ab", ab=late, ba=late)),
            "neither node reaches the other, no route": check_ports(met("ab", ab=no_route, ba=no_route)),
            "neither node reaches the other, refused": check_ports(met("ab", ab=refused, ba=refused)),
            "b cannot reach out": check_ports(met("abc", ba=late, bc=late)),
            "another machine responds": check_ports(met(ab=every("wrong answer"))),
            "large packets are lost": check_ports(met(ba={45000: "large packets lost"})),
            "the rendezvous port is taken": check_master_port(but(inspection(), "a", ports=TAKEN)),
            "the rendezvous port could not be bound": check_master_port(unbound()),
        },
    )


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_a_firewall_that_drops_the_answers_to_its_own_node_too_is_found_once(names: str) -> None:
    others = names[:-1]
    node = names[-1]
    failures = {f"{other}{node}": ephemeral("timed out") for other in others}
    failures |= {f"{node}{other}": every("timed out") for other in others}
    finding = only(check_ports(met(names, **failures)))
    assert (finding.node, finding.code) == (node, "ports")


def test_a_blocked_rendezvous_matters_on_node_0_alone() -> None:
    silent(check_ports(met("abc", ab=REFUSED, cb=REFUSED)))


def test_a_nic_that_is_down_is_left_to_the_check_of_the_link() -> None:
    down = Interface(name="eth0", addresses=("10.0.0.2/24",), up=False)
    silent(check_ports(but(met(ab=every("no route")), "b", interfaces=(down,))))


def test_a_port_that_no_rendezvous_uses_may_be_taken() -> None:
    silent(
        check_master_port(but(inspection(), "b", ports=TAKEN)),
        check_master_port(but(inspection(master_port=1), "a", ports=TAKEN)),
        check_master_port(but(inspection(), "a", ports=(PortFact(port=29500, taken=Unknown("denied")),))),
    )
