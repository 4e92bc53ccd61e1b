"""What local SGD and DiLoCo gain on slow Ethernet: each beside DDP and beside one worker alone, on the same cores.

Run as root, with a lab of two nodes of one core each up and nothing else on the machine:

    multinode lab up --nodes 2 --cores-per-node 1
    .venv/bin/python benchmarks/slow_ethernet.py --rate 100mbit
    .venv/bin/python benchmarks/slow_ethernet.py --rate 20mbit --levers none diloco-64-fp16 diloco-128
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from command import JOB, call, train

# Options, steps of a round, and what of fp32's bytes is sent. A round is warm-up, and two or more are measured.
LEVERS: dict[str, tuple[tuple[str, ...], int, float]] = {
    "ddp": ((), 1, 1.0),
    "ddp-fp16": (("--grad-compress", "fp16"), 1, 0.5),
    "sync-16": (("--average", "local:16"), 16, 1.0),
    "sync-16-fp16": (("--average", "local:16:fp16"), 16, 0.5),
    "sync-64": (("--average", "local:64"), 64, 1.0),
    "sync-64-fp16": (("--average", "local:64:fp16"), 64, 0.5),
    "diloco-64-fp16": (("--average", "diloco:64:fp16"), 64, 0.5),
    "diloco-128": (("--average", "diloco:128"), 128, 1.0),
}
DEFAULT = ("ddp", "ddp-fp16", "sync-16", "sync-16-fp16", "sync-64", "sync-64-fp16")
_FEWEST, _ROUNDS = 20, 4


def main() -> None:
    """Measure and print one JSON document, and a line per training on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--levers", nargs="*", default=DEFAULT, choices=(*LEVERS, "none"))
    parser.add_argument("--alone-steps", type=int, default=80)
    arguments = parser.parse_args()
    call("lab", "rate", "all", arguments.rate)
    alone = train("--nodes", "1", "--set", f"max_steps={arguments.alone_steps}")
    trainings: dict[str, dict[str, Any]] = {"alone": _figures(alone)}
    for name in arguments.levers:
        if name in LEVERS:
            options, every, part = LEVERS[name]
            steps = _FEWEST if every == 1 else every * (_ROUNDS if every < 64 else 3)  # noqa: PLR2004 - long rounds
            trainings[name] = _figures(train("--set", f"max_steps={steps}", *options))
            trainings[name] |= _against(name, trainings, every, part)
        sys.stderr.write(f"{arguments.rate} {name}: {trainings.get(name, trainings['alone'])}\n")
    document = {
        "schema": "multinode.benchmark.slow-ethernet/1",
        "job": JOB,
        "rate": arguments.rate,
        "load": os.getloadavg()[0],
        "trainings": trainings,
    }
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def _against(name: str, trainings: dict[str, dict[str, Any]], every: int, part: float) -> dict[str, float]:
    """Speed against DDP and one worker alone, and its part of the ceiling T_DDP / (T_local + C / H)."""
    alone, mine = trainings["alone"], trainings[name]
    found = {"of_two_alone": mine["samples_per_s"] / (2 * alone["samples_per_s"])}
    ddp = trainings.get("ddp")
    if ddp is not None and name != "ddp":
        comm_ms = (ddp["step_ms"] - alone["step_ms"]) * part
        ceiling = ddp["step_ms"] / (alone["step_ms"] + comm_ms / every)
        gain = mine["samples_per_s"] / ddp["samples_per_s"]
        found |= {"against_ddp": gain, "ceiling": ceiling, "of_ceiling": gain / ceiling}
    return found


def _figures(summary: dict[str, Any]) -> dict[str, Any]:
    rounds = summary.get("rounds") or {}
    sent = summary["comm"]["bytes_per_step"]
    return {
        "samples_per_s": summary["samples_per_s"]["value"],
        # Of a round the mean step: the median step of a training without rounds.
        "step_ms": summary["step_time_ms"]["median"]["value"],
        "loss": [summary["first_loss"], summary["last_loss"]],
        "bytes_per_step": sent,
        **{name: rounds[name] for name in ("rounds", "sync_ms", "size_bytes", "drift", "last_drift") if name in rounds},
    }


if __name__ == "__main__":
    main()
