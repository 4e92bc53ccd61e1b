"""A training that a test shapes: how the model is spread over the workers, accumulation, a slow loader.

Run under torchrun, on CPUs. Knows nothing of multinode; prints the parameters' sum, so that two runs can be compared.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

INPUTS = 64


def say(text: str) -> None:
    """A line on stdout, now."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class MadeUp(Dataset[tuple[torch.Tensor, torch.Tensor]]):  # type: ignore[misc]  # no types of torch
    """Samples without end; each takes a while to come, where that is asked for."""

    def __init__(self, sleep_s: float) -> None:
        self._sleep_s = sleep_s

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self._sleep_s)
        values = torch.randn(INPUTS, generator=torch.Generator().manual_seed(index))
        return values, 8 * values.mean().reshape(1)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=["ddp", "fsdp", "fsdp2", "zero1", "zero2", "zero3"], default="ddp")
    parser.add_argument("--shard", choices=["full_shard", "shard_grad_op", "hybrid_shard"], default="full_shard")
    parser.add_argument("--no-sync", action="store_true", help="FSDP: gradients are reduced in the last micro-batch")
    parser.add_argument("--checkpoint", choices=["inside", "around", "reentrant"], help="FSDP's units: where, or how")
    parser.add_argument("--live", type=int, default=1, help="ZeRO-3: stage3_max_live_parameters")
    parser.add_argument("--reuse", type=int, default=0, help="ZeRO-3: stage3_max_reuse_distance")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--batch-ms", type=float, default=0.0, help="what the loader takes for a batch")
    parser.add_argument("--batch-ms-rank", type=int, default=None, help="on this rank alone")
    parser.add_argument("--timed", action="store_true", help="say what the median step took")
    parser.add_argument("--sampled", action="store_true", help="a DistributedSampler deals the samples out")
    parser.add_argument("--count-collectives", action="store_true", help="say how many each rank issued")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    slow = arguments.batch_ms_rank in {None, dist.get_rank()}
    sleep_s = arguments.batch_ms / 1000 / arguments.batch if slow else 0.0
    samples, first = MadeUp(sleep_s), dist.get_rank() * (1 << 16)
    order = DistributedSampler(samples) if arguments.sampled else range(first, len(samples))
    loader = DataLoader(samples, batch_size=arguments.batch, sampler=order)
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(INPUTS, arguments.width), nn.ReLU()]
    for _ in range(arguments.depth):
        layers += [nn.Linear(arguments.width, arguments.width), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(arguments.width, 1))
    trainer = _train_deepspeed if arguments.strategy.startswith("zero") else _train_torch
    total = trainer(model, iter(loader), arguments)
    say(f"rank {dist.get_rank()} of {dist.get_world_size()}: parameters sum to {total:.9f}")
    if arguments.count_collectives:
        world = dist.distributed_c10d._get_default_group()  # noqa: SLF001 - nobody else counts them
        say(f"rank {dist.get_rank()} issued {world._get_sequence_number_for_group()}")  # noqa: SLF001 - likewise
    dist.destroy_process_group()


