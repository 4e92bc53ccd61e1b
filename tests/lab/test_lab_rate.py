from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from subprocess import CompletedProcess

import pytest

from multinode.lab.cluster import require_lab, set_rate
from multinode.lab.network import measure_links
from multinode.lab.state import Lab

from .launching import call_here

pytestmark = pytest.mark.lab

Command = Callable[..., CompletedProcess[str]]

# This machine has other things to do as well: slower is no proof of anything, unless it is much slower.
AT_LEAST = 0.5
AT_MOST = 1.06


@pytest.fixture
def rates(lab: Lab) -> Iterator[Lab]:
    """The lab, whose rates are put back after the test."""
    yield lab
    set_rate([node.name for node in lab.nodes], 1.0)


@pytest.mark.timing
def test_both_directions_carry_the_rate_that_was_asked_for(lab: Lab) -> None:
    del lab
    speeds = list(measure_links(require_lab()))
    assert [(speed.source, speed.target) for speed in speeds] == [("node0", "node1"), ("node1", "node0")]
    for speed in speeds:
        assert AT_LEAST * 0.9415 < speed.goodput_gbit_per_s < AT_MOST * 0.9415


@pytest.mark.timing
def test_one_slow_nic_slows_both_directions(rates: Lab, shell: Command) -> None:
    del rates
    assert call_here("lab", "rate", "node1", "50mbit").stdout == "node1 ens1f0 50mbit\n"
    assert shell("node1", "cat /sys/class/net/ens1f0/speed").stdout == "50\n"
    assert shell("node0", "cat /sys/class/net/ens1f0/speed").stdout == "1000\n"
    speeds = list(measure_links(require_lab()))
    assert {speed.rate_gbit_per_s for speed in speeds} == {0.05}
    for speed in speeds:
        assert AT_LEAST * 0.047 < speed.goodput_gbit_per_s < AT_MOST * 0.047
    told = {node["name"]: node["rate"] for node in json.loads(call_here("lab", "status", "--json").stdout)["nodes"]}
    assert told == {"node0": "1gbit", "node1": "50mbit"}


@pytest.mark.timing
def test_unshaped_links_are_faster_and_expect_nothing(rates: Lab) -> None:
    del rates
    assert call_here("lab", "rate", "all", "none").stdout == "node0 ens1f0 none\nnode1 ens1f0 none\n"
    assert call_here("lab", "rate", "all", "none").returncode == 0
    for speed in measure_links(require_lab()):
        assert speed.goodput_gbit_per_s > 1.5
        assert speed.expected_gbit_per_s is None
        assert not speed.is_slow


@pytest.mark.parametrize(("arguments", "said"), [(("node9", "1gbit"), "node9"), (("all", "fast"), "not a link rate")])
def test_a_wrong_node_or_rate_changes_nothing(lab: Lab, arguments: tuple[str, str], said: str) -> None:
    del lab
    before = require_lab()
    done = call_here("lab", "rate", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert require_lab() == before
