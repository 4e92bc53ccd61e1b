"""A real DistributedDataParallel training at a given rate of steps and of log lines, for the soak."""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--steps-per-s", type=float, default=50.0)
    parser.add_argument("--lines-per-step", type=int, default=5, help="on each rank")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    due = time.monotonic()
    for step in range(arguments.steps):
        optimizer.zero_grad()
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        lines = range(step * arguments.lines_per_step, (step + 1) * arguments.lines_per_step)
        os.write(1, "".join(f"rank {rank} line {line} end\n" for line in lines).encode())
        # Steps that a stopped process missed are not made up for.
        now = time.monotonic()
        due = max(due + 1 / arguments.steps_per_s, now)
        time.sleep(due - now)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
