"""The regression of train_trainer.py with options as Hugging Face's examples have them. Knows nothing of multinode."""

from __future__ import annotations

import time

import torch
from train_trainer import Regression, Samples  # type: ignore[import-not-found]  # beside this file
from transformers import HfArgumentParser, Trainer, TrainingArguments

# Others have to see that it goes on, and end it.
_STEP_S = 0.2


class SlowRegression(Regression):  # type: ignore[misc]  # no types of torch
    """Each step takes a moment."""

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss, as the Trainer wants it."""
        time.sleep(_STEP_S)
        outputs: dict[str, torch.Tensor] = super().forward(inputs, labels)
        return outputs


def main() -> None:
    """Train."""
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    torch.manual_seed(0)
    Trainer(model=SlowRegression(), args=arguments, train_dataset=Samples()).train()


if __name__ == "__main__":
    main()
