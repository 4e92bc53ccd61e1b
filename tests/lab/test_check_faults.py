"""Every failure that the lab can make is made, and the check names it: right check, right node, nothing else.

Faults whose findings can be told apart are made together. What keeps a node from being reached is in
test_check_unreached.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from multinode.lab.state import Lab
from tests.equipment.faults import (
    Address,
    Clock,
    DiskFull,
    Fault,
    FileMissing,
    FileText,
    Interface,
    LinkDown,
    LinkSlow,
    Mtu,
    Package,
    Ports,
    Route,
    Variable,
)
from tests.lab.faulting import faults
from tests.lab.launching import REPOSITORY, Command, assert_no_agents, listener

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("lab", "tiny")]

JOB = "configs/tiny_sft.yaml"
MODEL = f"{REPOSITORY}/assets/tiny/model"
CONFIG = f"{MODEL}/config.json"
TORCH = Package(node="node1", name="torch", version="2.4.1")
TRANSFORMERS = Package(node="node1", name="transformers", version="4.0")

# The fault, and what is found on its node: severity and check. The words are golden in tests/check.
Row = tuple[Fault, str, str]


def ports(node: str, first: int, last: int, action: Literal["drop", "reject"]) -> Ports:
    return Ports(node=node, first=first, last=last, action=action)


# Options of the check, and what is made together.
GROUPS: list[tuple[tuple[str, ...], list[Row]]] = [
    (
        (JOB,),
        [
            (TORCH, "error", "versions"),
            (TRANSFORMERS, "error", "versions"),
            (FileMissing(node="node1", path=MODEL), "error", "paths"),
        ],
    ),
    (
        (JOB,),
        [
            (FileText(node="node1", path=CONFIG, text="{}"), "error", "content"),
            (LinkDown(node="node1"), "error", "link"),
            (DiskFull(node="node1"), "error", "machine"),
        ],
    ),
    (
        (),
        [
            (Clock(node="node1", offset_s=90.0), "warning", "clock"),
            (Address(node="node1", address="10.213.1.99/24"), "warning", "interface"),
            (Route(node="node1", peer="node0"), "warning", "interface"),
            # What multinode settles itself, and cannot hurt its launch, is a note.
            (Variable(node="node1", name="RANK", value="3"), "note", "variables"),
        ],
    ),
    # Findings about connections hide each other.
    ((), [(ports("node1", 30000, 60999, "reject"), "error", "ports")]),
    # Where packets are dropped, streams would wait for their deadlines.
    (("--no-bandwidth",), [(ports("node1", 30000, 60999, "drop"), "error", "ports")]),
    (("--no-bandwidth",), [(ports("node0", 20000, 29999, "drop"), "error", "master-port")]),
    (("--no-bandwidth",), [(ports("node1", 1, 65535, "drop"), "error", "ports")]),
]


@pytest.fixture(scope="module")
def command(module_lab: Lab, tiny: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    del module_lab, tiny
    command = Command(tmp_path_factory.mktemp("check") / "runs")
    yield command
    # All of this module's faults are cleared, and nothing is left of any.
    assert serious(check(command, JOB, "--no-bandwidth")[1]) == []


def check(command: Command, *options: str, hosts: str = "lab") -> tuple[int, dict[str, Any]]:
    return command.code_and_document("check", "--hosts", hosts, *options, "--json")


def serious(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [finding for finding in document["findings"] if finding["severity"] != "note"]


def codes(findings: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return sorted((str(finding["node"]), finding["severity"], finding["check"]) for finding in findings)


@pytest.mark.timing
def test_a_healthy_lab_has_neither_errors_nor_warnings(lab: Lab, command: Command) -> None:
    code, document = check(command, JOB)
    assert (code, document["ok"], serious(document)) == (0, True, [])
    assert len(document["streams"]) == len(lab.nodes) * (len(lab.nodes) - 1)
    assert_no_agents()


@pytest.mark.parametrize(("options", "rows"), GROUPS, ids=lambda value: str(value)[:60])
def test_faults_are_named(command: Command, options: tuple[str, ...], rows: list[Row]) -> None:
    with faults(*(row[0] for row in rows)):
        code, document = check(command, *options)
    found = codes(document["findings"])
    expected = sorted((str(fault.node), severity, check) for fault, severity, check in rows)
    # There may be other notes.
    assert [one for one in found if "note" not in one or one in expected] == expected, document["findings"]
    severities = [severity for _, severity, _ in rows]
    assert (code, document["ok"]) == ((1, False) if "error" in severities else (0, True))
    assert [node["reached"] for node in document["nodes"]] == [True, True]


@pytest.mark.parametrize(("options", "code"), [((), 0), (("--strict",), 1)])
def test_a_warning_fails_a_strict_check_alone_and_is_shown_with_its_fix(
    command: Command, options: tuple[str, ...], code: int
) -> None:
    given = ("--hosts", "lab", "--env", "NCCL_SOCKET_IFNAME==nosuch0", "--no-bandwidth", *options)
    done = command.run("check", *given)
    assert done.returncode == code
    # The same on both nodes.
    assert done.stdout.startswith("1 warning ")
    assert "fix: remove --env NCCL_SOCKET_IFNAME" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(
        f"Next        fix the 1 warning above, then: multinode check {' '.join(given)}"
        if code
        else "Next        multinode launch"
    )
    assert ("--strict allows none" in done.stderr) == bool(code)


def test_a_virtual_interface_that_nccl_would_take_is_no_warning_where_ours_is_settled(command: Command) -> None:
    with faults(
        Interface(node="node1", name="br-1234"), Interface(node="node1", name="tailscale0", address="100.64.0.1/10")
    ):
        code, document = check(command, "--no-bandwidth")
    assert (code, serious(document)) == (0, [])


@pytest.mark.timing
def test_a_link_that_is_slower_than_it_says_is_found_between_the_two(command: Command) -> None:
    # Without the job: on so slow a link it would be warned of as well.
    with faults(LinkSlow(node="node1", rate_gbit_per_s=0.1)):
        code, document = check(command)
    (finding,) = serious(document)
    # Either node may be to blame.
    assert (code, finding["node"], finding["severity"], finding["check"]) == (0, None, "warning", "link")


def test_large_packets_that_vanish_are_found(command: Command) -> None:
    with faults(Mtu(node="node0", mtu=9000), Mtu(node="node1", mtu=9000)):
        code, document = check(command, "--no-bandwidth")
    found = serious(document)
    assert code == 1
    assert {(finding["severity"], finding["check"]) for finding in found} == {("error", "link")}


def test_master_port_in_use_names_who_holds_it(lab: Lab, command: Command) -> None:
    with listener(lab.nodes[0], 29500):
        code, document = check(command, "--no-bandwidth", "--master-port", "29500")
    (finding,) = serious(document)
    assert (code, finding["node"], finding["check"]) == (1, "node0", "master-port")
    assert re.search(r"\bpid \d+, user root\b", finding["message"])
