"""Collective benchmark: a worker under torchrun that times collectives and records every iteration, raw.

Needs torch, so it runs in the job's environment, as `torchrun <agent.pyz> collectives`; MULTINODE_REQUEST says what.
Measures only; the controller computes bandwidths. Every size is warmed up first: connecting is not timed.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any, Dict, List


def main() -> None:
    """Run the sweep that the request asks for, and write one record a size to this worker's samples."""
    import torch
    import torch.distributed as dist

    request = json.loads(os.environ["MULTINODE_REQUEST"])
    backend = request["backend"] or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend == "nccl" and not torch.cuda.is_available():
        raise RuntimeError("the nccl backend needs a GPU, and torch sees none here")
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    try:
        _record({"kind": "benchmark", "rank": dist.get_rank(), "world_size": dist.get_world_size(), "backend": backend})
        for size_bytes in request["sizes_bytes"]:
            _record(_measure(torch, dist, device, {**request, "size_bytes": size_bytes}))
    finally:
        dist.destroy_process_group()


def _measure(torch: Any, dist: Any, device: Any, request: Dict[str, Any]) -> Dict[str, Any]:
    count = max(1, request["size_bytes"] // 4)
    buffer = torch.zeros(count, dtype=torch.float32, device=device)
    wrong = _count_wrong(torch, dist, buffer)
    buffer.zero_()
    warm_us = _repeat(torch, dist, buffer, request["warmup_iters"])
    iters = _agree_iters(torch, dist, device, warm_us, request)
    dist.barrier()
    times_us = _repeat(torch, dist, buffer, iters)
    return {
        "kind": "collective",
        "rank": dist.get_rank(),
        "op": "all_reduce",
        "dtype": "float",
        "size_bytes": count * 4,
        "count": count,
        "time_s": time.time(),
        "times_us": times_us,
        "num_wrong": wrong,
    }


def _repeat(torch: Any, dist: Any, buffer: Any, iters: int) -> List[float]:
    """Time that many all-reduces one by one, microseconds each."""
    times_us = []
    on_gpu = buffer.device.type == "cuda"
    for _ in range(iters):
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter_ns()
        dist.all_reduce(buffer)
        if on_gpu:
            torch.cuda.synchronize()
        times_us.append((time.perf_counter_ns() - began) / 1000)
    return times_us


def _agree_iters(torch: Any, dist: Any, device: Any, warm_us: List[float], request: Dict[str, Any]) -> int:
    """As many iterations as asked for, fewer where they would take too long; the same on all workers."""
    slowest = torch.tensor([min(warm_us) if warm_us else 0.0], dtype=torch.float32, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if slowest.item() <= 0:
        return int(request["iters"])
    affordable = int(request["max_seconds"] * 1e6 / slowest.item())
    return int(min(request["iters"], max(request["min_iters"], affordable)))


def _count_wrong(torch: Any, dist: Any, buffer: Any) -> int:
    """All-reduce values that differ by place and by rank, and count the sums that are not exact."""
    ranks = dist.get_world_size()
    place = torch.arange(buffer.numel(), dtype=torch.float32, device=buffer.device).remainder_(97)
    buffer.copy_(place).add_(float(dist.get_rank()))
    dist.all_reduce(buffer)
    expected = place.mul_(ranks).add_(ranks * (ranks - 1) / 2)
    return int((buffer != expected).sum().item())


def _record(fields: Dict[str, Any]) -> None:
    path = os.path.join(os.environ["MULTINODE_RUN_DIR"], "samples", "rank-%s.jsonl" % os.environ["RANK"])
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, json.dumps(fields).encode() + b"\n")
    finally:
        os.close(descriptor)
