"""Whether advice is right: what is advised for three trainings on a slow link, tried, and held against its prediction.

DDP at 100 Mbit/s with gradients in fp16 and with gradient accumulation 4; ZeRO-2 with accumulation, which does not cut
what it reduces for each sample; ZeRO-3 moved to ZeRO-2 and to DDP. Of each training a contrast of one node and two,
then `tune --judge speed --from` with two repeats in turns.

Run as root, with a lab of two nodes up and nothing else on the machine:

    multinode lab up --nodes 2 --rate 100mbit
    .venv/bin/python benchmarks/advice.py
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from command import call

ZERO3 = ("configs/tiny_sft_zero2.yaml", "--set", "deepspeed=configs/deepspeed/tiny_z3_config.json")
TRAININGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "DDP": (("configs/tiny_sft.yaml",), ("gradients in fp16", "gradient accumulation 4")),
    "ZeRO-2": (("configs/tiny_sft_zero2.yaml",), ("gradient accumulation 4",)),
    "ZeRO-3": (ZERO3, ("ZeRO-2 instead of ZeRO-3", "DDP instead of ZeRO-3")),
}
# What LLaMA-Factory's and a CPU's DeepSpeed need.
ENVIRONMENT = ("--env", "DS_ACCELERATOR=cpu")


def main() -> None:
    """Measure and print one JSON document, and a line a try on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="that count, of each run")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--only", choices=tuple(TRAININGS))
    parser.add_argument("--runs", type=Path, help="keep the runs there")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as kept:
        for name in [arguments.only] if arguments.only else TRAININGS:
            environment = {"MULTINODE_RUNS": str((arguments.runs or Path(kept)) / name)}
            rows += measure(name, environment, ("--steps", str(arguments.steps)), ("--seeds", str(arguments.repeats)))
    document = {"schema": "multinode.benchmark.advice/1", "rows": rows}
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def measure(
    name: str, environment: dict[str, str], steps: tuple[str, ...], repeats: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Each change of one training: predicted and measured gain."""
    (job, *settings), picks = TRAININGS[name]
    scan = ("all_reduce", "all_gather", "-e", "16M", "-n", "5", "--no-tcp", "--hosts", "lab")
    call("nccl-test", *scan, env=environment)
    call("contrast", job, *settings, *ENVIRONMENT, *steps, "--no-check", "--hosts", "lab", "--json", env=environment)
    picked = [word for pick in picks for word in ("--pick", pick)]
    how = ("--judge", "speed", "--from", "last", "--candidates", str(len(picks)), *picked, *steps, *repeats)
    found = json.loads(
        call("tune", *how, job, *settings, *ENVIRONMENT, "--no-check", "--hosts", "lab", "--json", env=environment)
    )
    rows = [
        {
            "training": name,
            "change": row["candidate"]["name"],
            "predicted_gain": row["candidate"]["predicted_gain"]["value"],
            "interval": [row["candidate"]["predicted_gain"][end] for end in ("low", "high")],
            "measured_gain": row["gain"] and row["gain"]["value"],
            "error": row["gain_error"],
            "covered": row["is_covered"],
        }
        # Beside the unchanged job and one node alone.
        for row in found["rows"][2:]
    ]
    for row in rows:
        sys.stderr.write(f"{row}\n")
    return rows


if __name__ == "__main__":
    main()
