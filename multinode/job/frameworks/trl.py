"""TRL: `trl sft --config FILE`, or its scripts; names and defaults of TRL 0.24."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, ClassVar

from multinode.errors import UsageError
from multinode.job.frameworks.framework import OF_LLAMAFACTORY, Framework, adapter_targets
from multinode.job.settings import TrainingSettings, is_false, is_true

_YAML = (".yaml", ".yml")


class _Trl(Framework):
    name = "trl"
    title = "TRL"
    verbs = ("sft", "dpo", "kto", "grpo", "rloo", "reward")
    command_modules = ("trl.cli",)
    file_option = "--config"
    telltales = frozenset(
        {
            *("dataset_name", "dataset_config", "dataset_train_split", "use_peft", "lora_r", "lora_target_modules"),
            *("load_in_4bit", "load_in_8bit", "attn_implementation"),
        }
    )
    says_verb = False
    passes_options = True
    # Arguments of the Trainer.
    own_options = frozenset({"gradient_accumulation_steps", "debug", "use_cpu", "log_dir"})
    engine = "accelerate"
    # The scripts of 0.24 do not pass it on.
    resumes = False
    defaults = TrainingSettings(lora_rank=16, lora_target="", lora_dropout=0.05, cutoff_len=1024, learning_rate=2e-5)
    names: ClassVar[Mapping[str, str]] = {
        "cutoff_len": "max_length",
        "lora_rank": "lora_r",
        "additional_target": "lora_modules_to_save",
        "dataset": "dataset_name",
        "streaming": "dataset_streaming",
    }
    lacks = frozenset(
        {
            *OF_LLAMAFACTORY,
            "val_size",
        }
    )

    def command(self, verb: str, path: str) -> str:
        return f"trl {verb} --config {path}"

    def module(self, verb: str) -> str:
        return f"trl.scripts.{verb}"

    def file_words(self, file: str) -> tuple[str, ...]:
        return ("--config", file)

    def arguments(self, config: Mapping[str, Any], verb: str) -> dict[str, Any]:
        given = super().arguments(config, verb)
        bits = next((bits for bits in (4, 8) if is_true(config.get(f"load_in_{bits}bit"))), None)
        return given | {
            "stage": verb or self.verbs[0],
            "finetuning_type": "lora" if is_true(config.get("use_peft")) else "full",
            "lora_target": adapter_targets(config.get("lora_target_modules")),
            "quantization_bit": bits,
            "torch_dtype": config.get("dtype") or config.get("torch_dtype") or "auto",
            "bf16": config.get("bf16", not is_true(config.get("fp16"))),
            "disable_gradient_checkpointing": is_false(config.get("gradient_checkpointing")),
        }

    def changed(self, config: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
        own = super().changed(config, arguments)
        if (is_off := own.pop("disable_gradient_checkpointing", None)) is not None:
            own["gradient_checkpointing"] = not is_off
        if (method := own.pop("finetuning_type", None)) is not None:
            own["use_peft"] = method == "lora"
        if (bits := own.pop("quantization_bit", None)) is not None:
            own[f"load_in_{bits}bit"] = True
        return own

    def accelerate_file(self, config: Mapping[str, Any]) -> str | None:
        named = config.get("accelerate_config")
        if not isinstance(named, str) or "/" in named or named.endswith(_YAML):
            return named if isinstance(named, str) else None
        # One of its own, which its command looks up by name.
        package = find_spec("trl")
        places = [*package.submodule_search_locations] if package and package.submodule_search_locations else []
        paths = [f"{place}/accelerate_configs/{named}.yaml" for place in places]
        if not paths:
            raise UsageError(
                f"accelerate_config: {named} is a file of TRL, which is not installed here",
                hint="copy it from a node (trl/accelerate_configs) and pass it with --accelerate-config FILE",
            )
        return paths[0]

    def holds_out(self, arguments: Mapping[str, Any]) -> bool:
        return "dataset_test_split" in arguments


FRAMEWORK = _Trl()
