from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

import pytest

from multinode.lab.cluster import down_lab, find_remains, require_lab
from multinode.lab.network import measure_stream
from multinode.lab.state import Lab, is_alive, load_lab
from tests.equipment.command import main
from tests.equipment.faults import (
    Address,
    Clock,
    Cpu,
    DiskFull,
    Fault,
    FileMissing,
    FileText,
    Interface,
    LinkDown,
    LinkSlow,
    Memory,
    Mtu,
    NodeState,
    Package,
    Ports,
    Route,
    SshdState,
    Variable,
    add_record,
    clear_faults,
    list_faults,
    make_fault,
)
from tests.golden import Golden, error_of

from .faulting import Command, Make, quick_ssh
from .launching import call_here

pytestmark = pytest.mark.lab

EVERY_KIND: list[Fault] = [
    LinkDown(node="node0"),
    LinkSlow(node="node0", rate_gbit_per_s=0.1),
    LinkSlow(node="node0", rate_gbit_per_s=0.1, way="send"),
    LinkSlow(node="node0", rate_gbit_per_s=0.1, way="receive"),
    Mtu(node="node0", mtu=9000),
    Ports(node="node0", first=1000, last=2000, action="drop"),
    Interface(node="node0", name="br-1234"),
    Address(node="node0", address="10.213.1.100/24"),
    Route(node="node0", peer="node1"),
    *[SshdState(node="node0", how=how) for how in ("stop", "freeze", "new-host-key", "refuse-key", "crowded")],
    Variable(node="node0", name="RANK", value="3"),
    Clock(node="node0", offset_s=90.0),
    NodeState(node="node0", how="kill"),
    NodeState(node="node0", how="freeze"),
    Cpu(node="node0", share=0.3),
    Memory(node="node0", limit_bytes=700 << 20),
    DiskFull(node="node0"),
    Package(node="node0", name="msgspec", version="0.1"),
    FileMissing(node="node0", path="/etc/hosts"),
    FileText(node="node0", path="/etc/hosts", text="x"),
]


def test_a_fault_that_cannot_be_made_leaves_nothing(lab: Lab, shell: Command, golden: Golden) -> None:
    faults = {
        "no directory": FileText(node="node0", path="/nowhere/file", text="x"),
        "a directory": FileText(node="node0", path="/etc", text="x"),
    }
    golden.check_errors("faults_not_made", {case: error_of(make_fault, lab, one) for case, one in faults.items()})
    assert list_faults() == ()
    assert shell("node0", "test -d /etc && test ! -e /nowhere && test ! -e /.multinode-faults").returncode == 0


@pytest.mark.usefixtures("lab")
def test_faults_on_record_that_were_never_made_are_cleared(shell: Command, ssh: Command) -> None:
    def seen() -> tuple[str, list[str]]:
        # An IPv6 address is tentative for its first second.
        addresses = "ip address | sed 's/ tentative//'"
        look = f"cat /etc/hosts /etc/ssh/sshd_config; {addresses}; ip route; nft list ruleset; df --output=size /"
        variables = ssh("node0", "env").stdout.splitlines()
        return shell("node0", look).stdout, [line for line in variables if not line.startswith("SSH_C")]

    before = seen()
    for kind in EVERY_KIND:
        now = require_lab()
        add_record(kind, now.nodes[0].boot_id)
        assert clear_faults(now) == (kind,)
        assert list_faults() == ()
    assert seen() == before


def test_faults_are_cleared_a_node_at_a_time_and_newest_first(lab: Lab, fault: Make, golden: Golden) -> None:
    made = [Mtu(node=node, mtu=mtu) for node, mtu in (("node0", 9000), ("node1", 9000), ("node0", 4000))]
    for one in made:
        fault(one)
    assert list_faults() == tuple(made)
    assert clear_faults(lab, "node0") == (made[2], made[0])
    assert list_faults() == (made[1],)
    assert clear_faults(lab) == (made[1],)
    assert clear_faults(lab) == ()
    golden.check_errors("faults_of_no_node", {"clear": error_of(clear_faults, lab, "node7")})


