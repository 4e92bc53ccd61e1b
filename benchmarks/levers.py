"""What levers against a slow network are predicted to give, beside what they give.

Levers are local SGD, DiLoCo and compression. Each training is predicted from one worker on one node and an nccl-test at
that rate, neither of which knows the lever, and then measured on two nodes with one worker each. While the one node is
measured, the other trains too, as the nodes of a lab share a machine; it is measured anew before each training, as the
speed of a shared machine changes by the minute.

Run as root, with a lab of two nodes of one core each up and nothing else on the machine; about 20 minutes:

    .venv/bin/python scripts/make_tiny.py
    multinode lab up --nodes 2 --cores-per-node 1
    .venv/bin/python benchmarks/levers.py
    .venv/bin/python benchmarks/levers.py --rates 100mbit --jobs full --levers sync-16
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from command import JOB, SHAPE, call, train

# Each with an output directory of its own: over the model NIC of an adapter, a training of the whole model fails.
JOBS = {
    name: ("--set", f"finetuning_type={name}", "--set", f"output_dir=saves/levers-{name}") for name in ("full", "lora")
}
# Options of launch, what predict calls them where that differs, and steps of a round.
LEVERS: dict[str, tuple[tuple[str, ...], tuple[str, ...], int]] = {
    "ddp": ((), (), 1),
    "fp16": (("--grad-compress", "fp16"), (), 1),
    "powersgd": (("--grad-compress", "powersgd:4:2"), ("--grad-compress", "powersgd:4"), 1),
    "sync-4": (("--average", "local:4"), (), 4),
    "sync-16": (("--average", "local:16"), (), 16),
    "diloco-16-fp16": (("--average", "diloco:16:fp16"), (), 16),
}
# Of an adapter PowerSGD leaves all as it is, and fp16 shows the same as of the whole model.
_CELLS = {"full": tuple(LEVERS), "lora": ("ddp", "sync-4", "sync-16", "diloco-16-fp16")}
# Of messages that take seconds each, nccl-test takes five.
_SIZES = ("-b", "64K", "-e", "16M", "-f", "4", "-n", "10", "-w", "1", "--no-tcp")
_STEPS, _ALONE = {1: 16, 4: 28, 16: 64}, 40
_AIMS = (0.05, 0.12)


def main() -> None:
    """Measure and print one JSON document, and a line per cell on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", nargs="*", default=["100mbit", "300mbit"])
    parser.add_argument("--jobs", nargs="*", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--levers", nargs="*", default=list(LEVERS), choices=list(LEVERS))
    arguments = parser.parse_args()
    os.environ["MULTINODE_RUNS"] = tempfile.mkdtemp(prefix="levers-")
    cells = []
    for rate in arguments.rates:
        call("lab", "rate", "all", rate)
        scan = json.loads(call("nccl-test", *_SIZES, *SHAPE))["run_id"]
        for job in arguments.jobs:
            for lever in (one for one in _CELLS[job] if one in arguments.levers):
                cells.append({"rate": rate, "job": job, "lever": lever} | _cell(_alone(job), scan, rate, job, lever))
                sys.stderr.write(f"{cells[-1]}\n")
    errors = [abs(cell["error"]) for cell in cells]
    document = {
        "schema": "multinode.benchmark.levers/1",
        "load": os.getloadavg()[0],
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "aims": _AIMS,
        "inside": sum(cell["inside"] for cell in cells),
        "cells": cells,
    }
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def _alone(job: str) -> str:
    """A training on each node at once, as both compute in those that are predicted: the run of the slower one."""
    lines = Path(json.loads(call("lab", "status", "--json"))["hostfile"]).read_text().splitlines()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        hostfiles = [Path(folder) / f"node{number}" for number in range(2)]
        for path, line in zip(hostfiles, (line for line in lines if line.startswith("node")), strict=True):
            path.write_text(line + "\n")
        options = (*SHAPE[2:], "--set", f"max_steps={_ALONE}", *JOBS[job])
        runs = list(pool.map(lambda path: json.loads(call("launch", JOB, "--hosts", str(path), *options)), hostfiles))
    slower: str = min(runs, key=lambda run: run["summary"]["samples_per_s"]["value"])["run_id"]
    return slower


def _cell(alone: str, scan: str, rate: str, job: str, lever: str) -> dict[str, Any]:
    options, asked, every = LEVERS[lever]
    predicting = ("predict", alone, scan, "--link", rate, "--nodes", "2", "--json", *(asked or options))
    predicted = json.loads(call(*predicting))["scenarios"][0]
    measured = train("--set", f"max_steps={_STEPS[every]}", *JOBS[job], *options)
    rate_of, foretold = measured["samples_per_s"]["value"], predicted["samples_per_s"]
    return {
        "measured_samples_per_s": rate_of,
        "predicted_samples_per_s": foretold["value"],
        "interval": [foretold["low"], foretold["high"]],
        # Of the step time.
        "error": rate_of / foretold["value"] - 1,
        "inside": foretold["low"] <= rate_of <= foretold["high"],
        "parts": predicted["parts"],
        "rounds": measured.get("rounds"),
    }


if __name__ == "__main__":
    main()
