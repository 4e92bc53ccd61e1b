"""`multinode contrast`, `compare`, `predict` and `advise` on the lab, on real LLaMA-Factory trainings."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from multinode.lab.cluster import Lab, ns_command, set_rate
from multinode.lab.faults import Fault
from multinode.lab.faults.kinds import Cpu
from tests.lab.launching import DEADLINE_S, REPOSITORY, Command, agents, wait_for

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.timeout(400)]

JOB = "configs/tiny_sft.yaml"
SCRIPT = str(Path(__file__).with_name("train_mlp.py"))
# A script that needs nothing but torch starts in a fraction of the time.
SCRIPT_CONTRAST = ("contrast", "--no-check", "--json")
CONTRAST = ("contrast", JOB, "--steps", "6", "--no-check", "--json")


@pytest.fixture
def command(tmp_path: Path) -> Command:
    make_tiny = [sys.executable, "scripts/make_tiny.py"]
    subprocess.run(make_tiny, cwd=REPOSITORY, check=True, capture_output=True, timeout=DEADLINE_S)
    return Command(tmp_path / "runs")


@pytest.fixture
def one_slot(lab: Lab, tmp_path: Path) -> str:
    """The lab's hostfile with room for one worker a node."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text(Path(lab.hostfile).read_text().replace("slots=2", "slots=1"))
    return str(hostfile)


@pytest.fixture
def slow_lab(lab: Lab) -> Iterator[Lab]:
    """The lab with links of 100 Mbit/s, for one test."""
    names = [node.name for node in lab.nodes]
    set_rate(names, 0.1)
    yield lab
    set_rate(names, 1.0)


def measure(command: Command, *arguments: str) -> dict[str, Any]:
    """The document of a command that went well."""
    code, document = command.code_and_document(*arguments)
    assert code == 0, document
    return document


def in_node(lab: Lab, shell: str) -> str:
    """What a command prints in node 0."""
    command = [*ns_command(lab.nodes[0]), "sh", "-c", shell]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S).stdout


def test_a_slow_link_is_the_network_and_one_command_tells_what_would_mend_it(slow_lab: Lab, command: Command) -> None:
    document = measure(command, *CONTRAST, "--hosts", slow_lab.hostfile)
    assert (document["schema"], document["mode"]) == ("multinode.contrast/2", "same-workers")
    baseline, candidate = document["baseline"], document["candidate"]
    assert (baseline["nodes"], baseline["workers_per_node"]) == (1, 2)
    assert (candidate["nodes"], candidate["workers_per_node"]) == (2, 1)
    speedup = candidate["samples_per_s"]["value"] / baseline["samples_per_s"]["value"]
    assert document["speedup"]["value"] == pytest.approx(speedup)
    assert (document["scaling"], document["efficiency"]) == ("same workers", pytest.approx(speedup))
    # 14.7 MB of gradients a step take 1.2 s at 100 Mbit/s, and the step on one node some 0.2 s.
    assert candidate["step_time_ms"]["value"] > 1100
    assert speedup < 0.5
    assert document["loss"]["cause"] == "network"
    assert candidate["exposed_share"] > 0.6
    assert document["verdict"].startswith("One node is ")
    assert len(document["reasons"]) == 3
    for side in (baseline, candidate):
        assert (side["settings"]["per_device_batch"], side["settings"]["accumulation"]) == (2, 1)
        assert (side["settings"]["sequence_length"], side["global_batch"]) == (128, 4)
        assert side["versions"]["torch"]
        # 30 steps of 4 samples are what the file asks for, whatever --steps has made of it.
        whole_s = 30 * 4 / side["samples_per_s"]["value"]
        assert side["whole_s"]["value"] == pytest.approx(whole_s, rel=0.1)
    assert {path.name for path in command.runs.iterdir()} >= {*baseline["run_ids"], *candidate["run_ids"]}
    assert [run["kind"] for run in command.document("runs", "--json")["runs"]] == ["contrast"] * 3
    assert not agents()

    contrasted = command.document("show", "last", "--json")["run"]["run_id"]
    foretold = measure(command, "predict", contrasted, "--link", "0.1,10", "--nodes", "2", "--json")
    as_it_was, faster = foretold["scenarios"]
    low, high = as_it_was["interval"]
    assert low <= candidate["samples_per_s"]["value"] <= high
    assert faster["samples_per_s"] > 3 * as_it_was["samples_per_s"]
    # With both workers on each of the nodes, twice as many as one node has.
    assert 0.1 < foretold["break_even"]["full_beats_one"]["value"] < 10
    advice = measure(command, "advise", contrasted, "--json")["advice"]
    gains = [one["gain"] for one in advice]
    assert gains == sorted(gains, reverse=True)
    assert any("--grad-compress fp16" in one["command"] for one in advice)

    page = command.runs.parent / "contrast.html"
    assert command.run("report", contrasted, "-o", str(page)).returncode == 0
    assert document["verdict"] in page.read_text()
    again = measure(command, "compare", baseline["run_ids"][0], candidate["run_ids"][0], "--json")
    assert (again["mode"], again["speedup"]["value"]) == ("compare", pytest.approx(speedup))


