"""Whether losses after a restart are those of a training that nothing disturbed.

    multinode lab up --nodes 2 --rate 1gbit
    .venv/bin/python benchmarks/restart_losses.py
    .venv/bin/python benchmarks/restart_losses.py --job llamafactory --sharding zero2 --fault worker

As root, with a lab of two nodes up. A training of 160 steps saves every 20 steps, with one worker on each node. After a
checkpoint, a fault ends the first attempt: a worker is killed, a node loses both its links until its processes have
ended, or a node returns with an empty disk and gets its shards from the copy on the other node. The losses of all
later steps of each rank are compared with those of the same training without a fault.

    .venv/bin/python benchmarks/restart_losses.py --sharding fsdp2 --fault gone

A node that is gone for good: the other one goes on alone (`--min-nodes 1`), with FSDP 2 only. The mean loss of all
later steps is compared with that of the undisturbed training, beside undisturbed trainings with two more seeds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from os import kill
from pathlib import Path
from typing import Any

from command import JOB, REPOSITORY

sys.path.insert(0, str(Path(__file__).parents[1]))

from multinode.lab.cluster import require_lab
from multinode.lab.state import DATA_IFNAME, MANAGEMENT_IFNAME
from tests.equipment.faults import LinkDown, NodeState
from tests.lab.faulting import faults
from tests.lab.launching import RUN_DEADLINE_S, Command, wait_for
from tests.lab.supervised import REAL_TORCH, document_in, wait_said, worker

JOBS = ("llamafactory", "script")
SHARDINGS = ("zero2", "zero3", "fsdp2")
FAULTS = ("worker", "unplugged", "empty-disk")
GONE = "gone"
SEEDS = (42, 43, 44)
STEPS, EVERY, KILL_AT = 160, 20, 25
_CONFIGS = {"zero2": "ds_z2_config", "zero3": "tiny_z3_config"}
_SHARDED = Path(__file__).parents[1] / "tests/lab/sharded"
_LAUNCH = ("launch", "--hosts", "lab", "--json", "--workers-per-node", "1", "--lease", "5", "--grace-period", "2")
_OPTIONS = ("--engine", "torchrun", "--env", "OMP_NUM_THREADS=1", "--no-check", "--restarts", "3")
_WAIT = ("--node-wait", "5m")
_GO_ON = ("--node-wait", "8s", "--min-nodes", "1")
# One run, in whose id there are two dashes; an attempt's has its number behind one more.
_RUN_DASHES = 2


def main() -> None:
    """Measure and print one JSON document, and a line for each cell on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", choices=JOBS, action="append")
    parser.add_argument("--sharding", choices=SHARDINGS, action="append")
    parser.add_argument("--fault", choices=(*FAULTS, GONE), action="append")
    asked = parser.parse_args()
    # No node compiles DeepSpeed's CPU operation while its peer waits for it.
    subprocess.run([sys.executable, "scripts/compile_deepspeed.py"], cwd=REPOSITORY, check=True)
    rows = []
    for job, sharding in itertools.product(asked.job or JOBS, asked.sharding or SHARDINGS):
        undisturbed = train(job, sharding)
        for fault in asked.fault or FAULTS:
            row = {"job": job, "sharding": sharding, "fault": fault}
            if fault == GONE:
                row |= without_a_node(undisturbed, job, sharding)
            else:
                row |= compare(undisturbed, job, sharding, fault)
            rows.append(row)
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"schema": "multinode.benchmark.restart_losses/1", "rows": rows}, indent=1))


def words_of(job: str, sharding: str, output: str, seed: int = SEEDS[0]) -> list[str]:
    """What is launched.

    Returns:
        Options of `launch`, then the job.
    """
    modules = REAL_TORCH
    if sharding == "fsdp2":
        modules = ("--env", f"{REAL_TORCH[1]}:{_SHARDED}", *REAL_TORCH[2:])
    zero = f"configs/deepspeed/{_CONFIGS.get(sharding)}.json"
    settings: dict[str, Any] = {"output_dir": output, "max_steps": STEPS, "save_strategy": "steps", "save_steps": EVERY}
    settings["seed"] = seed
    if job == "llamafactory":
        fsdp = {"fsdp": "full_shard auto_wrap", "fsdp_config": "{version: 2}"}
        settings |= fsdp if sharding == "fsdp2" else {"deepspeed": zero}
        changes = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        return [*_OPTIONS, *modules, JOB, *changes]
    fsdp = {"fsdp": "full_shard", "fsdp_config": '{"version": 2}'}
    settings |= fsdp if sharding == "fsdp2" else {"deepspeed": zero}
    settings |= {"logging_steps": 1, "report_to": "none", "use_cpu": "true"}
    script = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return [*_OPTIONS, *modules, "--", "tests/lab/train_saving.py", *script]


def train(job: str, sharding: str, seed: int = SEEDS[0]) -> dict[tuple[int, int], float]:
    """A training without a fault.

    Returns:
        The loss of each rank and step.

    Raises:
        SystemExit: it failed.
    """
    with tempfile.TemporaryDirectory(prefix="multinode-losses-") as runs:
        command = Command(Path(runs))
        output = f"/var/tmp/{Path(runs).name}"  # noqa: S108 - on the lab's own nodes
        done = command.run(*_LAUNCH, *_WAIT, *words_of(job, sharding, output, seed))
        if done.returncode:
            raise SystemExit(f"it failed: {done.stdout}{done.stderr}")
        remove(output)
        return losses(command.runs.glob("*/samples/*/rank-*.jsonl"))


