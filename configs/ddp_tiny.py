"""A plain DistributedDataParallel training on synthetic data, for `multinode launch -- configs/ddp_tiny.py --steps 20`.

Runs under torchrun, with NCCL where there is a GPU and gloo elsewhere. Knows nothing of multinode.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train, and print the loss of each step on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16, help="samples per worker and step")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--fail-at", type=int, default=None, help="raise at this step, on --fail-rank")
    parser.add_argument("--fail-rank", type=int, default=1)
    arguments = parser.parse_args()

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # without it every worker also opens a context on GPU 0
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(dist.get_rank())
    layers = [nn.Linear(64, arguments.width), nn.ReLU(), nn.Linear(arguments.width, arguments.width), nn.ReLU()]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(arguments.width, 1)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, arguments.steps + 1):
        if step == arguments.fail_at and dist.get_rank() == arguments.fail_rank:
            raise RuntimeError(f"asked to fail at step {step}")
        inputs = torch.randn(arguments.batch, 64, device=device)
        loss = nn.functional.mse_loss(model(inputs), 8 * inputs.mean(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step} of {arguments.steps}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
