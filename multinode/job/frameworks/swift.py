"""ms-swift: `swift pt|sft|rlhf`, whose command line starts torchrun itself; names and defaults of ms-swift 4.6."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from multinode.errors import UsageError
from multinode.job.frameworks.framework import OF_LLAMAFACTORY, Framework, adapter_targets
from multinode.job.settings import TrainingSettings, is_false
from multinode.secret_values import hides

# Variables, in a file.
_ENV = "ENV"
_TUNER = ("tuner_type", "train_type")
_GLOBAL_BATCH = 16
_LEARNING_RATES = {"full": 1e-5}
_USUAL_RATE = 1e-4
_PRESET = re.compile(r"zero([0-3])(_offload)?")
_BATCH = ("gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu")
_REDUCE_BUCKET = 200_000_000


class _Swift(Framework):
    name = "swift"
    title = "ms-swift"
    verbs = ("sft", "pt", "rlhf")
    command_modules = ("swift.cli.main",)
    # train_type is version 3's tuner_type.
    telltales = frozenset(
        {
            *("dataset", "cached_dataset", "tuner_type", "train_type", "rlhf_type", "torch_dtype", "target_modules"),
            *("split_dataset_ratio", "tuner_backend", "quant_bits"),
        }
    )
    # Without accumulation it makes a global batch of 16, whatever the number of workers.
    defaults = TrainingSettings(
        lora_dropout=0.05,
        cutoff_len=None,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=None,
        logging_steps=5,
    )
    names: ClassVar[Mapping[str, str]] = {
        "model_name_or_path": "model",
        "cutoff_len": "max_length",
        "quantization_bit": "quant_bits",
        "adapter_name_or_path": "adapters",
        "additional_target": "modules_to_save",
        "eval_dataset": "val_dataset",
    }
    lacks = frozenset(
        {
            *OF_LLAMAFACTORY,
            "val_size",
        }
    )
    has_file = False
    # By default it saves in a new directory of output_dir.
    for_restarts: ClassVar[Mapping[str, Any]] = {"add_version": False}

    def refusal(self, config: Mapping[str, Any], source: str) -> UsageError | None:
        secret = next((key for key, value in config.items() if hides(key, value)), None)
        if secret is None:
            return None
        return UsageError(
            f"{source}: {secret} would be readable on the nodes' command lines, since ms-swift takes keys as options",
            hint="remove it, and give the token as a variable: --env MODELSCOPE_API_TOKEN, or --env HF_TOKEN",
        )

    def verb_for(self, config: Mapping[str, Any]) -> str:
        return "rlhf" if config.get("rlhf_type") else self.verbs[0]

    def accumulation(self, batch: int | None, workers: int) -> int:
        return max(1, math.ceil(_GLOBAL_BATCH / (batch or 1) / workers))

    def command(self, verb: str, path: str) -> str:
        return f"swift {verb} {path}"

    def module(self, verb: str) -> str:
        return f"swift.cli.{verb}"

    def variables(self, config: Mapping[str, Any]) -> dict[str, str]:
        given = config.get(_ENV)
        return {str(name): str(value) for name, value in given.items()} if isinstance(given, dict) else {}

    def options(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {key: value for key, value in config.items() if key != _ENV}

    def arguments(self, config: Mapping[str, Any], verb: str) -> dict[str, Any]:
        given = super().arguments(config, verb)
        method = next((config[key] for key in _TUNER if key in config), "lora")
        stage = config.get("rlhf_type", "dpo") if verb == "rlhf" else verb or self.verbs[0]
        return (
            {"learning_rate": _LEARNING_RATES.get(str(method), _USUAL_RATE)}
            | given
            | {
                "stage": stage,
                "finetuning_type": method,
                "lora_target": adapter_targets(config.get("target_modules", "all-linear")),
                "torch_dtype": config.get("torch_dtype") or "auto",
                "bf16": config.get("bf16", config.get("torch_dtype", "bfloat16") == "bfloat16"),
                "disable_gradient_checkpointing": is_false(config.get("gradient_checkpointing")),
            }
        )

    def changed(self, config: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
        own = super().changed(config, arguments)
        if (is_off := own.pop("disable_gradient_checkpointing", None)) is not None:
            own["gradient_checkpointing"] = not is_off
        if (method := own.pop("finetuning_type", None)) is not None:
            own[next((key for key in _TUNER if key in config), _TUNER[0])] = method
        if "quant_bits" in own:
            own["quant_method"] = "bnb" if own["quant_bits"] else None
        return own

    def deepspeed_text(self, named: str) -> str | None:
        # Its files swift/config/zero*.json, as far as they differ from DeepSpeed's defaults.
        preset = _PRESET.fullmatch(named)
        if preset is None:
            return None
        stage, device = int(preset[1]), {"device": "cpu" if preset[2] else "none", "pin_memory": True}
        zero: dict[str, Any] = {"stage": stage, "overlap_comm": False, "contiguous_gradients": True}
        zero |= {"offload_optimizer": device} if stage else {}
        if stage == 3:  # noqa: PLR2004 - ZeRO-3
            zero |= {"offload_param": device, "stage3_gather_16bit_weights_on_model_save": True}
            zero |= dict.fromkeys(
                ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
            )
        else:
            zero |= {"allgather_bucket_size": _REDUCE_BUCKET, "reduce_bucket_size": _REDUCE_BUCKET}
        types = {name: {"enabled": "auto"} for name in ("fp16", "bf16")}
        return json.dumps({**types, "zero_optimization": zero, **dict.fromkeys(_BATCH, "auto")}, indent=2) + "\n"


FRAMEWORK = _Swift()
