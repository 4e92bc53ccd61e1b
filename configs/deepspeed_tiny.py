"""A plain DeepSpeed training on synthetic data, ZeRO-2 from configs/deepspeed/tiny_z2_config.json.

    multinode launch --engine deepspeed -- configs/deepspeed_tiny.py --steps 20

Runs under DeepSpeed's launcher, which hands it --local_rank. Knows nothing of multinode.
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    """Train, and print each step's mean loss on rank 0, and at the end what each rank has come to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--config", default="configs/deepspeed/tiny_z2_config.json")
    arguments = parser.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, arguments.width), nn.ReLU(), nn.Linear(arguments.width, 1))
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=arguments.config)
    # The same model everywhere, and data of its own on each rank.
    torch.manual_seed(1 + dist.get_rank())
    for step in range(1, arguments.steps + 1):
        inputs = torch.randn(engine.train_micro_batch_size_per_gpu(), 64, device=engine.device)
        loss = nn.functional.mse_loss(engine(inputs), 8 * inputs.mean(dim=1, keepdim=True))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step} of {arguments.steps}: loss {mean.item() / dist.get_world_size():.4f}")
    total = sum(parameter.double().sum().item() for parameter in model.parameters())
    stage = engine.zero_optimization_stage()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: ZeRO stage {stage}, parameters sum to {total:.9f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
