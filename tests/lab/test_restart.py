"""`launch --restarts` on the lab: whatever ends an attempt, a later one goes on from the last complete checkpoint.

With a stand-in for LLaMA-Factory, whose checkpoints are framed as the real ones. That a node is waited for, and what is
said when it does not return, each commit sees without a lab (tests/launch/test_restarts.py).
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest

from multinode.lab.cluster import require_lab
from tests.equipment.faults import DiskFull, NodeState
from tests.lab.faulting import faults
from tests.lab.launching import (
    DEADLINE_S,
    RUN_DEADLINE_S,
    Command,
    agents,
    assert_no_agents,
    assert_nothing_left,
    command_line,
    kill,
    processes_of,
    wait_for,
)
from tests.lab.restarting import LAUNCH, STEPS, Attempts, assert_resumed, launched, on_node, training
from tests.lab.supervised import STAND_IN, document_in, parent, wait_said, worker

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.long, pytest.mark.usefixtures("module_lab", "tiny")]

QUICK = ("--no-check", "--env", f"PYTHONPATH={STAND_IN}", "--env", "STEP_S=0.02")


def supervisors(run_id: str) -> list[int]:
    launchers = [pid for pid in processes_of(run_id) if "torch.distributed.run" in command_line(pid)]
    return sorted({parent(pid) for pid in launchers} & set(agents()))


def test_a_run_outlives_a_worker_a_supervisor_and_a_full_disk(command: Command) -> None:
    options = ("--restarts", "3", "--node-wait", "2m", *QUICK)
    checked = tuple(word for word in options if word != "--no-check")
    with launched(command, *checked, *training("/var/tmp/three-faults")) as (controller, run):
        run.wait_until(1, 45)
        kill(worker(run.name(1), 1))
        run.wait_until(2, 85)
        kill(supervisors(run.name(2))[0])
        run.wait_until(3, 125)
        with faults(DiskFull(node="node1")):
            wait_for(lambda: run.status(3) == "failed")
            # It is not started again while the disk is full, whatever time passes.
            wait_said(controller, "waiting: node1: ")
            assert not (command.runs / run.name(4)).exists()
        document = document_in(controller.communicate(timeout=RUN_DEADLINE_S)[0])
    assert (document["status"], controller.returncode) == ("succeeded", 0)
    attempts = document["attempts"]
    assert [one["status"] for one in attempts] == ["failed", "failed", "failed", "succeeded"]
    failures = [one["first_failure"] for one in attempts[:3]]
    assert (failures[0]["node"], failures[0]["rank"], failures[0]["signal"]) == ("node1", 1, "SIGKILL")
    assert "supervisor" in failures[1]["message"]
    assert (failures[2]["node"], failures[2]["kind"]) == ("node1", "disk_full")
    for before, attempt in itertools.pairwise(attempts):
        assert_resumed(attempt, before)
    assert attempts[-1]["last_step"] == STEPS
    assert not any(processes_of(run.name(number)) for number in range(1, 5))
    assert_no_agents()


@pytest.mark.thorough
def test_a_node_without_power_is_waited_for(command: Command, shared_dir: Path) -> None:
    """Its disk outlives the loss of its power, as a lab node's does not: copied to where the node sees it again."""
    output = shared_dir / "out"
    options = ("--restarts", "3", "--node-wait", "2m", *QUICK)
    with launched(command, *options, *training(output)) as (controller, run):
        run.wait_until(1, 45)
        shutil.copytree(on_node("node1", str(output)), output)
        with faults(NodeState(node="node1", how="kill")):
            wait_for(lambda: run.status(1) == "lost")
            wait_said(controller, "waiting until the run has ended")
        document = document_in(controller.communicate(timeout=RUN_DEADLINE_S)[0])
    assert (document["status"], controller.returncode) == ("succeeded", 0)
    first, second = document["attempts"]
    assert (first["status"], first["first_failure"]["kind"], first["first_failure"]["node"]) == (
        "lost",
        "node_lost",
        "node1",
    )
    assert_resumed(second, first)
    assert (second["world_size"], second["left_out"], second["last_step"]) == (2, {}, STEPS)
    assert_nothing_left(command)


def test_a_node_that_stays_away_is_left_out_and_the_global_batch_is_kept(command: Command) -> None:
    options = ("--restarts", "3", "--node-wait", "8s", "--min-nodes", "1", *QUICK)
    with launched(command, *options, *training("/var/tmp/left-out")) as (controller, run):
        run.wait_until(1, 45)
        # Node 0 is the one with the rendezvous: the other one takes its place.
        with faults(NodeState(node="node0", how="kill")):
            document = document_in(controller.communicate(timeout=RUN_DEADLINE_S)[0])
    assert (document["status"], controller.returncode) == ("succeeded", 0)
    first, second = document["attempts"]
    assert (first["status"], second["status"]) == ("lost", "succeeded")
    assert_resumed(second, first)
    assert (second["world_size"], list(second["left_out"]), second["last_step"]) == (1, ["node0"], STEPS)
    assert second["global_batch"] == first["global_batch"] == 4
    assert [node["name"] for node in document["nodes"]] == ["node1"]
    plan = json.loads((command.runs / run.name(2) / "plan.json").read_text())
    (node,) = plan["nodes"]
    assert (node["place"]["node"], node["place"]["ranks"]) == ("node1", [0])
    assert "gradient_accumulation_steps: 2\n" in node["files"][0]["text"]
    shown = " ".join(command.run("show", run.run_id).stdout.split())
    assert (
        f"{run.name(2)} from {second['checkpoint']}: succeeded at step 200 without node0 (1 worker, global batch 4)"
        in shown
    )
    assert_nothing_left(command)


