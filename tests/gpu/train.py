"""A training on GPUs, as a test shapes it: how the model is spread, where a rank stalls, how large a batch is.

Run under torchrun. Knows nothing of multinode. Without a GPU it trains over gloo, so that it can be tried anywhere.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_LAST_GOOD = 10


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=["ddp", "fsdp2", "zero2", "zero3"], default="ddp")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--compile", action="store_true", help="by torch.compile, in bf16 by torch.autocast")
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
    train_step = _zero(model, arguments) if arguments.strategy.startswith("zero") else _plain(model, arguments)
    began, step = time.monotonic(), 0
    ended_s = []
    while step < arguments.steps or time.monotonic() - began < arguments.seconds:
        step += 1
        loss = train_step(torch.randn(arguments.batch, width, device=device))
        # Where the host waits for the GPU, and has no frame of torch on its stack.
        _say(f"step {step}: loss {loss.item():.6f}")
        ended_s.append(time.monotonic())
        if step == _LAST_GOOD and arguments.asleep_rank == dist.get_rank():
            fall_asleep()
        if step == _LAST_GOOD and arguments.killed_rank == dist.get_rank():
            os.kill(os.getpid(), signal.SIGKILL)
    # By its own clock: what hooks cost is the difference to a run without them.
    took_s = [after - before for before, after in itertools.pairwise(ended_s[_LAST_GOOD:])]
    if took_s:
        _say(f"median step: {1000 * statistics.median(took_s):.4f} ms")
    dist.destroy_process_group()


def fall_asleep() -> None:
    """What a rank does that never comes back to its training."""
    time.sleep(3600)


def _plain(model: nn.Sequential, arguments: argparse.Namespace) -> Callable[[torch.Tensor], torch.Tensor]:
    spread: nn.Module = _shard(model) if arguments.strategy == "fsdp2" else DistributedDataParallel(model)
    if arguments.compile:
        spread.compile()
    optimizer = torch.optim.SGD(spread.parameters(), lr=1e-3)

    def train_step(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast(batch.device.type, torch.bfloat16, enabled=arguments.compile):
            loss: torch.Tensor = spread(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train_step


def _zero(model: nn.Sequential, arguments: argparse.Namespace) -> Callable[[torch.Tensor], torch.Tensor]:
    """ZeRO that overlaps, in buckets of two layers."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": arguments.batch,
        "zero_optimization": {
            "stage": int(arguments.strategy[-1]),
            "overlap_comm": True,
            "reduce_bucket_size": 2 * arguments.width**2,
        },
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    def train_step(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(batch).square().mean()
        engine.backward(loss)
        engine.step()
        return loss

    return train_step


def _shard(model: nn.Sequential) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

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
