"""A training on GPUs, as a test shapes it: how the model is spread, where a rank stalls, how large a batch is.

Run under torchrun. Knows nothing of multinode. Without a GPU it trains over gloo, so that it can be tried anywhere.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_LAST_GOOD = 10


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=["ddp", "fsdp2"], default="ddp")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--asleep-rank", type=int, help="stops computing after ten steps, for ever")
    parser.add_argument("--killed-rank", type=int, help="is killed after ten steps")
    parser.add_argument("--seconds", type=float, default=0.0, help="go on for at least as long")
    arguments = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu", 0 if torch.cuda.is_available() else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    width = arguments.width
    layers = [layer for _ in range(arguments.depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(width, 1)).to(device)
    spread = _shard(model) if arguments.strategy == "fsdp2" else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(spread.parameters(), lr=1e-3)
    began, step = time.monotonic(), 0
    while step < arguments.steps or time.monotonic() - began < arguments.seconds:
        step += 1
        loss = spread(torch.randn(arguments.batch, width, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # Where the host waits for the GPU, and has no frame of torch on its stack.
        _say(f"step {step}: loss {loss.item():.6f}")
        if step == _LAST_GOOD and arguments.asleep_rank == dist.get_rank():
            fall_asleep()
        if step == _LAST_GOOD and arguments.killed_rank == dist.get_rank():
            os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


def fall_asleep() -> None:
    """What a rank does that never comes back to its training."""
    time.sleep(3600)


def _shard(model: nn.Sequential) -> nn.Module:
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - older torch has none

    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    sharded: nn.Module = fully_shard(model)
    return sharded


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
