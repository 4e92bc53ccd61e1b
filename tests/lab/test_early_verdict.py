"""The early verdict in the lab: which is faster, before step 20, held against a contrast; and what `stop` leaves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from multinode.lab.cluster import set_rate
from multinode.lab.state import Lab, LabSpec
from multinode.records.run import CERTAIN_STEPS
from tests.lab.conftest import stand_lab
from tests.lab.launching import Command, assert_nothing_left
from tests.lab.supervised import REAL_TORCH

pytestmark = [pytest.mark.lab, pytest.mark.torch]

SPEC = LabSpec(node_count=2, rate_gbit_per_s=10.0, slots=1, cores_per_node=1, python=sys.executable, disk_bytes=1 << 30)
TRAIN = str(Path(__file__).with_name("train_mlp.py"))
# 2.4 M parameters: 9.7 MB of gradients take 0.8 s at 100 Mbit/s. A batch of one sample takes one sleep of 200 ms, in
# which the processor idles: what else the machine does hardly moves the rest of a step, of 20 ms.
JOB = ("--no-check", *REAL_TORCH, "--hosts", "lab")
SCRIPT = ("--", TRAIN, "--width", "768", "--batch", "1", "--batch-ms", "200", "--steps")
# 0.6 M parameters, 0.2 s: as many steps as may end a run.
SHORT = ("--", TRAIN, "--width", "384", "--batch", "1", "--batch-ms", "20", "--steps")


_MOST_TRIES = 3


@pytest.fixture(scope="module")
def pinned(_clean_machine: None) -> Lab:
    """Two nodes with a core each, so that one node computes as it does beside the other."""
    del _clean_machine
    return stand_lab(SPEC)


@pytest.fixture
def launched(pinned: Lab, command: Command) -> Any:
    """Launches at a line rate, to be stopped where one node is faster: exit code and document."""

    def launch(rate_gbit_per_s: float, steps: int, script: tuple[str, ...] = SCRIPT) -> tuple[int, dict[str, Any]]:
        set_rate([node.name for node in pinned.nodes], rate_gbit_per_s)
        options = ("launch", "--json", "--if-slower-than-one-node", "stop")
        return command.code_and_document(*options, *JOB, *script, str(steps))

    return launch


def test_over_100_mbit_one_node_is_faster_and_stop_leaves_nothing(launched: Any, command: Command) -> None:
    code, document = launched(0.1, 1000, SHORT)
    assert (code, document["status"], document["stop_reason"]) == (1, "stopped", "slower_than_one_node")
    verdict: dict[str, Any] = document["early_verdict"]
    assert (verdict["measured"] >= CERTAIN_STEPS, verdict["step"] < 200, verdict["memory"]) == (True, True, "fits")
    assert document["summary"]["steps"] < 500
    assert_faster(verdict)
    assert_nothing_left(command)


def assert_faster(verdict: dict[str, Any]) -> None:
    """One node, for sure."""
    speedup = verdict["one_node"]["speedup"]
    assert 1 < speedup["low"] < speedup["value"] < speedup["high"]


@pytest.mark.timing
@pytest.mark.thorough
def test_15_steps_over_100_mbit_foretell_what_the_contrast_measures(launched: Any, command: Command) -> None:
    for _ in range(_MOST_TRIES):
        # Too few steps to be stopped for.
        code, document = launched(0.1, 20)
        assert (code, document["status"]) == (0, "succeeded")
        verdict = document["early_verdict"]
        assert_faster(verdict)
        # Of nodes whose cores others had, no other run tells what they do: once more.
        if verdict["core_wait_ms"] is None:
            break
    contrast = ("contrast", "--json", "--mode", "scale-out", *JOB, *SCRIPT, "20")
    measured = 1 / command.document(*contrast)["candidate"]["speedup"]["value"]
    assert verdict["one_node"]["speedup"]["value"] == pytest.approx(measured, rel=0.15)


@pytest.mark.timing
def test_over_10_gbit_two_nodes_are_faster_and_the_run_goes_to_its_end(launched: Any) -> None:
    code, document = launched(10.0, 40)
    assert (code, document["status"], document["stop_reason"]) == (0, "succeeded", "")
    verdict = document["early_verdict"]
    # On a busy machine the interval may reach 1; one node is not faster, and never surely so.
    assert verdict["one_node"]["speedup"]["value"] < 1
    assert verdict["one_node"]["speedup"]["low"] < 1
    assert verdict["findings"][0]["code"] in {"all-nodes-faster", "inconclusive"}
