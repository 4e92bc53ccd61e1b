"""A plain Accelerate training on synthetic data.

    multinode launch --engine accelerate -- configs/accelerate_tiny.py --steps 20

Knows nothing of multinode.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn


def main() -> None:
    """Train, and print each step's mean loss on rank 0, and at the end what each rank has come to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16, help="samples per worker and step")
    parser.add_argument("--width", type=int, default=256)
    arguments = parser.parse_args()

    accelerator = Accelerator()
    set_seed(accelerator.process_index)
    model = nn.Sequential(nn.Linear(64, arguments.width), nn.ReLU(), nn.Linear(arguments.width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(1, arguments.steps + 1):
        inputs = torch.randn(arguments.batch, 64, device=accelerator.device)
        loss = nn.functional.mse_loss(model(inputs), 8 * inputs.mean(dim=1, keepdim=True))
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        mean = accelerator.reduce(loss.detach(), "mean").item()
        accelerator.print(f"step {step} of {arguments.steps}: loss {mean:.4f}")
    total = sum(parameter.double().sum().item() for parameter in model.parameters())
    rank, ranks = accelerator.process_index, accelerator.num_processes
    print(f"rank {rank} of {ranks} on {accelerator.device.type}: parameters sum to {total:.9f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