def _train_torch(
    model: nn.Module, batches: Iterator[tuple[torch.Tensor, torch.Tensor]], arguments: argparse.Namespace
) -> float:
    spread = {"fsdp": _fsdp, "fsdp2": _fsdp2}.get(arguments.strategy, _ddp)(model, arguments)
    optimizer = torch.optim.AdamW(spread.parameters(), lr=1e-3)
    ends_s = []
    for step in range(1, arguments.steps + 1):
        for micro in range(1, arguments.accumulation + 1):
            inputs, wanted = next(batches)
            # Without, reentrant checkpointing computes no gradients.
            inputs.requires_grad_(arguments.checkpoint == "reentrant")
            waits = micro < arguments.accumulation and (arguments.no_sync or arguments.strategy == "ddp")
            with _no_sync(spread) if waits else contextlib.nullcontext():
                loss = nn.functional.mse_loss(spread(inputs), wanted) / arguments.accumulation
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ends_s.append(time.perf_counter())
        if dist.get_rank() == 0:
            say(f"step {step} of {arguments.steps}: loss {loss.item():.6f}")
    if arguments.timed:
        took_s = [end - begin for begin, end in itertools.pairwise(ends_s[len(ends_s) // 4 :])]
        say(f"median step {1000 * statistics.median(took_s):.2f} ms")
    if arguments.strategy == "fsdp":
        return 0.0
    parameters = (getattr(parameter, "full_tensor", lambda one=parameter: one)() for parameter in model.parameters())
    return float(sum(parameter.double().sum().item() for parameter in parameters))


def _ddp(model: nn.Module, _arguments: argparse.Namespace) -> nn.Module:
    return DistributedDataParallel(model)


def _fsdp(model: nn.Module, arguments: argparse.Namespace) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    def shard(module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            module,
            sharding_strategy=ShardingStrategy[arguments.shard.upper()],
            device_mesh=_mesh(arguments),
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )

    return shard(_units(model, shard, arguments))


def _fsdp2(model: nn.Module, arguments: argparse.Namespace) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    # The root's parameters stay whole for the backward pass unless somebody says otherwise.
    reshard = False if arguments.shard == "shard_grad_op" else None
    shard = functools.partial(fully_shard, mesh=_mesh(arguments), reshard_after_forward=reshard)
    return shard(_units(model, shard, arguments))


def _mesh(arguments: argparse.Namespace) -> Any:
    """Of hybrid sharding: nodes that hold the same, each of which shards among its workers."""
    if arguments.shard != "hybrid_shard":
        return None
    inside = int(os.environ["LOCAL_WORLD_SIZE"])
    return dist.init_device_mesh("cpu", (dist.get_world_size() // inside, inside), mesh_dim_names=("across", "inside"))


def _units(model: nn.Module, shard: Callable[[nn.Module], nn.Module], arguments: argparse.Namespace) -> nn.Module:
    """Each layer with parameters is sharded by itself, and computed again where that is asked for."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        checkpoint_wrapper,
    )

    impl = CheckpointImpl.REENTRANT if arguments.checkpoint == "reentrant" else CheckpointImpl.NO_REENTRANT
    again = functools.partial(checkpoint_wrapper, checkpoint_impl=impl)
    units = []
    for layer in model:
        if not isinstance(layer, nn.Linear):
            units.append(layer)
        elif arguments.checkpoint == "inside":
            units.append(shard(again(layer)))
        else:
            units.append(again(shard(layer)) if arguments.checkpoint else shard(layer))
    return nn.Sequential(*units)


@contextlib.contextmanager
def _no_sync(model: Any) -> Iterator[None]:
    if hasattr(model, "no_sync"):
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def _train_deepspeed(
    model: nn.Module, batches: Iterator[tuple[torch.Tensor, torch.Tensor]], arguments: argparse.Namespace
) -> float:
    import deepspeed

    # Workers of one node would speak through it; it would be compiled first, for minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {
        "train_micro_batch_size_per_gpu": arguments.batch,
        "gradient_accumulation_steps": arguments.accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {
            "stage": int(arguments.strategy[-1]),
            # So that stage 3 shards this small model at all, and gathers each layer before each use of it.
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": arguments.live,
            "stage3_max_reuse_distance": arguments.reuse,
            "stage3_prefetch_bucket_size": 0,
        },
    }
    engine, _, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, dist_init_required=False
    )
    for step in range(1, arguments.steps + 1):
        for _ in range(arguments.accumulation):
            inputs, wanted = next(batches)
            loss = nn.functional.mse_loss(engine(inputs), wanted)
            engine.backward(loss)
            engine.step()
        if dist.get_rank() == 0:
            say(f"step {step} of {arguments.steps}: loss {loss.item():.6f}")
    return float(loss.item())


if __name__ == "__main__":
    main()
