"""What profiling costs a training: pairs of runs on the lab, with and without it, in turn.

Both sides are LLaMA-Factory with a clock of its own (timed_training.py), which knows nothing of multinode: the median
time of a step, and the Trainer's own `train_runtime`, which holds what is spent once inside the training too. The order
within a pair changes from one to the next, so that drift of the machine hits both alike.

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
from typing import Any

from multinode.stats.estimate import of_repeats

BIN = Path(sys.executable).parent
REPOSITORY = Path(__file__).parent.parent
JOB = "configs/tiny_sft.yaml"
_FIGURES = {
    "step_s": re.compile(r"median step ([\d.]+) s"),
    "train_runtime_s": re.compile(r"'train_runtime': '?([\d.]+)"),
}
_WARM_UP_PAIRS = 1


def main() -> None:
    """Measure and print one JSON document, and a line a pair on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    pairs: dict[str, list[dict[str, float]]] = {name: [] for name in _FIGURES}
    for number in range(arguments.pairs + _WARM_UP_PAIRS):
        order = (True, False) if number % 2 else (False, True)
        taken = {profiled: _measure(profiled=profiled, steps=arguments.steps) for profiled in order}
        if number < _WARM_UP_PAIRS:  # the first pair warms the caches of both
            continue
        for name, all_pairs in pairs.items():
            with_s, without_s = taken[True][name], taken[False][name]
            all_pairs.append({"with": with_s, "without": without_s, "ratio": with_s / without_s})
            sys.stderr.write(f"{name}: {all_pairs[-1]}\n")
    document = {
        "schema": "multinode.benchmark.profile-overhead/2",
        "job": JOB,
        "steps": arguments.steps,
        **{name: _judge(all_pairs) for name, all_pairs in pairs.items()},
    }
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def _judge(pairs: list[dict[str, float]]) -> dict[str, Any]:
    ratios = sorted(pair["ratio"] for pair in pairs)
    quarter = len(ratios) // 4
    mean = of_repeats(ratios)
    return {
        "pairs": pairs,
        "median_ratio": statistics.median(ratios),
        "middle_half": [ratios[quarter], ratios[-1 - quarter]],
        "mean_ratio": mean.value,
        "interval": [mean.low, mean.high],
    }


def _measure(*, profiled: bool, steps: int) -> dict[str, float]:
    """Seconds of a step and of the whole training, with a worker on each node."""
    command = [str(BIN / "multinode"), "launch", "--hosts", "lab", "--workers-per-node", "1", "--no-check", "--json"]
    command += ["--profile" if profiled else "--no-profile", "--", "benchmarks/timed_training.py", JOB, str(steps)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    log = Path(json.loads(done.stdout)["directory"], "logs", "node-0.log").read_text()
    return {name: float(pattern.findall(log)[-1]) for name, pattern in _FIGURES.items()}


if __name__ == "__main__":
    main()
