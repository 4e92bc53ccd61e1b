"""TrainingSettings: the arguments of a training that have a default."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec


class TrainingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments with a default; here those of LLaMA-Factory and the Trainer (llamafactory 0.9.5, transformers 5.6).

    None is a value of another type, a given number that is not positive, or a default that is not known before the run.
    """

    stage: str | None = "sft"
    finetuning_type: str | None = "lora"
    lora_rank: int | None = 8
    lora_target: str | None = "all"
    lora_dropout: float | None = 0.0
    dataset_dir: str | None = "data"
    cutoff_len: int | None = 2048
    per_device_train_batch_size: int | None = 8
    gradient_accumulation_steps: int | None = 1
    learning_rate: float | None = 5e-5
    num_train_epochs: float | None = 3.0
    logging_steps: int | None = 10

    def given(self, arguments: Mapping[str, Any]) -> TrainingSettings:
        """With what is given, in place of the defaults."""
        return TrainingSettings(**{name: self._read(name, arguments) for name in self.__struct_fields__})

    def _read(self, name: str, arguments: Mapping[str, Any]) -> Any:
        if name not in arguments:
            return getattr(self, name)
        value, usual = arguments[name], type(getattr(_USUAL, name))
        fits = type(value) in {usual, int if usual is float else usual}
        return value if fits and (isinstance(value, str) or 0 < value < math.inf) else None


def is_true(value: object) -> bool:
    """Whether an argument that is true or false is true; 1 is, too: `--bf16 1`."""
    return value is True or (type(value) is int and value == 1)


def is_false(value: object) -> bool:
    """Whether an argument that is true or false is false; 0 is, too."""
    return value is False or (type(value) is int and value == 0)


_USUAL = TrainingSettings()

UNKNOWN_SETTINGS = TrainingSettings(**dict.fromkeys(TrainingSettings.__struct_fields__))
"""Settings of a script, which reveals none of them."""

PLAIN_STAGES = frozenset({"pt", "sft"})
"""Stages that train one model in a forward and a backward pass."""
