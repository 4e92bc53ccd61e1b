"""A matrix product and a copy as `multinode bench` measures them, against a plain torch loop on the same device.

Both in turn, in one run; the median over the pairs. On a lab node, as root with a lab up, or on this machine:

    .venv/bin/python benchmarks/device_speed.py --repeats 7
    .venv/bin/python benchmarks/device_speed.py --repeats 7 --local --rows 8192
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from command import MULTINODE, run

PLAIN = Path(__file__).parent / "plain_device_loop.py"
THREADS = "OMP_NUM_THREADS=1"


def main() -> None:
    """Measure and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--local", action="store_true", help="This machine, without a lab.")
    asked = parser.parse_args()
    ours: dict[str, list[float]] = {"matmul": [], "copy": []}
    plain: dict[str, list[float]] = {"matmul": [], "copy": []}
    for number in range(asked.repeats):
        # What comes first changes, so that a machine that slows down slows both.
        turns = ((plain, _plain), (ours, _bench))
        for kept, measure in turns if number % 2 == 0 else turns[::-1]:
            for name, value in measure(asked).items():
                kept[name].append(value)
        sys.stderr.write("  ".join(f"{name}: {ours[name][-1]:.4g} of {plain[name][-1]:.4g}" for name in ours) + "\n")
    document = {
        "schema": "multinode.device-speed/1",
        "rows": asked.rows,
        "bench": ours,
        "plain": plain,
        "of_plain": {name: _median_ratio(ours[name], plain[name]) for name in ours},
    }
    print(json.dumps(document, indent=2))


def _median_ratio(ours: list[float], plain: list[float]) -> float:
    """Of pairs that were measured one after the other: what changes slowly changes both."""
    return statistics.median(mine / theirs for mine, theirs in zip(ours, plain, strict=True))


def _plain(asked: argparse.Namespace) -> dict[str, float]:
    command = ["env", THREADS, sys.executable, str(PLAIN), str(asked.rows), str(asked.seconds)]
    inside = [] if asked.local else [MULTINODE, "lab", "exec", "node0", "--"]
    found: dict[str, float] = json.loads(run([*inside, *command]))
    return found


def _bench(asked: argparse.Namespace) -> dict[str, float]:
    where = ["--local", "1"] if asked.local else ["--hosts", "lab", "--nodes", "1", "--workers-per-node", "1"]
    what = ["--only", "matmul,memory", "--size", str(asked.rows), "--seconds", str(asked.seconds)]
    with tempfile.TemporaryDirectory() as runs:
        command = [MULTINODE, "bench", *where, *what, "--alone", "--env", THREADS, "--json"]
        document: dict[str, Any] = json.loads(run(command, {"MULTINODE_RUNS": runs}))
    (worker,) = document["nodes"][0]["workers"]
    tests = {(test["kind"], test["dtype"], test["name"]): test["alone"]["value"]["value"] for test in worker["tests"]}
    dtype = "bf16" if worker["device"] == "cuda" else "fp32"
    return {"matmul": tests["matmul", dtype, str(asked.rows)], "copy": tests["memory", "fp32", "copy"]}


if __name__ == "__main__":
    main()
