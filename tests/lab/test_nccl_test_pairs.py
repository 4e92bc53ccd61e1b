"""`multinode nccl-test --pairs` on six lab nodes: one that is slow, and one that is slow one way, are named."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from multinode.lab.cluster import down_lab
from multinode.lab.state import Lab, LabSpec
from tests.equipment.faults import LinkSlow, clear_faults, make_fault
from tests.lab.conftest import stand_lab
from tests.lab.launching import Command, assert_no_agents
from tests.lab.supervised import REAL_TORCH

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.timing]

# Three streams at once are work for a processor; a slower link leaves room for what else a small machine does.
RATE_GBIT_PER_S = 0.1
QUARTER_GBIT_PER_S = RATE_GBIT_PER_S / 4

SIZES = ("-b", "64K", "-e", "64K", "-n", "2", "-w", "1", "-c", "0")
OPTIONS = ("nccl-test", "--hosts", "lab", "--pairs", *SIZES, *REAL_TORCH, "--json")


@pytest.fixture(scope="module")
def six(_clean_machine: None) -> Iterator[Lab]:
    spec = LabSpec(node_count=6, slots=1, rate_gbit_per_s=RATE_GBIT_PER_S, python=sys.executable, disk_bytes=1 << 30)
    yield stand_lab(spec)
    down_lab()


def is_at_the_rate(pair: dict[str, Any]) -> bool:
    return bool(0.6 * RATE_GBIT_PER_S < pair["gbit_per_s"] < 1.1 * RATE_GBIT_PER_S)


def test_slow_nodes_and_slow_directions_are_named(six: Lab, command: Command) -> None:
    try:
        for slow in (
            LinkSlow(node="node0", rate_gbit_per_s=QUARTER_GBIT_PER_S, way="receive"),
            LinkSlow(node="node2", rate_gbit_per_s=QUARTER_GBIT_PER_S, way="send"),
            LinkSlow(node="node4", rate_gbit_per_s=QUARTER_GBIT_PER_S),
        ):
            make_fault(six, slow)
        document = command.document(*OPTIONS)
    finally:
        clear_faults(six)
    assert len(document["tcp"]["pairs"]) == 6 * 5
    healthy = {"node1", "node3", "node5"}
    between = [one for one in document["tcp"]["pairs"] if {one["source"], one["target"]} <= healthy]
    assert len(between) == 3 * 2
    assert all(is_at_the_rate(one) for one in between)
    odd = sorted((one["code"], one["nodes"]) for one in document["odd"])
    assert odd == [("odd_node", ["node4"]), ("odd_receives", ["node0"]), ("odd_sends", ["node2"])]
    assert sorted(document["verdict"]["nodes"][:3]) == ["node0", "node2", "node4"]
    assert_no_agents()


@pytest.mark.thorough
def test_healthy_nodes_have_nobody_odd_among_them(six: Lab, command: Command) -> None:
    document = command.document(*OPTIONS)
    assert document["nodes"] == [node.name for node in six.nodes]
    assert document["odd"] == []
    assert all(map(is_at_the_rate, document["tcp"]["pairs"]))
