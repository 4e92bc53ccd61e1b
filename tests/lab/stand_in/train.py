"""A training without torch: steps at each of which all ranks wait for each other; with numbered lines on request.

It goes on for `--steps`, or until somebody has written something into the file `--until`.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import torch.distributed as dist
from steps import record_step  # type: ignore[import-not-found]  # on PYTHONPATH of the nodes


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--until", type=Path)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--lines", action="store_true", help="print a line at each step")
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--output", type=Path, help="directory for a file of each rank at the end")
    arguments = parser.parse_args()
    if arguments.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group()
    rank = dist.get_rank()
    for step in range(arguments.steps):
        if arguments.lines:
            # In one write, so that workers of a node do not break each other's.
            os.write(1, f"rank {rank} line {step} end\n".encode())
        time.sleep(arguments.step_s)
        told = arguments.until is not None and arguments.until.read_text() != ""
        ended = dist.all_reduce(int(told))
        record_step(step + 1, total_steps=arguments.steps, samples=1)
        if ended:
            break
    if arguments.output is not None:
        arguments.output.mkdir(exist_ok=True)
        arguments.output.joinpath(f"rank-{rank}.txt").write_text("weights\n" * 1000)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
