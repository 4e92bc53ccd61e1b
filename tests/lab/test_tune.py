"""`multinode tune` on the lab with real LLaMA-Factory: killed in the middle, resumed, and its winner launched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from multinode.lab.cluster import set_rate
from multinode.lab.state import Lab
from tests.lab.launching import DEADLINE_S, RUN_DEADLINE_S, Command, assert_no_agents, kill, wait_for

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.thorough, pytest.mark.usefixtures("tiny")]

JOB = "configs/tiny_sft.yaml"
# Slow enough that one node is the faster, however busy the processor is.
SLOW_GBIT_PER_S = 0.1
STEPS = 12
SHAPE = ("--workers-per-node", "1", "--no-check")
TUNE = (
    *("tune", JOB, *SHAPE, "--steps", str(STEPS), "--seeds", "1", "--candidates", "1", "--eval-samples", "8"),
    *("--budget", "1h", "--json"),
)


@pytest.fixture
def slow(lab: Lab) -> Iterator[Lab]:
    """The lab over links on which the network takes most of a step."""
    names = [node.name for node in lab.nodes]
    set_rate(names, SLOW_GBIT_PER_S)
    yield lab
    set_rate(names, 1.0)


def steps_of(command: Command, label: str) -> int:
    """Steps of a cell's runs that have come home."""
    texts = [path.read_text() for path in command.runs.glob(f"*-{label}/samples/node-0/*.jsonl")]
    return sum(text.count('"kind": "step"') for text in texts)


def plan_of(command: Command, run_id: str) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads((command.runs / run_id / "plan.json").read_text())
    return plan


def test_killed_and_resumed_it_judges_by_held_out_loss_and_its_winner_is_launched(slow: Lab, command: Command) -> None:
    arguments = (*TUNE, "--hosts", slow.hostfile)
    with command.running(*arguments) as process:
        wait_for(lambda: process.poll() is not None or steps_of(command, "one-node") > 0, RUN_DEADLINE_S)
        assert process.poll() is None, process.communicate()[0]
        kill(process.pid)
        process.wait(timeout=DEADLINE_S)
    (baseline,) = command.runs.glob("*-baseline")
    before = (baseline / "run.json").read_bytes()

    code, tuned = command.code_and_document(*arguments)
    assert code == 0
    assert_no_agents()
    # What had been measured stands as it was; what was cut off was made again under another name.
    assert (baseline / "run.json").read_bytes() == before
    assert [path.name for path in command.runs.glob("*-baseline*")] == [baseline.name]
    rows = {row["candidate"]["label"]: row for row in tuned["rows"]}
    assert rows["baseline"]["run_ids"] == [baseline.name]
    (alone,) = rows["one-node"]["run_ids"]
    assert alone.endswith("-one-node-try2")

    assert tuned["loss_of"] == "held-out"
    assert tuned["samples"] == STEPS * 2 * 2
    for row in rows.values():
        assert row["state"] == "measured", row["why"]
        assert 0 < row["loss"]["value"] < 20
        assert row["samples_per_s"]["value"] > 0
    # As many samples on half the workers.
    evaluated = {label: evaluations(command.runs / row["run_ids"][0]) for label, row in rows.items()}
    assert max(evaluated["baseline"]) == STEPS
    assert max(evaluated["one-node"]) == 2 * STEPS
    assert len(evaluated["baseline"]) >= 6
    assert rows["baseline"]["time_to_loss_s"]["value"] > 0

    assert tuned["recommended"] is not None, tuned["verdict"]
    winner = rows[tuned["recommended"]]
    done = command.run(
        *("launch", JOB, "--no-check", "--with", tuned["file"], "--hosts", slow.hostfile, "--set", "max_steps=3")
    )
    assert done.returncode == 0, done.stderr
    (launched,) = (path for path in command.runs.iterdir() if not path.name.startswith(tuned["run_id"]))
    plan, tried = plan_of(command, launched.name), plan_of(command, winner["run_ids"][0])
    assert (plan["rendezvous"]["workers"], plan["levers"]) == (tried["rendezvous"]["workers"], tried["levers"])
    assert [node["place"]["node"] for node in plan["nodes"]] == [node["place"]["node"] for node in tried["nodes"]]
    assert_no_agents()


def evaluations(run: Path) -> list[int]:
    """Steps after which a run was evaluated."""
    texts = [path.read_text() for path in (run / "samples/node-0").glob("*.jsonl")]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    return sorted({line["step"] for line in lines if line["kind"] == "evaluation" and line["rank"] == 0})