def test_with_one_slot_a_node_it_is_scale_out_and_says_so(one_slot: str, command: Command) -> None:
    document = measure(command, *SCRIPT_CONTRAST, "--hosts", one_slot, "--", SCRIPT, "--steps", "12")
    assert document["mode"] == "scale-out"
    assert "too few" in document["why"]
    assert document["efficiency"] == pytest.approx(document["speedup"]["value"] / 2)
    assert (document["baseline"]["world_size"], document["candidate"]["world_size"]) == (1, 2)


def test_with_a_fixed_global_batch_both_sides_make_the_same_steps(one_slot: str, command: Command) -> None:
    document = measure(command, *CONTRAST, "--mode", "fixed-global-batch", "--hosts", one_slot)
    baseline, candidate = document["baseline"], document["candidate"]
    assert (baseline["settings"]["accumulation"], candidate["settings"]["accumulation"]) == (2, 1)
    assert baseline["global_batch"] == candidate["global_batch"] == 4
    assert document["scaling"] == "strong"


def test_a_slow_node_is_told_from_a_slow_network(
    one_slot: str, command: Command, fault: Callable[[Fault], None]
) -> None:
    fault(Cpu(node="node1", share=0.3))
    arguments = ("--each-node", "--hosts", one_slot, "--", SCRIPT, "--steps", "12", "--batch", "512")
    document = measure(command, *SCRIPT_CONTRAST, *arguments)
    alone = {one["node"]: one for one in document["each_node"]}
    assert (alone["node0"]["relative"], set(alone)) == (1, {"node0", "node1"})
    assert alone["node1"]["relative"] < 0.6
    assert document["loss"]["cause"] == "node"
    assert "node1" in document["verdict"]
    assert "not the network" in document["verdict"]


def test_what_ctrl_c_leaves_is_compared_where_each_side_was_measured(one_slot: str, command: Command) -> None:
    without_json = SCRIPT_CONTRAST[:-1]
    arguments = (*without_json, "--repeats", "3", "--hosts", one_slot, "--", SCRIPT, "--steps", "12")
    with command.running(*arguments) as process:
        wait_for(lambda: list(command.runs.glob("*-candidate-2/run.json")), DEADLINE_S)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=DEADLINE_S)[0]
    assert process.returncode == 130
    assert "what was measured before is compared in" in said
    (contrast,) = command.runs.glob("*/contrast.json")
    assert '"verdict"' in contrast.read_text()
    assert not agents()


def test_what_was_trained_before_is_neither_resumed_nor_written_over(
    lab: Lab, command: Command, tmp_path: Path
) -> None:
    saved = tmp_path / "saves"
    (saved / "checkpoint-30").mkdir(parents=True)
    (saved / "adapter.bin").write_text("mine")
    document = measure(command, *CONTRAST, "--set", f"output_dir={saved}", "--hosts", lab.hostfile)
    # The node's own view: what it writes, the controller does not see.
    found = in_node(lab, f"find {saved} -mindepth 1 -printf '%f\\n'")
    assert sorted(found.split()) == ["adapter.bin", "checkpoint-30"]
    left = in_node(lab, "ls ~/.multinode/runs")
    assert not [run for side in ("baseline", "candidate") for run in document[side]["run_ids"] if run in left]
