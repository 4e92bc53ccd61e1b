"""A training whose computation is a length of time: what it waits for the network is then known without measuring it.

A layer's forward and backward pass are `torch.cuda._sleep`, of cycles that are calibrated before, or a sleeping host
without a GPU; its gradients have a given size. Run under torchrun; it knows nothing of multinode.
"""

# mypy: disable-error-code="misc, no-any-return"

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STRATEGIES = (
    "ddp", "ddp-no-look", "ddp-accumulation-8", "own-stream", "fsdp2", "zero2", "zero2-overlap", "zero3",
    "zero3-overlap",
)  # fmt: skip
_CALIBRATED = 1_000_000
_LAST_GOOD = 10
_FLOAT_BYTES = 4


class Clock:
    """Computes for so many milliseconds, on the GPU or as the host."""

    def __init__(self, device: torch.device) -> None:
        self._cycles_per_ms = self._calibrate() if device.type == "cuda" else None

    def compute(self, ms: float) -> None:
        """Compute; on a GPU the host goes on at once."""
        if self._cycles_per_ms is None:
            time.sleep(ms / 1000)
        else:
            torch.cuda._sleep(int(ms * self._cycles_per_ms))  # noqa: SLF001 - torch has no other

    @staticmethod
    def _calibrate() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        took_ms = []
        for _ in range(5):
            start.record()
            torch.cuda._sleep(_CALIBRATED)  # noqa: SLF001 - see above
            end.record()
            end.synchronize()
            took_ms.append(start.elapsed_time(end))
        # The first time its clock was still low.
        return _CALIBRATED / sorted(took_ms[1:])[1]


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, batch: torch.Tensor, weight: torch.Tensor, layer: Layer) -> torch.Tensor:
        ctx.layer, ctx.like = layer, weight
        layer.clock.compute(layer.forward_ms)
        return batch.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.layer.clock.compute(ctx.layer.backward_ms)
        return gradients[0].clone(), torch.ones_like(ctx.like), None


class Layer(nn.Module):
    """A weight of so many bytes, and two passes of so many milliseconds."""

    def __init__(self, clock: Clock, size_bytes: int, forward_ms: float, backward_ms: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size_bytes // _FLOAT_BYTES))
        self.clock, self.forward_ms, self.backward_ms = clock, forward_ms, backward_ms

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """The batch as it is."""
        passed: torch.Tensor = _Pass.apply(batch, self.weight, self)
        return passed


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=STRATEGIES, default="ddp")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--layer-bytes", type=int, default=2_000_000)
    parser.add_argument("--forward-ms", type=float, default=5.0)
    parser.add_argument("--backward-ms", type=float, default=10.0)
    parser.add_argument("--asleep-rank", type=int, help="stops computing after ten steps, for ever")
    parser.add_argument("--trains-file", help="which each rank makes after ten steps")
    parser.add_argument("--exits-rank", type=int, help="leaves without a word after ten steps")
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    clock = Clock(device)
    layers = [Layer(clock, options.layer_bytes, options.forward_ms, options.backward_ms) for _ in range(options.layers)]
    step = _make_step(nn.Sequential(*layers).to(device), options)
    batch = torch.ones(8, device=device, requires_grad=True)
    with _on_stream(options.strategy):
        ended_s = []
        for number in range(1, options.steps + 1):
            loss = step(batch)
            if options.strategy != "ddp-no-look":
                loss.item()
            ended_s.append(time.monotonic())
            _say(f"step {number}")
            if number == _LAST_GOOD and options.trains_file:
                Path(options.trains_file).touch()
            if number == _LAST_GOOD and options.asleep_rank == dist.get_rank():
                fall_asleep()
            if number == _LAST_GOOD and options.exits_rank == dist.get_rank():
                os._exit(3)
    took_ms = [1000 * (after - before) for before, after in itertools.pairwise(ended_s)]
    # Without a look at the loss the host ends its steps before the GPU does, but as many of them.
    if took_ms:
        _say(f"median step: {statistics.median(took_ms[len(took_ms) // 2 :]):.4f} ms")
    dist.destroy_process_group()


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def fall_asleep() -> None:
    """What a rank does that never comes back to its training."""
    time.sleep(3600)


@contextlib.contextmanager
def _on_stream(strategy: str) -> Iterator[None]:
    if strategy != "own-stream":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
    torch.cuda.synchronize()


def _make_step(model: nn.Sequential, options: argparse.Namespace) -> Callable[[torch.Tensor], torch.Tensor]:
    if options.strategy.startswith("zero"):
        return _zero(model, options)
    if options.strategy == "own-stream":
        return _averaged(model)
    micro_batches = 8 if options.strategy.endswith("-8") else 1
    spread = _shard(model) if options.strategy == "fsdp2" else _ddp(model, options.layer_bytes)
    optimizer = torch.optim.SGD(spread.parameters(), lr=1e-3)

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = batch.sum()
        for number in range(micro_batches):
            waits = contextlib.nullcontext() if number == micro_batches - 1 else spread.no_sync()
            with waits:
                loss = spread(batch).sum()
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _ddp(model: nn.Module, layer_bytes: int) -> nn.Module:
    # A bucket for each layer.
    return DistributedDataParallel(model, bucket_cap_mb=layer_bytes / (1 << 20))


def _shard(model: nn.Sequential) -> nn.Module:
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - older torch has none

    for layer in model:
        fully_shard(layer)
    sharded: nn.Module = fully_shard(model)
    return sharded


def _averaged(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Gradients that the loop itself averages, all on one stream."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch).sum()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        torch.cuda.current_stream().synchronize()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _zero(model: nn.Module, options: argparse.Namespace) -> Callable[[torch.Tensor], torch.Tensor]:
    import deepspeed  # noqa: PLC0415 - slow to import, and not everywhere

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": int(options.strategy[4]),
            "overlap_comm": options.strategy.endswith("-overlap"),
            "reduce_bucket_size": options.layer_bytes // _FLOAT_BYTES,
            # Stage 3 gathers each layer anew for each pass, when it is needed.
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 1,
            "stage3_max_reuse_distance": 1,
        },
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(batch).sum()
        engine.backward(loss)
        engine.step()
        return loss

    return step


if __name__ == "__main__":
    main()
