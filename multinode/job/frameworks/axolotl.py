"""axolotl: `axolotl train FILE`, whose command line starts accelerate itself; names and defaults of axolotl 0.19."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from multinode.job.frameworks.framework import OF_LLAMAFACTORY, Framework, adapter_targets
from multinode.job.settings import TrainingSettings, is_true

_REPORTERS = frozenset({"use_wandb", "use_mlflow", "use_comet", "use_tensorboard"})
# With these it reports whatever the others say.
_PROJECTS = ("wandb_project", "mlflow_experiment_name", "comet_project_name")
_QUANTIZED = {"qlora": 4}


class _Axolotl(Framework):
    name = "axolotl"
    title = "axolotl"
    command_modules = ("axolotl.cli.main", "axolotl.cli")
    needs_file = True
    passes_options = True
    engine_option = "--launcher"
    for_restarts: ClassVar[Mapping[str, Any]] = {"auto_resume_from_checkpoints": False}
    engine = "accelerate"
    own_options = frozenset({"gradient_accumulation_steps", "debug"})
    defaults = TrainingSettings(
        lora_rank=None,
        lora_target="",
        cutoff_len=512,
        per_device_train_batch_size=1,
        num_train_epochs=1.0,
        learning_rate=None,
    )
    names: ClassVar[Mapping[str, str]] = {
        "model_name_or_path": "base_model",
        "cutoff_len": "sequence_len",
        "per_device_train_batch_size": "micro_batch_size",
        "per_device_eval_batch_size": "eval_batch_size",
        "num_train_epochs": "num_epochs",
        "lora_rank": "lora_r",
        "adapter_name_or_path": "lora_model_dir",
        "additional_target": "lora_modules_to_save",
        "use_dora": "peft_use_dora",
        "packing": "sample_packing",
        "optim": "optimizer",
        "val_size": "val_set_size",
    }
    lacks = frozenset(
        {
            *OF_LLAMAFACTORY,
            *("report_to", "do_eval", "save_on_each_node"),
        }
    )

    def command(self, verb: str, path: str) -> str:
        return f"axolotl {verb} {path}"

    def module(self, verb: str) -> str:
        return f"axolotl.cli.{verb}"

    def arguments(self, config: Mapping[str, Any], verb: str) -> dict[str, Any]:
        given = super().arguments(config, verb)
        adapter = config.get("adapter")
        bits = next(
            (bits for bits in (4, 8) if is_true(config.get(f"load_in_{bits}bit"))), _QUANTIZED.get(str(adapter))
        )
        targets = "all-linear" if is_true(config.get("lora_target_linear")) else config.get("lora_target_modules")
        data = config.get("datasets")
        parts = [part for part in data if isinstance(part, dict)] if isinstance(data, list) else []
        names = [part["path"] for part in parts if isinstance(part.get("path"), str)]
        usual_bf16 = None if any(config.get(key) for key in ("fp16", "float16", "float32", "bfloat16")) else "auto"
        bf16 = config.get("bf16", usual_bf16) in (True, "auto", "full")
        usual = "pt" if config.get("pretraining_dataset") else "sft"
        if any(config.get(key) for key in ("eval_steps", "evals_per_epoch", "val_set_size", "test_datasets")):
            given.setdefault("eval_strategy", "steps")
        if config.get("hub_model_id"):
            given["push_to_hub"] = True
        return given | {
            "stage": config.get("rl") or usual,
            "finetuning_type": "lora" if adapter in ("lora", "qlora") else adapter or "full",
            "lora_target": adapter_targets(targets),
            "quantization_bit": bits if adapter else None,
            "dataset": names,
            "bf16": bf16,
            "torch_dtype": "bfloat16" if bf16 else "float32",
            "disable_gradient_checkpointing": not config.get("gradient_checkpointing"),
        }

    def changed(self, config: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
        own = super().changed(config, arguments)
        if (is_off := own.pop("disable_gradient_checkpointing", None)) is not None:
            own["gradient_checkpointing"] = not is_off
        if "dataset" in own:
            own["datasets"] = _placed(config.get("datasets"), own.pop("dataset"))
        # It refuses or ignores a strategy beside these.
        if "save_strategy" in own:
            own |= _unset(config, ("save_steps", "saves_per_epoch"))
        if "eval_strategy" in own or "eval_steps" in own:
            own |= _unset(config, ("eval_steps", "evals_per_epoch")) | {
                key: own[key] for key in ("eval_steps",) if key in own
            }
        if own.pop("push_to_hub", None) is False:
            own |= _unset(config, ("hub_model_id",))
        if (bits := own.pop("quantization_bit", None)) is not None:
            own |= {f"load_in_{bits}bit": True, "adapter": "qlora"}
        if (method := own.pop("finetuning_type", None)) is not None:
            own["adapter"] = None if method == "full" else method
            own |= {"lora_target_linear": True} if method == "lora" else {}
        if "report_to" in arguments:
            own |= {key: False for key in config if key in _REPORTERS}
            own |= _unset(config, _PROJECTS)
        return own

    def flag_words(self, flags: Sequence[str]) -> tuple[str, ...]:
        # Its command passes each on as one word, to a parser that reads no --no-KEY (axolotl's build_command).
        words: list[str] = []
        for flag in flags:
            if flag.startswith("--"):
                words.append(flag)
            else:
                words[-1] += f"={flag}"
        return tuple(word if "=" in word else _as_value(word) for word in words)

    def read_flags(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key.removeprefix("no_"): False if key.startswith("no_") and value is True else value
            for key, value in given.items()
        }

    def holds_out(self, arguments: Mapping[str, Any]) -> bool:
        return not arguments.get("test_datasets")


def _as_value(switch: str) -> str:
    return f"--{switch.removeprefix('--no-')}=False" if switch.startswith("--no-") else f"{switch}=True"


def _unset(config: Mapping[str, Any], keys: Sequence[str]) -> dict[str, None]:
    return {key: None for key in keys if config.get(key) is not None}


def _placed(data: object, paths: Sequence[str]) -> list[Any]:
    """Its datasets, with these paths in their order."""
    parts, left = data if isinstance(data, list) else [], list(paths)
    named = [isinstance(part, dict) and isinstance(part.get("path"), str) for part in parts]
    return [part | {"path": left.pop(0)} if is_named else part for part, is_named in zip(parts, named, strict=True)]


FRAMEWORK = _Axolotl()
