"""A script of Hugging Face's Trainer whose arguments are options, as HfArgumentParser reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from multinode.job.frameworks.framework import OF_LLAMAFACTORY, Framework
from multinode.job.settings import TrainingSettings, is_true

_PARSER, _ARGUMENTS = "HfArgumentParser", "TrainingArguments"


class _Trainer(Framework):
    name = "trainer"
    title = "Trainer"
    # What else it reads, and what it trains of its model, is the script's own affair.
    defaults = TrainingSettings(finetuning_type=None, lora_rank=None, lora_target=None, cutoff_len=None)
    lacks = frozenset({*OF_LLAMAFACTORY, "val_size"})
    has_file = False
    # A script passes it on, or does not.
    resumes = False

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return False

    def reads(self, script: str) -> bool:
        """Whether a script with this text takes the Trainer's arguments as options."""
        return _PARSER in script and _ARGUMENTS in script

    def command(self, verb: str, path: str) -> str:
        return f"torchrun {path}"

    def module(self, verb: str) -> str:
        return ""

    def verb_of(self, program: str) -> str | None:
        return None

    def holds_out(self, arguments: Mapping[str, Any]) -> bool:
        return is_true(arguments.get("do_eval"))


FRAMEWORK = _Trainer()
