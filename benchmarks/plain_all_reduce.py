"""All-reduce as anyone would time it: a loop and a clock. The baseline of collective_bandwidth.py."""

from __future__ import annotations

import statistics
import sys
import time

import torch
import torch.distributed as dist


def main() -> None:
    """Time so many all-reduces of so many bytes; rank 0 prints the median of the slowest rank, in microseconds."""
    size_bytes, iters = int(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    buffer = torch.zeros(size_bytes // 4)
    for _ in range(2):
        dist.all_reduce(buffer)
    times_us = []
    for _ in range(iters):
        began = time.perf_counter()
        dist.all_reduce(buffer)
        times_us.append((time.perf_counter() - began) * 1e6)
    slowest = torch.tensor(times_us)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(statistics.median(slowest.tolist()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
