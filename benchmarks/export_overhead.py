"""What a live export costs a training: blocks of one run with and without it, in pairs.

In the lab the export takes its time from the same cores as the training; with a controller of its own it does not.
The order within a pair changes from one to the next, so that drift of the machine hits both alike. A block begins some
seconds after the export was started or ended. Step times are the workers' own.

Run as root, with a lab of two nodes up and nothing else on the machine; 20 pairs take 9 minutes:

    multinode lab up --nodes 2 --rate 1gbit
    .venv/bin/python benchmarks/export_overhead.py
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
MULTINODE = (sys.executable, "-m", "multinode")
JOB = "configs/tiny_sft.yaml"
_SETTLE_S = 3.0
_START_S = 400.0
_NICENESS = 10
# Of Student's distribution, 97.5%, by degrees of freedom: both ends of a 95% interval.
_STUDENT = {5: 2.571, 7: 2.365, 9: 2.262, 11: 2.201, 15: 2.131, 19: 2.093, 23: 2.069, 29: 2.045, 39: 2.023}


def main() -> None:
    """Measure and print one JSON document, and a line per pair on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20, choices=[one + 1 for one in _STUDENT])
    parser.add_argument("--block", type=float, default=9.0, help="seconds of a block")
    parser.add_argument(
        "--target", default="tensorboard:{}/tb", help="of the export; {} is a directory that is removed"
    )
    arguments = parser.parse_args()
    losses = []
    with tempfile.TemporaryDirectory() as folder, _training(Path(folder)) as samples:
        target = arguments.target.format(folder)
        for number in range(arguments.pairs):
            order = (True, False) if number % 2 else (False, True)
            step_s = {on: _block(Path(folder), samples, target if on else None, arguments.block) for on in order}
            losses.append(step_s[True] / step_s[False] - 1)
            sys.stderr.write(f"with {step_s[True]:.4f} s, without {step_s[False]:.4f} s: {losses[-1]:+.2%}\n")
    half = _STUDENT[len(losses) - 1] * statistics.stdev(losses) / math.sqrt(len(losses))
    mean = statistics.fmean(losses)
    document = {
        "schema": "multinode.benchmark.export-overhead/1",
        "job": JOB,
        "target": arguments.target,
        "block_s": arguments.block,
        "losses": losses,
        "mean_loss": mean,
        "median_loss": statistics.median(losses),
        "interval_95": [mean - half, mean + half],
    }
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


@contextlib.contextmanager
def _training(runs: Path) -> Iterator[Path]:
    """A training on the lab, one worker on each node, that is stopped at the end; the first worker's samples."""
    command = [*MULTINODE, "launch", "--hosts", "lab", "--workers-per-node", "1", "--no-check"]
    with (runs / "launch.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--set", "max_steps=1000000", "--set", "save_steps=1000000", JOB],
            cwd=REPOSITORY,
            env={**os.environ, "MULTINODE_RUNS": str(runs)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + _START_S
        while not (found := [path for path in runs.glob("*/samples/node-0/*.jsonl") if _steps(path, 0.0)]):
            assert process.poll() is None, (runs / "launch.log").read_text()
            assert time.monotonic() < deadline, "the training made no step"
            time.sleep(0.5)
        time.sleep(2 * _SETTLE_S)
        yield found[0]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(_START_S)


def _block(runs: Path, samples: Path, target: str | None, length_s: float) -> float:
    """Mean step time of a block, with an export to a target or without one."""
    export = None
    if target is not None:
        run_id = samples.parents[2].name
        export = subprocess.Popen(
            [*MULTINODE, "export", run_id, target, "--follow"],
            env={**os.environ, "MULTINODE_RUNS": str(runs)},
            stdin=subprocess.DEVNULL,
        )
        os.setpriority(os.PRIO_PROCESS, export.pid, _NICENESS)
    time.sleep(_SETTLE_S)
    began_s = time.time()
    time.sleep(length_s)
    if export is not None:
        assert export.poll() is None, "the export has failed"
        export.terminate()
        export.wait(_START_S)
    # What is not here yet comes within a second.
    time.sleep(1.0)
    steps = [took_s for ended_s, took_s in _steps(samples, began_s) if ended_s - took_s >= began_s]
    return statistics.fmean(steps)


def _steps(samples: Path, since_s: float) -> list[tuple[float, float]]:
    """When each step ended, and how long it took, of those that ended since."""
    found = []
    for line in samples.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            record = json.loads(line)
            if record.get("kind") == "step" and record.get("step_time_us") and record["time_s"] >= since_s:
                found.append((record["time_s"], record["step_time_us"] / 1e6))
    return found


if __name__ == "__main__":
    main()
