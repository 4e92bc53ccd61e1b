"""What the instrumentation records of a training's steps, for workers without torch."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

_last_ns = [time.monotonic_ns()]


def record_step(step: int, **fields: object) -> None:
    """One optimizer step of this worker has ended; nothing where the run records no steps."""
    now = time.monotonic_ns()
    elapsed_us = (now - _last_ns[0]) / 1000
    _last_ns[0] = now
    if "MULTINODE_SAMPLES" not in os.environ:
        return
    rank = int(os.environ["RANK"])
    record = {"schema": 1, "kind": "step", "rank": rank, "step": step, "time_s": time.time(), "mono_ns": now}
    line = json.dumps({**record, "step_time_us": elapsed_us, **fields}).encode() + b"\n"
    # In one write, as other threads of the instrumentation may append to it, too.
    path = Path(os.environ["MULTINODE_SAMPLES"], f"rank-{rank}.jsonl")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)
