"""A script of Hugging Face's Trainer: a small regression, whose losses it prints. Knows nothing of multinode."""

from __future__ import annotations

import sys
import tempfile

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

INPUTS = 64


class Samples(Dataset[dict[str, torch.Tensor]]):  # type: ignore[misc]  # no types of torch
    """As many as a few epochs need, each by its number."""

    def __len__(self) -> int:
        return 1 << 10

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        values = torch.randn(INPUTS, generator=torch.Generator().manual_seed(index))
        return {"inputs": values, "labels": 8 * values.mean().reshape(1)}


class Regression(nn.Module):  # type: ignore[misc]  # no types of torch
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(INPUTS, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss, as the Trainer wants it."""
        outputs = self.layers(inputs)
        return {"loss": nn.functional.mse_loss(outputs, labels), "logits": outputs}


def main() -> None:
    """Train."""
    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output_dir=output,
            max_steps=int(sys.argv[1]),
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
        )
        torch.manual_seed(0)
        Trainer(model=Regression(), args=arguments, train_dataset=Samples()).train()


if __name__ == "__main__":
    main()
