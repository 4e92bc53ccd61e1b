from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from multinode.lab.cluster import down_lab, up_lab
from multinode.lab.network import measure_links
from multinode.lab.state import Lab, LabSpec

from .launching import SCRIPT, Command

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def ipv6_lab(_clean_machine: None) -> Iterator[Lab]:
    down_lab()
    spec = LabSpec(node_count=2, slots=1, rate_gbit_per_s=None, python=sys.executable, disk_bytes=2 << 30, ipv6=True)
    yield up_lab(spec, measure=False)
    down_lab()


def test_the_links_carry_ipv6(ipv6_lab: Lab) -> None:
    assert [node.addr for node in ipv6_lab.nodes] == ["fd6d:6e00::1", "fd6d:6e00::2"]
    assert all(link.goodput_gbit_per_s > 0.1 for link in measure_links(ipv6_lab))


def test_a_check_proves_the_network_and_has_no_complaint_of_it(ipv6_lab: Lab, tmp_path: Path) -> None:
    code, report = Command(tmp_path).code_and_document("check", "--hosts", "lab", "--json")
    assert code == 0
    assert [node["addr"] for node in report["nodes"]] == [node.addr for node in ipv6_lab.nodes]
    assert {(one["source"], one["error"]) for one in report["streams"]} == {("node0", None), ("node1", None)}
    assert not [one for one in report["findings"] if one["check"] in {"ports", "interface"}]


@pytest.mark.torch
def test_nodes_train_over_gloo_and_an_interface_is_enough_in_the_hostfile(ipv6_lab: Lab, tmp_path: Path) -> None:
    command, hosts = Command(tmp_path / "runs"), tmp_path / "hosts"
    hosts.write_text(re.sub(r"addr=\S+", "ifname=ens1f0", Path(ipv6_lab.hostfile).read_text()))
    # By torchrun itself: what it makes of the address is what is tested.
    code, document = command.code_and_document("launch", "--hosts", str(hosts), "--json", "--", SCRIPT, "--steps", "6")
    assert (code, document["status"], document["summary"]["steps"]) == (0, "succeeded", 6)
    (directory,) = command.runs.iterdir()
    plan = json.loads((directory / "plan.json").read_text())
    assert plan["rendezvous"]["addr"] == "fd6d:6e00::1"
    assert "--master-addr=[fd6d:6e00::1]" in plan["nodes"][1]["command"]["argv"]
