"""What a cell of a sweep says of a training's step, beside a plain launch of the same training, in turns.

Run as root, with a lab of two nodes up and nothing else on the machine:

    multinode lab up --nodes 2 --rate 1gbit
    .venv/bin/python benchmarks/sweep_cell.py --repeats 3
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

from command import JOB, SHAPE, call

# What a sweep adds to the measured steps.
_WARM_UP = 5


def main() -> None:
    """Measure and print one JSON document, and a line a pair on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    swept, launched = [], []
    for _ in range(arguments.repeats):
        # In turns, so that whatever else this machine does hits both alike.
        cells = json.loads(call("sweep", JOB, "--steps", str(arguments.steps), "--fresh", *SHAPE))["cells"]
        swept.append(cells[0]["step_time_ms"]["value"])
        plain = json.loads(call("launch", JOB, "--set", f"max_steps={arguments.steps + _WARM_UP}", *SHAPE))
        launched.append(plain["summary"]["step_time_ms"]["median"]["value"])
        sys.stderr.write(f"cell {swept[-1]:.1f} ms, launch {launched[-1]:.1f} ms\n")
    document = {
        "schema": "multinode.benchmark.sweep-cell/1",
        "job": JOB,
        "steps": arguments.steps,
        "cell_ms": swept,
        "launch_ms": launched,
        "ratio_of_medians": statistics.median(swept) / statistics.median(launched),
        "scatter": max((max(one) - min(one)) / statistics.median(one) for one in (swept, launched)),
    }
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