def compare(undisturbed: dict[tuple[int, int], float], job: str, sharding: str, fault: str) -> dict[str, Any]:
    """A training that a fault ends once, beside the one without.

    Returns:
        The step from which it went on, how many losses were compared, how many are equal to the last bit, and the
        largest relative difference.

    Raises:
        SystemExit: it did not succeed in its second attempt, or losses lack.
    """
    second, after = disturbed(job, sharding, fault)
    wanted = {key: loss for key, loss in undisturbed.items() if key[1] > second["first_step"]}
    if not wanted or wanted.keys() - after.keys():
        raise SystemExit(f"{job}, {sharding}, {fault}: losses lack after step {second['first_step']}")
    differences = [abs(after[key] / loss - 1) for key, loss in wanted.items()]
    return {
        "from_step": second["first_step"],
        "compared": len(wanted),
        "equal": sum(after[key] == loss for key, loss in wanted.items()),
        "largest_difference": max(differences),
    }


def without_a_node(undisturbed: dict[tuple[int, int], float], job: str, sharding: str) -> dict[str, Any]:
    """A training that one of its two nodes leaves for good, beside undisturbed ones with three seeds.

    Returns:
        The step from which it went on, the mean loss of all later steps, those of the undisturbed trainings in the
        order of `SEEDS`, of which the first is its own, and the largest relative difference of a step.

    Raises:
        SystemExit: it did not succeed in its second attempt.
    """
    second, after = disturbed(job, sharding, GONE)
    steps = range(second["first_step"] + 1, STEPS + 1)
    seeds = [undisturbed, *(train(job, sharding, seed) for seed in SEEDS[1:])]
    return {
        "from_step": second["first_step"],
        "left_out": second["left_out"],
        "mean_loss": statistics.fmean(after[0, step] for step in steps),
        "mean_losses_undisturbed": [statistics.fmean(found[0, step] for step in steps) for found in seeds],
        "largest_difference": max(abs(after[0, step] / undisturbed[0, step] - 1) for step in steps),
    }


def disturbed(job: str, sharding: str, fault: str) -> tuple[dict[str, Any], dict[tuple[int, int], float]]:
    """A training that a fault ends once.

    Returns:
        The second attempt, as `launch --json` prints it, and its losses.

    Raises:
        SystemExit: it did not succeed in its second attempt.
    """
    waits = _GO_ON if fault == GONE else _WAIT
    with tempfile.TemporaryDirectory(prefix="multinode-losses-") as runs:
        command = Command(Path(runs))
        output = f"/var/tmp/{Path(runs).name}"  # noqa: S108 - on the lab's own nodes
        with command.running(*_LAUNCH, *waits, *words_of(job, sharding, output)) as controller:
            first = f"{next(iter(wait_for(lambda: whole_runs(command)))).name}-1"
            status = command.runs / first / "run.json"
            samples = command.runs / first / "samples"
            if fault in {"empty-disk", GONE}:
                wait_said(controller, "would survive the loss of a disk")
            wait_for(lambda: len(losses(samples.glob("node-1/rank-*.jsonl"))) >= KILL_AT, deadline_s=RUN_DEADLINE_S)
            if fault == "worker":
                kill(worker(first, 1), signal.SIGKILL)
            elif fault == GONE:
                with faults(NodeState(node="node1", how="kill")):
                    said = controller.communicate(timeout=2 * RUN_DEADLINE_S)[0]
            else:
                links = [LinkDown(node="node1", ifname=name) for name in (DATA_IFNAME, MANAGEMENT_IFNAME)]
                with faults(*(links if fault == "unplugged" else [NodeState(node="node1", how="kill")])):
                    wait_for(lambda: json.loads(status.read_text())["status"] != "running", deadline_s=RUN_DEADLINE_S)
                    wait_said(controller, "waiting until the run has ended")
            if fault != GONE:
                said = controller.communicate(timeout=RUN_DEADLINE_S)[0]
        document = document_in(said)
        if document["status"] != "succeeded" or len(document["attempts"]) != 2:  # noqa: PLR2004
            raise SystemExit(f"{job}, {sharding}, {fault}: {said}")
        remove(output)
        return document["attempts"][1], losses(command.runs.glob("*-2/samples/*/rank-*.jsonl"))


def remove(output: str) -> None:
    """The checkpoints on all nodes, whose disks are small; a node that was away has none."""
    for node in require_lab().nodes:
        folder = Path(f"/proc/{node.init.pid}/root{output}")
        if folder.exists():
            shutil.rmtree(folder)


def whole_runs(command: Command) -> list[Path]:
    """Folders of runs, without those of their attempts."""
    return [path for path in command.runs.glob("*") if path.name.count("-") == _RUN_DASHES]


def losses(files: Iterable[Path]) -> dict[tuple[int, int], float]:
    """The loss that each rank recorded at each step."""
    found = {}
    for path in files:
        for line in path.read_text().splitlines():
            try:
                sample = json.loads(line)
            except ValueError:  # it is being written
                continue
            if sample["kind"] == "loss":
                found[sample["rank"], sample["step"]] = sample["loss"]
    return found


if __name__ == "__main__":
    main()