def test_without_a_node_of_fewer_workers_the_global_batch_is_kept(command: Command, tmp_path: Path) -> None:
    hosts = tmp_path / "unequal"
    hosts.write_text(re.sub(r"(?m)^(node1 .*)slots=2", r"\1slots=1", Path(require_lab().hostfile).read_text()))
    launch = tuple(word for word in LAUNCH if word not in {"--workers-per-node", "1"})
    options = ("--hosts", str(hosts), "--restarts", "1", "--node-wait", "8s", "--min-nodes", "1", *QUICK)
    job = (*training("/var/tmp/left-out-unequal"), "--set", "gradient_accumulation_steps=2")
    with command.running(*launch, *options, *job) as controller:
        run = Attempts(command)
        run.wait_until(1, 45)
        with faults(NodeState(node="node1", how="kill")):
            document = document_in(controller.communicate(timeout=RUN_DEADLINE_S)[0])
    assert (document["status"], controller.returncode) == ("succeeded", 0)
    first, second = document["attempts"]
    assert_resumed(second, first)
    assert (first["world_size"], second["world_size"], list(second["left_out"])) == (3, 2, ["node1"])
    # Two samples in each of two micro-batches of three workers, and then in each of three of two.
    assert second["global_batch"] == first["global_batch"] == 12
    plan = json.loads((command.runs / run.name(2) / "plan.json").read_text())
    assert [node["place"]["ranks"] for node in plan["nodes"]] == [[0, 1]]
    assert "gradient_accumulation_steps: 3\n" in plan["nodes"][0]["files"][0]["text"]
    assert_nothing_left(command)


def test_a_run_that_waits_is_stopped_from_another_terminal(command: Command) -> None:
    options = ("--restarts", "3", "--node-wait", "10m", *QUICK)
    checked = tuple(word for word in options if word != "--no-check")
    with launched(command, *checked, *training("/var/tmp/stopped")) as (controller, run):
        run.wait_until(1, 25)
        with faults(DiskFull(node="node1")):
            wait_said(controller, "waiting: node1: ")
            stopped = command.document("stop", run.run_id, "--json")
            document = document_in(controller.communicate(timeout=DEADLINE_S)[0])
    assert (stopped["run_id"], stopped["status"], stopped["stop_reason"]) == (run.run_id, "stopped", "stop")
    assert (document["status"], controller.returncode) == ("stopped", 130)
    (only,) = document["attempts"]
    assert (only["first_failure"]["kind"], only["not_restarted"]) == ("disk_full", "it was told to stop")
    assert_nothing_left(command)


@pytest.mark.thorough
def test_a_disk_that_stays_full_is_told_and_the_run_ends(command: Command) -> None:
    options = ("--restarts", "3", "--node-wait", "3s", *QUICK)
    checked = tuple(word for word in options if word != "--no-check")
    with launched(command, *checked, *training("/var/tmp/left-full")) as (controller, run):
        run.wait_until(1, 25)
        with faults(DiskFull(node="node1")):
            document = document_in(controller.communicate(timeout=RUN_DEADLINE_S)[0])
    assert (document["status"], controller.returncode) == ("failed", 1)
    (only,) = document["attempts"]
    assert only["first_failure"]["kind"] == "disk_full"
    assert "node1" in only["not_restarted"]
    assert re.search(r"MiB free|No space left", only["not_restarted"]), only
    assert not processes_of(run.name(1))
    assert_nothing_left(command)


def test_a_script_that_fails_once_is_restarted_and_finishes(tmp_path: Path) -> None:
    command = Command(tmp_path / "runs")
    tell = f'echo "$MULTINODE_EVENT $MULTINODE_STATUS" >> {tmp_path}/told'
    options = ("--restarts", "2", "--node-wait", "1m", "--on-end", tell, *QUICK)
    done = command.run(*LAUNCH, *options, "--", "tests/lab/fails_once.py", "--lines", "--steps", "30")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    run_id = document["run_id"]
    assert (document["status"], document["summary"]["steps"]) == ("succeeded", 30)
    first, second = document["attempts"]
    # The other rank records the step at which this one fails.
    assert (first["run_id"], first["status"], first["last_step"]) == (f"{run_id}-1", "failed", 15)
    assert "asked to fail at step 15" in first["first_failure"]["message"]
    assert first["lost_s"] > 0
    assert first["lost_steps"] is None
    assert (second["run_id"], second["status"], second["last_step"]) == (f"{run_id}-2", "succeeded", 30)
    assert second["not_restarted"] is None
    assert "attempt 2 of 3" in done.stderr
    assert sorted((tmp_path / "told").read_text().splitlines()) == ["end succeeded", "restart running"]
    assert processes_of(f"{run_id}-1") == processes_of(f"{run_id}-2") == []
    assert_no_agents()

    shown = " ".join(command.run("show", run_id).stdout.split())
    assert f"{run_id}-1 from the beginning: failed at step 15" in shown
    assert f"{run_id}-2 from the beginning: succeeded at step 30" in shown
    log = command.run("logs", run_id).stdout
    assert "asked to fail" in log
    assert "rank 0 line 29 end" in log
    listed = {run["run_id"]: run["status"] for run in command.document("runs", "--json")["runs"]}
    assert listed == {run_id: "succeeded", f"{run_id}-1": "failed", f"{run_id}-2": "succeeded"}
    # Nothing of an ended run is left to stop; the last attempt is what is meant.
    assert command.document("attach", run_id, "--json")["run_id"] == f"{run_id}-2"
    page = tmp_path / "page.html"
    assert command.run("report", run_id, "--output", str(page)).returncode == 0
    assert f"{run_id}-1" in page.read_text()
    assert "Nothing was recorded" not in page.read_text()
