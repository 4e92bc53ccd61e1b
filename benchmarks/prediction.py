"""How far predictions are off: twelve trainings on two nodes, each foretold from one node and nccl-test alone.

Links of 100 and 300 Mbit/s and 1 Gbit/s, gradient accumulation 1 and 4, DDP and DeepSpeed ZeRO-2. Each cell is foretold
from one run of the same two workers on one node, without accumulation, and from the nccl-test of its link; and from the
nccl-test of the fastest link as well, as if nobody had measured the slow one. A run on one node comes just before the
cells that it foretells: the machine's own speed drifts.

Run as root, with a lab of two nodes up and nothing else on the machine:

    multinode lab up --nodes 2 --rate 1gbit
    .venv/bin/python benchmarks/prediction.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MULTINODE = str(Path(sys.executable).parent / "multinode")
REPOSITORY = Path(__file__).parent.parent
JOBS = {"DDP": "configs/tiny_sft.yaml", "ZeRO-2": "configs/tiny_sft_zero2.yaml"}
RATES = {"1gbit": 1.0, "300mbit": 0.3, "100mbit": 0.1}
ACCUMULATIONS = (1, 4)
# torchrun gives several workers a thread each, and one that is alone on its node as many as there are cores.
SAME_THREADS = ("--env", "OMP_NUM_THREADS=1")
# A step of ZeRO-2 with accumulation takes six seconds on the slowest link.
SWEEP = ("all_reduce", "all_gather", "-b", "64K", "-e", "16M", "-n", "5", "-w", "2", "--no-tcp")


# As a contrast calls its sides disturbed.
STOLEN_PERCENT = 2.0
ATTEMPTS, PAUSE_S = 5, 20.0


class Bench:
    """The multinode command with a directory of runs of its own.

    Args:
        runs: the directory.
    """

    def __init__(self, runs: Path) -> None:
        self._environment = os.environ | {"MULTINODE_RUNS": str(runs), "MULTINODE_HOSTS": "lab"}

    def call(self, *arguments: str) -> Any:
        """Run it and read what it printed; nothing where that is no JSON."""
        done = subprocess.run(
            [MULTINODE, *arguments],
            cwd=REPOSITORY,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=True,
        )
        return json.loads(done.stdout) if "--json" in arguments else None

    def train(self, strategy: str, steps: int, *options: str) -> dict[str, Any]:
        """The document of one training."""
        how = (*SAME_THREADS, "--no-check", "--json", "--set", f"max_steps={steps}", *options)
        return self.undisturbed("launch", JOBS[strategy], *how)

    def undisturbed(self, *arguments: str) -> dict[str, Any]:
        """What a measurement printed that had the machine to itself.

        Where a hypervisor gave the processors to others meanwhile, it is made again, a few times.
        """
        for attempt in range(1, ATTEMPTS + 1):
            before = processor_ticks()
            document: dict[str, Any] = self.call(*arguments)
            after = processor_ticks()
            stolen = document["stolen_percent"] = 100 * (after[0] - before[0]) / (after[1] - before[1])
            if stolen <= STOLEN_PERCENT or attempt == ATTEMPTS:
                break
            sys.stderr.write(f"{' '.join(arguments[:2])}, attempt {attempt}: {stolen:.1f} % stolen\n")
            time.sleep(PAUSE_S)
        return document

    def foretell(self, single: str, sweep: str, link: float, accumulation: int) -> dict[str, Any]:
        """The one scenario."""
        where = ("--link", str(link), "--nodes", "2", "--workers-per-node", "1", "--accumulation", str(accumulation))
        (scenario,) = self.call("predict", single, sweep, *where, "--json")["scenarios"]
        found: dict[str, Any] = scenario
        return found


def processor_ticks() -> tuple[int, int]:
    """What a hypervisor took so far of this machine's processors, which all nodes share, and all time there was."""
    ticks = [int(one) for one in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return ticks[7], sum(ticks)


def main() -> None:
    """Measure and print one JSON document, and a line a cell on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--runs", type=Path, help="keep the runs there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as kept:
        cells = measure(Bench(arguments.runs or Path(kept)), arguments.steps)
    document = {"schema": "multinode.benchmark.prediction/1", "cells": cells, **judge(cells)}
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def measure(bench: Bench, steps: int) -> list[dict[str, Any]]:
    """Each cell, foretold and measured."""
    sweeps: dict[str, str] = {}
    cells = []
    for rate, link in RATES.items():
        bench.call("lab", "rate", "all", rate)
        sweeps[rate] = bench.undisturbed("nccl-test", *SWEEP, "--json")["run_id"]
        for strategy in JOBS:
            single = bench.train(strategy, steps, "--nodes", "1", "--workers-per-node", "2")["run_id"]
            for accumulation in ACCUMULATIONS:
                accumulated = ("--set", f"gradient_accumulation_steps={accumulation}")
                measured = bench.train(strategy, steps, "--workers-per-node", "1", *accumulated)
                foretold = {
                    name: bench.foretell(single, sweeps[source], link, accumulation)
                    for name, source in (("own_link", rate), ("fastest_link", next(iter(RATES))))
                }
                named = (rate, strategy, accumulation)
                cells.append(cell(named, measured["samples_per_s"], foretold))
                cells[-1]["stolen_percent"] = measured["stolen_percent"]
                sys.stderr.write(f"{cells[-1]}\n")
    return cells


def cell(name: tuple[str, str, int], samples_per_s: float, foretold: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One cell: step times in ms, by the rate as predictions are, and errors relative to what was measured."""
    rate, strategy, accumulation = name
    samples = {one["step_time_ms"] * one["samples_per_s"] for one in foretold.values()}
    measured_ms = max(samples) / samples_per_s
    found: dict[str, Any] = {"rate": rate, "strategy": strategy, "accumulation": accumulation, "step_ms": measured_ms}
    for source, scenario in foretold.items():
        low, high = scenario["interval"]
        # The interval is of samples a second: of the step time, its ends change places.
        slowest, fastest = (scenario["step_time_ms"] * scenario["samples_per_s"] / end for end in (low, high))
        found[source] = {
            "step_ms": scenario["step_time_ms"],
            "error": scenario["step_time_ms"] / measured_ms - 1,
            "interval_ms": [fastest, slowest],
            "covered": fastest <= measured_ms <= slowest,
        }
    return found


def judge(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and worst error and coverage, of both sources; from the fastest link to the slowest alone as well."""
    slowest = [one for one in cells if one["rate"] == list(RATES)[-1]]
    named = {
        "own_link": (cells, "own_link"),
        "fastest_link": (cells, "fastest_link"),
        "fastest_to_slowest": (slowest, "fastest_link"),
    }
    return {
        name: {
            "median_error": statistics.median(abs(one[source]["error"]) for one in rows),
            "worst_error": max(abs(one[source]["error"]) for one in rows),
            "coverage": sum(one[source]["covered"] for one in rows) / len(rows),
        }
        for name, (rows, source) in named.items()
    }


if __name__ == "__main__":
    main()
