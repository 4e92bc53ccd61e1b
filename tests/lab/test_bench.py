"""`multinode bench` on the lab: real workers on two nodes that share the cores of this machine."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from multinode.lab.cluster import ns_command
from multinode.lab.state import Lab, LabNode
from tests.equipment.faults import Cpu, SshdState, make_fault
from tests.lab.faulting import Make
from tests.lab.launching import DEADLINE_S, Command, assert_no_agents
from tests.lab.supervised import REAL_TORCH

pytestmark = [pytest.mark.lab, pytest.mark.torch]

PRODUCT = ("--only", "matmul", "--dtype", "fp32", "--size", "512")
QUICK = (*PRODUCT, *REAL_TORCH, "--workers-per-node", "1")
# As anyone would time it.
PLAIN = """
import time, torch
torch.set_num_threads(1)
a, b = torch.randn(512, 512), torch.randn(512, 512)
for seconds in (0.2, 1.0):
    calls, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        torch.mm(a, b)
        calls += 1
print(2 * 512**3 * calls / (time.perf_counter() - began) / 1e12)
"""


@pytest.mark.usefixtures("lab")
def test_every_worker_is_measured_alone_and_together(command: Command, tmp_path: Path) -> None:
    page = tmp_path / "bench.html"
    options = (*PRODUCT, *REAL_TORCH, "--seconds", "0.2", "--json", "-o", str(page))
    code, document = command.code_and_document("bench", "--hosts", "lab", *options)
    assert code == 0
    assert document["schema"] == "multinode.bench/3"
    assert document["phases"] == ["alone", "together"]
    assert [(node["node"], len(node["workers"])) for node in document["nodes"]] == [("node0", 2), ("node1", 2)]
    for node in document["nodes"]:
        for worker in node["workers"]:
            assert (worker["device"], worker["threads"]) == ("cpu", 1)
            (test,) = worker["tests"]
            assert test["alone"]["value"]["value"] > 0
            assert test["together"]["value"]["value"] > 0
            assert worker["use"]["alone"]["seconds"] > 0
    text = page.read_text()
    assert '<p class="lead">' in text
    assert all(node["node"] in text for node in document["nodes"])
    assert_no_agents()
    run_id = document["run_id"]
    runs = {run["run_id"]: run["kind"] for run in command.document("runs", "--json")["runs"]}
    assert set(runs) == {run_id, *(f"{run_id}-{phase}-{rank}" for phase in ("alone", "together") for rank in (0, 1))}
    assert set(runs.values()) == {"bench"}


@pytest.mark.usefixtures("lab")
def test_all_kinds_of_tests_on_one_node(command: Command) -> None:
    options = ("--nodes", "1", "--workers-per-node", "1", "--seconds", "0.1", "--dtype", "fp32", "--json")
    document = command.document("bench", "--hosts", "lab", *options)
    # One worker is alone, and not measured twice.
    assert document["phases"] == ["alone"]
    tests = document["nodes"][0]["workers"][0]["tests"]
    assert {test["kind"] for test in tests} == {"matmul", "memory", "layers"}
    assert len([test for test in tests if test["kind"] == "layers"]) == 8
    for test in tests:
        assert test["peak"] == {"is": "unknown", "reason": "no CPU data sheets are available"}
        if test["error"] is None:
            assert test["alone"]["value"]["value"] > 0
        else:
            # A product that does not fit the time is left out, and says so.
            assert test["kind"] == "matmul"
            assert "to measure it, use --seconds" in test["error"]["message"]
    assert [test["size"] for test in tests if test["kind"] == "matmul" and test["error"] is None][:1] == ["256"]


@pytest.mark.timing
def test_a_node_held_to_thirty_percent_is_named_with_its_quota(command: Command, made: Lab) -> None:
    make_fault(made, Cpu(node="node1", share=0.3))
    shown = command.run("bench", "--hosts", "lab", *QUICK, "--alone", "--seconds", "2")
    (report,) = command.runs.glob("*/bench.json")
    document = json.loads(report.read_text())
    assert [(slow["node"], slow["causes"][0]["cause"]) for slow in document["slow"]] == [("node1", "cpu")], (
        report.read_text()
    )
    slow = document["slow"][0]
    assert slow["ratios"]["alone"]["matmul"] < 0.6
    assert "cgroup CPU limit (0.30 cores) throttled the job on node1" in slow["causes"][0]["message"]
    assert shown.stdout.startswith("node1 is slow: ")
    assert "raise the job's CPU limit on node1" in " ".join(shown.stdout.split())


@pytest.mark.timing
@pytest.mark.thorough
def test_a_product_is_as_fast_as_in_a_plain_loop(command: Command, lab: Lab) -> None:
    """Between two plain loops, on a noisy machine; benchmarks/device_speed.py measures it closely."""
    options = ("--hosts", "lab", "--nodes", "1", *QUICK, "--env", "OMP_NUM_THREADS=1", "--alone", "--json")
    before = plain_loop(lab.nodes[0])
    ours = matmul_of(command.document("bench", *options))
    assert ours == pytest.approx(statistics.mean([before, plain_loop(lab.nodes[0])]), rel=0.4)


def plain_loop(node: LabNode) -> float:
    done = subprocess.run(
        [*ns_command(node), sys.executable, "-c", PLAIN],
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE_S,
    )
    return float(done.stdout)


def matmul_of(document: dict[str, Any]) -> float:
    tests: Sequence[dict[str, Any]] = document["nodes"][0]["workers"][0]["tests"]
    return float(tests[0]["alone"]["value"]["value"])


def test_a_node_without_sshd_costs_the_other_nothing(command: Command, fault: Make) -> None:
    fault(SshdState(node="node1", how="stop"))
    code, document = command.code_and_document("bench", "--hosts", "lab", *QUICK, "--seconds", "0.2", "--json")
    assert code == 1
    first, second = document["nodes"]
    assert first["workers"][0]["tests"][0]["together"]["value"]["value"] > 0
    assert [failure["figures"]["phase"] for failure in second["failures"]] == ["alone"]
    assert second["workers"] == []
    shown = json.loads((command.runs / document["run_id"] / "run.json").read_text())
    assert (shown["status"], shown["kind"]) == ("failed", "bench")
