"""`multinode contrast` on the lab: one node against two, measured on a real LLaMA-Factory training."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from multinode.lab.cluster import Lab, set_rate
from tests.lab.launching import DEADLINE_S, REPOSITORY, Command, agents

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.timeout(300)]

CONTRAST = ("contrast", "configs/tiny_sft.yaml", "--steps", "9", "--json")


@pytest.fixture
def command(tmp_path: Path) -> Command:
    make_tiny = [sys.executable, "scripts/make_tiny.py"]
    subprocess.run(make_tiny, cwd=REPOSITORY, check=True, capture_output=True, timeout=DEADLINE_S)
    return Command(tmp_path / "runs")


@pytest.fixture
def slow_lab(lab: Lab) -> Iterator[Lab]:
    """The lab with links of 100 Mbit/s, for one test."""
    names = [node.name for node in lab.nodes]
    set_rate(names, 0.1)
    yield lab
    set_rate(names, 1.0)


def test_with_the_same_workers_a_slow_link_makes_two_nodes_several_times_slower(
    slow_lab: Lab, command: Command
) -> None:
    code, document = command.code_and_document(*CONTRAST, "--hosts", slow_lab.hostfile)
    assert code == 0
    assert document["schema"] == "multinode.contrast/1"
    assert document["mode"] == "same-workers"
    baseline, candidate = document["baseline"], document["candidate"]
    assert (baseline["nodes"], baseline["workers_per_node"]) == (1, 2)
    assert (candidate["nodes"], candidate["workers_per_node"]) == (2, 1)
    assert document["speedup"] == pytest.approx(candidate["samples_per_s"] / baseline["samples_per_s"])
    assert document["efficiency"] == pytest.approx(document["speedup"])
    # 14.7 MB of gradients a step take 1.2 s at 100 Mbit/s, and the step on one node some 0.2 s.
    assert candidate["step_time_ms"]["median"] > 1100
    assert document["speedup"] < 0.5
    assert document["verdict"].startswith("One node is ")
    assert {path.name for path in command.runs.iterdir()} >= {baseline["run_id"], candidate["run_id"]}
    listed = command.document("runs", "--json")["runs"]
    assert [run["kind"] for run in listed] == ["contrast"] * 3
    assert not agents()


def test_with_one_slot_a_node_it_is_scale_out_and_says_so(lab: Lab, command: Command, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text(Path(lab.hostfile).read_text().replace("slots=2", "slots=1"))
    code, document = command.code_and_document(*CONTRAST, "--hosts", str(hostfile))
    assert code == 0
    assert document["mode"] == "scale-out"
    assert "too few" in document["why"]
    assert document["efficiency"] == pytest.approx(document["speedup"] / 2)
    assert (document["baseline"]["world_size"], document["candidate"]["world_size"]) == (1, 2)
