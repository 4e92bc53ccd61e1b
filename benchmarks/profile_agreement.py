"""How well the ways agree in which a profile tells one thing: bytes, exposed communication, bandwidth, at three rates.

Bytes of a step: by its calls, by the backend's algorithm, by the NIC. Exposed communication: by DDP's counters, by a
window of the profiler, and by the difference to the same two workers on one node. Bandwidth of the training's own
all-reduces beside nccl-test's at the same sizes.

Run as root, with a lab of two nodes up and nothing else on the machine:

    multinode lab up --nodes 2 --rate 1gbit
    .venv/bin/python benchmarks/profile_agreement.py
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from command import call

SCRIPT = "tests/lab/train_mlp.py"
NCCL_TEST = ("nccl-test", "--hosts", "lab", "-b", "4M", "-e", "16M", "-n", "4", "-w", "1", "--no-tcp")


def main() -> None:
    """Measure and print one JSON document, and a line a rate on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", default="100mbit,300mbit,1gbit")
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    rows = []
    for rate in arguments.rates.split(","):
        call("lab", "rate", "all", rate)
        call(*NCCL_TEST)
        one = _train("--nodes", "1", "--workers-per-node", "2", steps=arguments.steps)
        two = _train("--workers-per-node", "1", "--trace", "5", steps=arguments.steps)
        rows.append(_row(rate, one, two))
        sys.stderr.write(f"{rows[-1]}\n")
    sys.stdout.write(json.dumps({"schema": "multinode.benchmark.profile-agreement/1", "rows": rows}, indent=2) + "\n")


def _row(rate: str, one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    step_ms, exposed_ms = two["step_time_ms"]["median"]["value"], two["comm"]["exposed_ms"]["value"]
    bandwidth = two["comm"]["in_training"]
    return {
        "rate": rate,
        "step_ms": step_ms,
        "bytes_per_step": two["comm"]["bytes_per_step"],
        "exposed_ms": {
            "counters": exposed_ms,
            "window": two["trace"]["exposed_ms"],
            "difference": step_ms - (one["step_time_ms"]["median"]["value"] - one["comm"]["exposed_ms"]["value"]),
        },
        "busbw_gb_per_s": {"training": bandwidth["busbw_gb_per_s"], "nccl_test": bandwidth["alone"]["busbw_gb_per_s"]},
    }


def _train(*options: str, steps: int) -> dict[str, Any]:
    """The summary of one training."""
    command = ["launch", "--hosts", "lab", "--no-check", "--json", *options, "--", SCRIPT, "--steps", str(steps)]
    directory = json.loads(call(*command))["directory"]
    summary: dict[str, Any] = json.loads(Path(directory, "summary.json").read_text())
    return summary


if __name__ == "__main__":
    main()
