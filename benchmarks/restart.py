"""Time from the death of a worker to the first step of the next attempt, beside the time of the first launch.

    multinode lab up --nodes 2 --rate 1gbit
    .venv/bin/python benchmarks/restart.py --repeats 10
    .venv/bin/python benchmarks/restart.py --repeats 10 --set deepspeed=configs/deepspeed/ds_z2_config.json

As root, with a lab of two nodes up. Each repeat launches LLaMA-Factory's tiny training on both nodes with
`--restarts 1` and kills one worker with SIGKILL after its first checkpoint. `launch_s` is from the command to the first
step that a worker records, `restart_s` from the kill to the first one of the second attempt, by the one clock of this
machine. `copy_s` is what copying files of a checkpoint took in between, a part of `restart_s`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from command import JOB, MULTINODE, REPOSITORY, SHAPE

DEADLINE_S = 600.0
KILL_AT, STEPS, EVERY = 14, 40, 10
_LOOK_S = 0.02
_COPIED = re.compile(r"copied .* in (?P<s>[\d.]+) s")


def main() -> None:
    """Measure and print one JSON document, and a line a repeat on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    asked = parser.parse_args()
    rows = []
    for repeat in range(asked.repeats):
        rows.append(measure(asked.settings))
        print(f"{repeat + 1}: {json.dumps(rows[-1])}", file=sys.stderr, flush=True)
    late = [row["restart_s"] - row["copy_s"] - row["launch_s"] for row in rows]
    document: dict[str, Any] = {"schema": "multinode.benchmark.restart/1", "settings": asked.settings, "repeats": rows}
    document["later_than_a_launch_s"] = {"median": statistics.median(late), "most": max(late)}
    print(json.dumps(document, indent=1))


def measure(settings: list[str]) -> dict[str, float]:
    """One run that loses a worker.

    Raises:
        SystemExit: it did not succeed in its second attempt.
    """
    runs = Path(tempfile.mkdtemp(prefix="multinode-restart-"))
    output = f"/var/tmp/{runs.name}"  # noqa: S108 - on the lab's own nodes
    changes = [f"max_steps={STEPS}", "save_strategy=steps", f"save_steps={EVERY}", f"output_dir={output}", *settings]
    words = [word for change in changes for word in ("--set", change)]
    began_s = time.time()
    with subprocess.Popen(
        [MULTINODE, "launch", JOB, *SHAPE, "--restarts", "1", *words],
        cwd=REPOSITORY,
        env=os.environ | {"MULTINODE_RUNS": str(runs)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as controller:
        try:
            first = wait_step(controller, runs, 1, 1)
            wait_step(controller, runs, 1, KILL_AT)
            killed_s = time.time()
            os.kill(worker(runs, 1), signal.SIGKILL)
            resumed = wait_step(controller, runs, 2, 1)
            printed, said = controller.communicate(timeout=DEADLINE_S)
        finally:
            controller.terminate()
    if controller.returncode:
        raise SystemExit(f"it failed: {printed}{said}")
    shutil.rmtree(runs)
    copies = [float(found["s"]) for found in _COPIED.finditer(said)]
    return {"launch_s": first - began_s, "restart_s": resumed - killed_s, "copy_s": sum(copies)}


def wait_step(controller: subprocess.Popen[str], runs: Path, attempt: int, step: int) -> float:
    """When a worker recorded that many steps of an attempt, by the wall clock."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        for path in runs.glob(f"*-{attempt}/samples/node-*/*.jsonl"):
            times = [sample["time_s"] for line in path.read_text().splitlines() if (sample := read_step(line))]
            if len(times) >= step:
                return float(times[step - 1])
        if controller.poll() is not None:
            raise SystemExit(f"it ended before step {step} of attempt {attempt}: {controller.communicate()}")
        time.sleep(_LOOK_S)
    raise SystemExit(f"no step {step} of attempt {attempt} within {DEADLINE_S:.0f} s")


def read_step(line: str) -> dict[str, Any] | None:
    """A whole line of a step."""
    try:
        sample: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return sample if sample.get("kind") == "step" else None


def worker(runs: Path, rank: int) -> int:
    """The process of a rank of the first attempt, on any node of the lab."""
    (attempt,) = runs.glob("*-1")
    wanted = {f"RANK={rank}".encode(), b"LOCAL_RANK=0"}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            variables = set((path / "environ").read_bytes().split(b"\0"))
        except OSError:
            continue
        of_run = any(each.startswith(f"MULTINODE_RUN_ID={attempt.name}.".encode()) for each in variables)
        if of_run and wanted <= variables:
            return int(path.name)
    raise SystemExit(f"no process of rank {rank} in {attempt.name}")


if __name__ == "__main__":
    main()
