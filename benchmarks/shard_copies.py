"""What copying shards to the next node in the background adds to a step.

    multinode lab up --nodes 2 --rate 1gbit
    .venv/bin/python benchmarks/shard_copies.py --pairs 20

As root, with a lab of two nodes up. Each pair is one training with ZeRO-2 that copies its shards after each save, and
one with `--shard-copies 0`, in an order that alternates. Compared are the mean times of all steps after the first save,
without those that save: the copying goes on beside them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from command import JOB, SHAPE, call

STEPS, EVERY = 50, 10


def main() -> None:
    """Measure and print one JSON document, and a line for each pair on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    asked = parser.parse_args()
    pairs = []
    for number in range(asked.pairs):
        order = (0, 1) if number % 2 else (1, 0)
        times_ms = {copies: step_ms(copies) for copies in order}
        pairs.append({"without_ms": times_ms[0], "with_ms": times_ms[1], "ratio": times_ms[1] / times_ms[0]})
        print(f"{number + 1}: {json.dumps(pairs[-1])}", file=sys.stderr, flush=True)
    median = statistics.median(pair["ratio"] for pair in pairs)
    document = {
        "schema": "multinode.benchmark.shard_copies/1",
        "pairs": pairs,
        "median_ratio": median,
    }
    print(json.dumps(document, indent=1))


def step_ms(copies: int) -> float:
    """Mean time of a step of a training with that many copies of each shard.

    Raises:
        SystemExit: the training failed, or recorded no step.
    """
    with tempfile.TemporaryDirectory(prefix="multinode-copies-") as runs:
        settings = {
            "max_steps": STEPS,
            "save_strategy": "steps",
            "save_steps": EVERY,
            "output_dir": f"/var/tmp/{Path(runs).name}",  # noqa: S108 - on the lab's own nodes
            "deepspeed": "configs/deepspeed/ds_z2_config.json",
        }
        words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        options = ("--restarts", "1", "--shard-copies", str(copies))
        call("launch", JOB, *SHAPE, *options, *words, env={"MULTINODE_RUNS": runs})
        samples = [
            json.loads(line)
            for path in Path(runs).glob("*/samples/node-*/*.jsonl")
            for line in path.read_text().splitlines()
        ]
    times_ms = [
        sample["step_time_us"] / 1e3
        for sample in samples
        if sample["kind"] == "step" and sample["step"] > EVERY and sample["step"] % EVERY not in {0, 1}
    ]
    if not times_ms:
        raise SystemExit("no worker recorded a step")
    return float(statistics.mean(times_ms))


if __name__ == "__main__":
    main()
