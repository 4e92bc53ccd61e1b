"""`multinode sweep` on the lab: killed, interrupted, out of memory, and complete; cells of real LLaMA-Factory, too."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from multinode.lab.cluster import ns_command, up_lab
from multinode.lab.state import Lab, LabSpec
from tests.equipment.faults import Memory, make_fault
from tests.lab.launching import DEADLINE_S, Command, assert_no_agents, kill, wait_for
from tests.lab.supervised import REAL_TORCH, STAND_IN

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("tiny")]

JOB = "configs/tiny_sft.yaml"
SCRIPT = str(Path(__file__).with_name("train_mlp.py"))
SHAPE = ("--workers-per-node", "1", "--no-check")
METHODS, BATCHES = ("lora", "full"), (1, 4)
LABELS = [f"{nodes}x1-{method}-batch{batch}" for nodes in (1, 2) for method in METHODS for batch in BATCHES]
STARVED, SKIPPED = LABELS[-2:]
# What a worker takes that trains all parameters; what is not enough for it, and plenty for all others.
TAKEN_BYTES, TOO_LITTLE_BYTES = 300 << 20, 200 << 20


@pytest.fixture
def own_lab(control_groups: None, no_lab: None) -> Lab:
    """A lab of the test's own at 1 Gbit/s, whose nodes see their control groups."""
    del control_groups, no_lab
    return up_lab(LabSpec(node_count=2, rate_gbit_per_s=1.0, python=sys.executable, disk_bytes=2 << 30))


def grid(command: Command) -> dict[str, dict[str, Any]]:
    """What is stored of each cell, by its label."""
    (path,) = command.runs.glob("*/grid.json")
    return {cell["cell"]["label"]: cell for cell in json.loads(path.read_text())["cells"]}


def has_begun(command: Command, label: str) -> bool:
    return any(command.runs.glob(f"*-{label}/plan.json"))


def steps_of(command: Command, label: str) -> int:
    """Steps of a cell's newest run that have come home."""
    texts = [path.read_text() for path in command.runs.glob(f"*-{label}*/samples/node-0/*.jsonl")]
    return sum(text.count('"kind": "step"') for text in texts)


def left_on(lab: Lab) -> list[str]:
    """What of any run is left on the nodes."""
    found = []
    for node in lab.nodes:
        command = [*ns_command(node), "sh", "-c", "ls ~/.multinode/runs 2>/dev/null || true"]
        found += subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S).stdout.split()
    return found


def test_killed_interrupted_and_out_of_memory_it_makes_the_whole_table_and_nothing_twice(
    own_lab: Lab, command: Command
) -> None:
    # The first run of these two makes one step; a second one would have another name before the dot.
    surroundings = {"PYTHONPATH": STAND_IN, "HOLD": f"{LABELS[2]}. {LABELS[5]}.", "MEMORY": TAKEN_BYTES}
    variables = [word for name, value in surroundings.items() for word in ("--env", f"{name}={value}")]
    settings = ("--grid", "per_device_train_batch_size=1,4", "--grid", "finetuning_type=lora,full", "--nodes", "1,2")
    arguments = ("sweep", JOB, *settings, *SHAPE, "--steps", "6", "--hosts", own_lab.hostfile, *variables)
    with command.running(*arguments) as process:
        wait_for(lambda: steps_of(command, LABELS[2]) > 0)
        kill(process.pid)
        process.wait(timeout=DEADLINE_S)
    after_kill = grid(command)
    assert [after_kill[label]["state"] for label in LABELS[:4]] == ["measured", "measured", "running", "waiting"]

    with command.running(*arguments) as process:
        wait_for(lambda: steps_of(command, LABELS[5]) > 0)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=DEADLINE_S)[0]
    assert process.returncode == 130, said
    assert "resuming sweep" in said
    assert "run the same command to resume" in said
    assert_no_agents()
    after_stop = grid(command)
    assert [after_stop[label] for label in LABELS[:2]] == [after_kill[label] for label in LABELS[:2]]
    assert after_stop[LABELS[5]]["state"] == "waiting"

    make_fault(own_lab, Memory(node="node1", limit_bytes=TOO_LITTLE_BYTES))
    done = command.run(*arguments)
    assert done.returncode == 0, done.stderr
    cells = grid(command)
    assert list(cells) == LABELS
    states = {label: cell["state"] for label, cell in cells.items()}
    assert states == dict.fromkeys(LABELS, "measured") | {STARVED: "out_of_memory", SKIPPED: "skipped"}
    assert cells[STARVED]["out_of"] == "node"
    assert cells[SKIPPED]["why"]["message"] == f"{STARVED} already ran out of the node's memory"
    # Of what had been measured nothing was measured again; what had been cut off was, under another name.
    assert [cells[label] for label in LABELS[:2]] == [after_kill[label] for label in LABELS[:2]]
    attempts = {label: cell["attempts"] for label, cell in cells.items()}
    assert attempts == dict.fromkeys(LABELS, 1) | {LABELS[2]: 2, LABELS[5]: 2, SKIPPED: 0}
    # A node sees what other runs have left in the home directory of this machine.
    (path,) = command.runs.glob("*/grid.json")
    assert not [name for name in left_on(own_lab) if name.startswith(path.parent.name)]
    assert_no_agents()
    check_report(command)


def check_report(command: Command) -> None:
    """Every cell has a row, and those that were measured have figures."""
    rows = table(command)
    assert [row["label"] for row in rows] == LABELS
    for row in rows:
        if row["state"] == "measured":
            assert_figures(row, nodes=int(row["label"][0]), batch=int(row["label"].rpartition("batch")[2]))


def table(command: Command) -> list[dict[str, Any]]:
    """The rows of the sweep's table."""
    (path,) = command.runs.glob("*/sweep.json")
    document = json.loads(path.read_text())
    assert document["schema"] == "multinode.sweep/3"
    rows: list[dict[str, Any]] = document["cells"]
    return rows


def assert_figures(row: dict[str, Any], *, nodes: int, batch: int) -> None:
    assert row["global_batch"] == nodes * batch
    assert row["samples_per_s"]["value"] > 0


@pytest.mark.torch
@pytest.mark.parametrize(
    "job",
    [
        pytest.param((*REAL_TORCH, "--grid-arg", "--batch=1", "--", SCRIPT, "--steps", "6"), id="script"),
        pytest.param(
            (JOB, "--steps", "6", "--set", "per_device_train_batch_size=1", "--set", "finetuning_type=lora"),
            id="llamafactory",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_cells_of_real_trainings_have_figures(lab: Lab, command: Command, job: tuple[str, ...]) -> None:
    done = command.run("sweep", *SHAPE, "--nodes", "1,2", "--hosts", lab.hostfile, *job)
    assert done.returncode == 0, done.stderr
    alone, together = table(command)
    for row, nodes in ((alone, 1), (together, 2)):
        assert (row["state"], row["nodes"]) == ("measured", nodes)
        assert row["samples_per_s"]["value"] > 0
    # One worker has nobody to talk to.
    assert together["network_share"] > (alone["network_share"] or 0.0)
