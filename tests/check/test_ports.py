from __future__ import annotations

import msgspec
import pytest

from multinode.check.connectivity import Attempted, ConnectivityResult, Listening
from multinode.check.ports import check_master_port, check_ports
from multinode.check.rule import CheckFinding, Inspection
from multinode.cluster.facts import Interface, PortFact
from multinode.stats.unknown import Unknown

from .inspecting import but, expect, inspection, only, silent

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


def test_blocked_ephemeral_ports_are_the_listeners_and_the_first_collective_would_hang() -> None:
    expect(
        check_ports(met("abc", ac=ephemeral("timed out"), bc=ephemeral("timed out"))),
        "error",
        "c",
        "a and b cannot reach its ephemeral ports (tried: 34000, 45000 at 10.0.0.3; timed out)",
        "the first collective would hang",
        check="ports",
        hint="ufw allow proto tcp from 10.0.0.0/24 to any port 32768:60999",
    )


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_a_firewall_that_drops_the_answers_to_its_own_node_too_is_found_once(names: str) -> None:
    others = names[:-1]
    node = names[-1]
    failures = {f"{other}{node}": ephemeral("timed out") for other in others}
    failures |= {f"{node}{other}": every("timed out") for other in others}
    finding = only(check_ports(met(names, **failures)))
    assert (finding.node, finding.code) == (node, "ports")
    assert "first collective" in finding.message


def test_a_blocked_rendezvous_matters_on_node_0_alone() -> None:
    blocked = {29500: "refused"}
    finding = only(check_ports(met("abc", ba=blocked, ca=blocked)))
    assert (finding.node, finding.code) == ("a", "master-port")
    assert "b and c cannot reach its rendezvous port 29500" in finding.message
    assert "--master-port" in str(finding.hint)
    silent(check_ports(met("abc", ab=blocked, cb=blocked)))


@pytest.mark.parametrize(
    ("error", "hint"), [("timed out", "drops"), ("no route", "ip route get 10.0.0.2"), ("refused", "rejects")]
)
def test_a_node_that_nobody_reaches_is_told_once_and_why(error: str, hint: str) -> None:
    finding = only(check_ports(met("ab", ab=every(error), ba=every(error))))
    assert (finding.node, finding.code) == ("b", "ports")
    assert f"at 10.0.0.2 on any tried port ({error})" in finding.message
    assert hint in str(finding.hint)


def test_a_node_that_cannot_reach_out_is_told_itself() -> None:
    finding = only(check_ports(met("abc", ba=every("timed out"), bc=every("timed out"))))
    assert (finding.node, finding.code) == ("b", "ports")
    assert "it cannot reach a and c (timed out), but others can" in finding.message


def test_an_impostor_and_lost_large_packets_have_words_of_their_own() -> None:
    assert "two machines have this address" in only(check_ports(met(ab=every("wrong answer")))).message
    finding = only(check_ports(met(ba={45000: "large packets lost"})))
    assert (finding.node, finding.code) == ("a", "link")
    assert "the MTU of its NIC is 1500" in finding.message
    assert "mtu 1500" in str(finding.hint)


def test_a_nic_that_is_down_is_left_to_the_check_of_the_link() -> None:
    down = Interface(name="eth0", addresses=("10.0.0.2/24",), up=False)
    silent(check_ports(but(met(ab=every("no route")), "b", interfaces=(down,))))


def test_a_taken_master_port_is_node_0s_and_names_its_user() -> None:
    user = "python3 (pid 7, user eve)"
    taken = (PortFact(port=29500, taken=True, user=user), PortFact(port=29501, taken=False))
    finding = only(check_master_port(but(inspection(), "a", ports=taken)))
    assert (finding.node, finding.message) == (
        "a",
        f"port 29500, the rendezvous port, is in use by {user}: the workers would be unable to connect",
    )
    assert "--master-port 29501" in str(finding.hint)
    silent(
        check_master_port(but(inspection(), "b", ports=taken)),
        check_master_port(but(inspection(master_port=1), "a", ports=taken)),
        check_master_port(but(inspection(), "a", ports=(PortFact(port=29500, taken=Unknown("denied")),))),
    )


def test_a_master_port_that_could_not_be_bound_says_why() -> None:
    failed = {29500: "in use by nginx (pid 3, user root)"}

    def found(node: str) -> list[CheckFinding]:
        connectivity = ConnectivityResult(listening=(Listening(node=node, failed=failed),))
        return list(check_master_port(inspection(connectivity=connectivity)))

    assert found("b") == []
    assert "in use by nginx (pid 3, user root)" in only(found("a")).message