def test_the_script_makes_lists_and_clears(
    lab: Lab, shell: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lab-fault", "fault", *words])
        return main(), *capsys.readouterr()

    made = "".join(f"{node.name}: /etc/nccl.conf is 'NCCL_DEBUG=INFO'\n" for node in lab.nodes)
    try:
        assert call("all", "file-text", "path=/etc/nccl.conf", "text=NCCL_DEBUG=INFO") == (0, made, "")
        assert shell("node1", "cat /etc/nccl.conf").stdout == "NCCL_DEBUG=INFO"
        assert call() == (0, made, "")
        again = call("node0", "file-text", "path=/etc/nccl.conf", "text=NCCL_DEBUG=INFO")
        assert (again[0], "is in force" in again[2]) == (2, True)
    finally:
        assert call("clear") == (0, "".join(reversed(made.splitlines(keepends=True))), "")
    assert shell("node0", "test -e /etc/nccl.conf").returncode == 1
    assert call("node0", "sshd", "how=slow")[0] == 2
    assert "link-down ifname=" in call("--help")[1]


def test_what_cannot_be_is_refused_before_anything_is_made(lab: Lab, golden: Golden) -> None:
    cases: dict[str, Callable[[], Fault]] = {
        "no such node": lambda: Ports(node="node7", first=80, last=80, action="drop"),
        "an interface of every machine": lambda: LinkDown(node="node0", ifname="lo"),
        "hardly any processor": lambda: Cpu(node="node0", share=0.01),
        "no processor": lambda: Cpu(node="node0", share=0.0),
        "more than all processors": lambda: Cpu(node="node0", share=100000.0),
        "hardly any memory": lambda: Memory(node="node0", limit_bytes=10 << 20),
        "a package that is not installed": lambda: Package(node="node0", name="no-such-package", version="1.0"),
        "a route to no node": lambda: Route(node="node0", peer="node7"),
    }
    errors = {case: error_of(lambda made: make_fault(lab, made()), made) for case, made in cases.items()}
    cores = str(len(os.sched_getaffinity(0)))
    golden.check_errors("refused_faults", errors, shown={lab.spec.python: "PYTHON", cores: "CORES"})
    assert list_faults() == ()


def test_a_killed_node_is_silent_and_comes_back_with_a_fresh_disk(small: Lab, ssh: Command, golden: Golden) -> None:
    lab = small
    boot_id = ssh("node1", "echo x > /tmp/before-it; cat /proc/sys/kernel/random/boot_id").stdout
    make_fault(lab, Variable(node="node1", name="RANK", value="3"))
    make_fault(lab, FileMissing(node="node1", path="/etc/hosts"))
    make_fault(lab, NodeState(node="node1", how="kill"))
    # Silence, and neither a refusal nor a farewell.
    assert "Connection refused" not in quick_ssh("node1").stderr
    assert not is_alive(lab.nodes[1].init)
    golden.check_errors("fault_of_a_dead_node", {"disk": error_of(make_fault, lab, DiskFull(node="node1"))})
    assert len(clear_faults(lab)) == 3
    told = ssh("node1", "hostname; test -e /tmp/before-it; echo $? $RANK; cat /proc/sys/kernel/random/boot_id").stdout
    assert told.split()[:2] == ["node1", "1"]
    assert told.split()[2:] not in (["3"], boot_id.split())
    assert ssh("node1", "cat /etc/hosts").returncode == 0
    now = load_lab()
    assert now is not None
    assert measure_stream(now.nodes[0], now.nodes[1]).goodput_gbit_per_s > 0
    make_fault(now, DiskFull(node="node1"))
    assert len(clear_faults(now)) == 1


def test_down_takes_faults_along(small: Lab, golden: Golden) -> None:
    for one in (
        SshdState(node="node0", how="crowded"),
        Interface(node="node0", name="br-1234"),
        Address(node="node1", address="10.213.1.100/24"),
        NodeState(node="node0", how="freeze"),
        NodeState(node="node1", how="kill"),
    ):
        make_fault(small, one)
    assert down_lab()
    assert not find_remains()
    assert list_faults() == ()
    golden.check_errors("faults_without_a_lab", {"clear": error_of(clear_faults, small)})


def test_sshd_that_was_stopped_is_up_again_for_lab_status(lab: Lab, fault: Make) -> None:
    def states() -> list[str]:
        return [node["state"] for node in json.loads(call_here("lab", "status", "--json").stdout)["nodes"]]

    fault(SshdState(node="node1", how="stop"))
    assert states() == ["up", "down"]
    clear_faults(lab)
    assert states() == ["up", "up"]
