"""A training that needs no torch: one process records the steps of all workers. Run as a program by the tests.

Arguments: the number of steps (0: without end), seconds per step, and a file that says how many times it was started.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    """Record steps."""
    count, step_s, started = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
    with started.open("a") as file:
        file.write(f"{os.getpid()}\n")
    folder = Path(os.environ["MULTINODE_SAMPLES"])
    folder.mkdir(exist_ok=True)
    step = 0
    while count == 0 or step < count:
        time.sleep(step_s)
        step += 1
        for rank in range(int(os.environ["NPROC_PER_NODE"])):
            sample = {"kind": "step", "rank": rank, "step": step, "step_time_us": step_s * 1e6, "samples": 4}
            now = {"time_s": time.time(), "mono_ns": time.monotonic_ns()}
            with (folder / f"rank-{rank}.jsonl").open("a") as file:
                file.write(json.dumps(sample | now) + "\n")


if __name__ == "__main__":
    main()
