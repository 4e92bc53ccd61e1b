"""What profiling costs a training: pairs of runs on the lab, with and without it, in turn.

Both sides are LLaMA-Factory with a clock of its own (timed_training.py), which knows nothing of multinode: the median
time of a step. The order within a pair changes from one to the next, so that drift of the machine hits both alike.

Run as root, with a lab of two nodes up and nothing else on the machine:

    multinode lab up --nodes 2 --rate 1gbit
    .venv/bin/python benchmarks/profile_overhead.py --pairs 12
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

BIN = Path(sys.executable).parent
REPOSITORY = Path(__file__).parent.parent
JOB = "configs/tiny_sft.yaml"
_STEP = re.compile(r"median step ([\d.]+) s")
_WARM_UP_PAIRS = 1


def main() -> None:
    """Measure and print one JSON document, and a line a pair on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    pairs = []
    for number in range(arguments.pairs + _WARM_UP_PAIRS):
        order = (True, False) if number % 2 else (False, True)
        step_s = {profiled: _measure(profiled=profiled, steps=arguments.steps) for profiled in order}
        if number >= _WARM_UP_PAIRS:  # the first pair warms the caches of both
            pairs.append({"with": step_s[True], "without": step_s[False], "loss": 1 - step_s[False] / step_s[True]})
            sys.stderr.write(f"{pairs[-1]}\n")
    losses = sorted(pair["loss"] for pair in pairs)
    quarter = len(losses) // 4
    document = {
        "schema": "multinode.benchmark.profile-overhead/1",
        "job": JOB,
        "steps": arguments.steps,
        "pairs": pairs,
        "median_loss": statistics.median(losses),
        "middle_half": [losses[quarter], losses[-1 - quarter]],
        "loss_of_medians": 1
        - statistics.median(pair["without"] for pair in pairs) / statistics.median(pair["with"] for pair in pairs),
    }
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def _measure(*, profiled: bool, steps: int) -> float:
    """Seconds of a step, of a training with a worker on each node."""
    command = [str(BIN / "multinode"), "launch", "--hosts", "lab", "--workers-per-node", "1", "--no-check", "--json"]
    command += ["--profile" if profiled else "--no-profile", "--", "benchmarks/timed_training.py", JOB, str(steps)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    log = Path(json.loads(done.stdout)["directory"], "logs", "node-0.log").read_text()
    return float(_STEP.findall(log)[-1])


if __name__ == "__main__":
    main()
