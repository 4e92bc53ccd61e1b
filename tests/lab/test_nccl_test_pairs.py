"""`multinode nccl-test --pairs` on six lab nodes: one that is slow, and one that is slow one way, are named."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from multinode.lab.cluster import LabSpec, up_lab
from multinode.lab.faults import LinkSlow, clear_faults, make_fault
from multinode.lab.spec import Lab
from tests.lab.launching import Command, agents

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.timeout(300)]

# Three streams at once are work for a processor; a slower link leaves room for what else a small machine does.
RATE_GBIT_PER_S = 0.1
TENTH_GBIT_PER_S = RATE_GBIT_PER_S / 10

OPTIONS = ("nccl-test", "--hosts", "lab", "--pairs", "-b", "256K", "-e", "256K", "-n", "2", "-c", "0", "--json")


@pytest.fixture
def six(no_lab: None) -> Iterator[Lab]:
    del no_lab
    lab = up_lab(
        LabSpec(node_count=6, slots=1, rate_gbit_per_s=RATE_GBIT_PER_S, python=sys.executable, disk_bytes=1 << 30)
    )
    yield lab
    clear_faults(lab)


def test_the_slow_node_and_the_slow_direction_are_named(six: Lab, tmp_path: Path) -> None:
    command = Command(tmp_path / "runs")

    make_fault(six, LinkSlow(node="node4", rate_gbit_per_s=TENTH_GBIT_PER_S))
    document = command.document(*OPTIONS)
    assert len(document["tcp"]["pairs"]) == 6 * 5
    assert [(one["kind"], one["nodes"]) for one in document["odd"]] == [("node", ["node4"])]
    assert document["verdict"]["nodes"][0] == "node4"
    clear_faults(six)

    for way, kind in (("send", "sends"), ("receive", "receives")):
        make_fault(six, LinkSlow(node="node2", rate_gbit_per_s=TENTH_GBIT_PER_S, way=way))
        document = command.document(*OPTIONS)
        assert [(one["kind"], one["nodes"]) for one in document["odd"]] == [(kind, ["node2"])]
        assert document["verdict"]["nodes"][0] == "node2"
        clear_faults(six)
    assert not agents()


def test_healthy_nodes_have_nobody_odd_among_them(six: Lab, tmp_path: Path) -> None:
    document = Command(tmp_path / "runs").document(*OPTIONS)
    assert document["nodes"] == [node.name for node in six.nodes]
    assert document["odd"] == []
    assert all(0.6 * RATE_GBIT_PER_S < one["gbit_per_s"] < 1.1 * RATE_GBIT_PER_S for one in document["tcp"]["pairs"])
