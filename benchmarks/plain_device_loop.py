"""A matrix product and a copy as anyone would time them: a loop and a clock. The baseline of device_speed.py."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

CALLS = 10


def main() -> None:
    """Print TFLOP/s of n x n by n x n and GB/s of a copy, read and written, each over so many seconds."""
    rows, seconds = int(sys.argv[1]), float(sys.argv[2])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    left, right = (torch.randn(rows, rows, device=device).to(dtype) for _ in range(2))
    source = torch.randn((1 << 30 if device == "cuda" else 128 << 20) // 4, device=device)
    target = torch.empty_like(source)
    # Into a buffer that is there: on a processor a new one of this size is mapped page by page in every call.
    into = torch.empty_like(left)
    product = 2 * rows**3 * per_second(partial(torch.mm, left, right, out=into), seconds) / 1e12
    copied = 2 * 4 * source.numel() * per_second(partial(target.copy_, source), seconds) / 1e9
    print(json.dumps({"matmul": product, "copy": copied}))


def per_second(run: Callable[[], object], seconds: float) -> float:
    """Calls a second; those of the first fifth of a second are not counted."""
    rate = 0.0
    for length in (0.2, seconds):
        calls, began = 0, time.perf_counter()
        while time.perf_counter() - began < length:
            for _ in range(CALLS):
                run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            calls += CALLS
        rate = calls / (time.perf_counter() - began)
    return rate


if __name__ == "__main__":
    main()
