"""`launch --restarts` on the lab: whatever ends an attempt, a later one goes on from the last complete checkpoint.

Most of it with a stand-in for LLaMA-Factory, whose checkpoints are framed as the real ones; the losses are the real
one's. That a node is waited for, and what is said when it does not return, each commit sees without a lab
(tests/launch/test_restarts.py).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from tests.lab.supervised import REAL_TORCH, STAND_IN, document_in, parent, wait_said, worker

pytestmark = [pytest.mark.lab, pytest.mark.torch, pytest.mark.usefixtures("module_lab", "tiny")]

STEPS, EVERY = 200, 20
# In the id of a run; an attempt's has its number behind one more.
RUN_DASHES = 2
LAUNCH = ("launch", "--hosts", "lab", "--json", "--workers-per-node", "1", "--lease", "5", "--grace-period", "2")
QUICK = ("--no-check", "--env", f"PYTHONPATH={STAND_IN}", "--env", "STEP_S=0.02")
_STEP = re.compile(r'"step": (\d+)')


def training(output: Path | str, steps: int = STEPS, every: int = EVERY) -> tuple[str, ...]:
    changes = {"max_steps": steps, "save_strategy": "steps", "save_steps": every, "output_dir": output}
    return ("configs/tiny_sft.yaml", *(word for key, value in changes.items() for word in ("--set", f"{key}={value}")))


class Attempts:
    """A run with restarts, as it goes on.

    Args:
        command: it was started with.
    """

    def __init__(self, command: Command) -> None:
        self._command = command
        (whole,) = wait_for(lambda: [path for path in command.runs.glob("*") if path.name.count("-") == RUN_DASHES])
        self.run_id = whole.name

    def name(self, number: int) -> str:
        return f"{self.run_id}-{number}"

    def step(self, number: int, node_rank: int = 1) -> int:
        """The last step that a node's worker has recorded in an attempt."""
        files = (self._command.runs / self.name(number)).glob(f"samples/node-{node_rank}/*.jsonl")
        return max((int(step) for path in files for step in _STEP.findall(path.read_text())), default=0)

    def wait_until(self, number: int, step: int, node_rank: int = 1) -> None:
        wait_for(lambda: self.step(number, node_rank) >= step, deadline_s=RUN_DEADLINE_S)

    def status(self, number: int) -> str:
        path = self._command.runs / self.name(number) / "run.json"
        found: str = json.loads(path.read_text())["status"]
        return found


@contextlib.contextmanager
def launched(command: Command, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], Attempts]]:
    with command.running(*LAUNCH, *arguments) as controller:
        yield controller, Attempts(command)


def on_node(node: str, path: str) -> Path:
    """Where a node's file is seen from here."""
    return Path(f"/proc/{require_lab().node(node).init.pid}/root{path}")


def assert_resumed(attempt: dict[str, Any], before: dict[str, Any], every: int = EVERY) -> None:
    """An attempt went on from a checkpoint of the one before it, and what that lost is told."""
    assert attempt["checkpoint"] == f"checkpoint-{attempt['first_step']}", attempt
    assert attempt["first_step"] % every == 0
    assert before["first_step"] <= attempt["first_step"] <= before["last_step"]
    assert before["lost_steps"] == before["last_step"] - attempt["first_step"]
    # The last checkpoint may have been cut short; the one before it was not.
    assert before["lost_steps"] < 2 * every
    assert before["lost_s"] > 0


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
    assert (failures[0]["rank"], failures[0]["signal"]) == (1, "SIGKILL")
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


def losses(command: Command, run_id: str) -> dict[tuple[int, int], float]:
    """The loss that each rank recorded at each step of an attempt."""
    files = (command.runs / run_id).glob("samples/*/rank-*.jsonl")
    records = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    return {(one["rank"], one["step"]): one["loss"] for one in records if one["kind"] == "loss"}


def test_steps_that_are_made_again_have_the_losses_of_the_first_time(command: Command) -> None:
    """Real LLaMA-Factory, real DDP over gloo; equal to the last bit. Its dropout takes random numbers at every step."""
    options = ("--engine", "torchrun", "--env", "OMP_NUM_THREADS=1", "--no-check", *REAL_TORCH)
    lora = ("--set", "finetuning_type=lora", "--set", "lora_dropout=0.1")
    # There is one checkpoint when the worker is killed, and steps are left for the time until then.
    every, steps = 8, 24
    job = (*training("/var/tmp/made-again", steps, every), *lora)
    with launched(command, "--restarts", "3", *options, *job) as (controller, run):
        run.wait_until(1, every + 5)
        kill(worker(run.name(1), 1))
        document = document_in(controller.communicate(timeout=RUN_DEADLINE_S)[0])
    assert document["status"] == "succeeded", document
    first, second = document["attempts"]
    assert_resumed(second, first, every)
    assert (second["first_step"], second["last_step"]) == (every, steps)
    before, after = (losses(command, run.name(number)) for number in (1, 2))
    again = {key: loss for key, loss in before.items() if key[1] > every}
    # The loss of a step is logged when it has ended.
    assert {(rank, step) for rank in (0, 1) for step in range(every + 1, every + 5)} <= set(again)
    assert again == {key: after[key] for key in again}
    assert_nothing_left(command)


def trained(output: str) -> tuple[list[dict[str, Any]], bytes]:
    """Of the last checkpoint on node 0: loss, gradient norm and learning rate of every step, and the weights."""
    folder = on_node("node0", f"{output}/checkpoint-{STEPS}")
    history: list[dict[str, Any]] = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return history, (folder / "model.safetensors").read_bytes()


@pytest.mark.thorough
def test_losses_and_weights_after_a_resume_are_those_of_an_undisturbed_training(command: Command) -> None:
    """Likewise, with torchrun itself."""
    options = ("--engine", "torchrun", "--env", "OMP_NUM_THREADS=1")
    disturbed, undisturbed = "/var/tmp/disturbed", "/var/tmp/undisturbed"
    with launched(command, "--restarts", "3", *options, *training(disturbed)) as (controller, run):
        run.wait_until(1, STEPS - 15)
        kill(worker(run.name(1), 1))
        document = document_in(controller.communicate(timeout=RUN_DEADLINE_S)[0])
    assert document["status"] == "succeeded", document
    first, second = document["attempts"]
    assert_resumed(second, first)
    assert second["last_step"] == STEPS
    code, whole = command.code_and_document(*LAUNCH, *options, *training(undisturbed))
    assert (code, whole["summary"]["last_loss"]) == (0, document["summary"]["last_loss"])
    history, weights = trained(disturbed)
    expected, their_weights = trained(undisturbed)
    assert [entry["step"] for entry in expected] == list(range(1, STEPS + 1))
    assert history == expected
    assert weights == their_weights
    assert_nothing_left(command)
