"""What sharding inside the nodes is predicted to give, beside what it gives.

A training with FSDP over all workers of two nodes, two on each, is measured, and `advise` predicts from it and an
nccl-test what hybrid sharding would give. Then both are measured in turns.

Run as root, with a lab of two nodes up and nothing else on the machine; 10 minutes:

    .venv/bin/python scripts/make_tiny.py
    multinode lab up --nodes 2
    .venv/bin/python benchmarks/inside_node.py --rates 300mbit 1gbit
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from typing import Any

from command import JOB, REPOSITORY, call

_LAB = REPOSITORY / "tests/lab"
# accelerate shards on GPUs alone; this has it take the CPUs of a node for its GPUs.
_ON_CPU = ("--env", f"PYTHONPATH={_LAB / 'sharded'}", "--env", "OMP_NUM_THREADS=1")
_SHAPE = ("--hosts", "lab", "--workers-per-node", "2", "--no-check", "--json")
_SIZES = ("-b", "64K", "-e", "16M", "-f", "4", "-n", "10", "-w", "1", "--no-tcp")
_STEPS = 24


def main() -> None:
    """Measure and print one JSON document, and a line a rate on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", nargs="*", default=["300mbit", "1gbit"])
    parser.add_argument("--pairs", type=int, default=3)
    asked = parser.parse_args()
    os.environ["MULTINODE_RUNS"] = tempfile.mkdtemp(prefix="inside-node-")
    rows = []
    for rate in asked.rates:
        rows.append(measure(rate, asked.pairs))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(json.dumps({"schema": "multinode.benchmark.inside_node/1", "rows": rows}, indent=1))


def measure(rate: str, pairs: int) -> dict[str, Any]:
    """The predicted and the measured gain at a rate.

    Raises:
        SystemExit: `advise` does not offer hybrid sharding, or a training failed.
    """
    call("lab", "rate", "all", rate)
    scan = json.loads(call("nccl-test", *_SIZES, *_SHAPE))["run_id"]
    full = train("full_shard")
    found = json.loads(call("advise", full["run_id"], scan, "--json"))
    # Not one of those that change something else as well.
    moves = [
        each for each in found["advice"] if each["kind"] == "strategy" and "HYBRID_SHARD" in json.dumps(each["change"])
    ]
    if not moves:
        raise SystemExit(f"advise offers no hybrid sharding: {[each['name'] for each in found['advice']]}")
    gain = moves[0]["gain"]
    rates = []
    for _ in range(pairs):
        hybrid, again = train("hybrid_shard"), train("full_shard")
        rates.append((speed(hybrid), speed(again)))
    measured = statistics.median(ours / theirs for ours, theirs in rates)
    return {
        "rate": rate,
        "predicted": gain["value"],
        "interval": [gain["low"], gain["high"]],
        "measured": measured,
        "inside": gain["low"] <= measured <= gain["high"],
        "samples_per_s": [speed(full), *itertools.chain.from_iterable(rates)],
    }


def train(shard: str) -> dict[str, Any]:
    """The document of a launch with FSDP 1."""
    # Without a GPU, accelerate cannot send rank 0's parameters to the others: each rank loads them.
    loading = "{cpu_ram_efficient_loading: false, sync_module_states: false}"
    changes = {
        "fsdp": f"{shard} auto_wrap",
        "fsdp_config": loading,
        "max_steps": _STEPS,
        "output_dir": f"saves/{shard}",
    }
    words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    variable = ("--env", f"FSDP_SHARDING_STRATEGY={shard.upper()}")
    document: dict[str, Any] = json.loads(call("launch", JOB, *_SHAPE, *_ON_CPU, *variable, *words))
    return document


def speed(launched: dict[str, Any]) -> float:
    """Its samples/s."""
    return float(launched["summary"]["samples_per_s"]["value"])


if __name__ == "__main__":
    main()
