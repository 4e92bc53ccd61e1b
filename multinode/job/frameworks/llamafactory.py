"""LLaMA-Factory 0.9: `llamafactory-cli train`, whose names of arguments multinode uses where the Trainer has none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from multinode.errors import UsageError
from multinode.job.frameworks.framework import Framework, listed

# Keys of its version 1 (llamafactory/v1/config).
_VERSION_1 = frozenset({"train_dataset", "model_class", "dist_config", "init_config", "kernel_config"})
# One ignores extra keys; the other takes the arguments of another package.
_OTHER_ARGUMENTS = frozenset({"ALLOW_EXTRA_ARGS", "USE_MCA"})
# As `load_model` and `init_adapter` (model/loader.py, model/adapter.py) do it.
_BUILDER = """
import transformers
from llamafactory.hparams import FinetuningArguments, ModelArguments
from llamafactory.model.adapter import init_adapter
def parsed(asked):
    parser = transformers.HfArgumentParser((ModelArguments, FinetuningArguments))
    return parser.parse_dict(asked["arguments"], allow_extra_keys=True)
def build(asked):
    trust = asked["arguments"].get("trust_remote_code") in (True, 1)
    config = transformers.AutoConfig.from_pretrained(asked["model"], trust_remote_code=trust)
    names = ("AutoModelForImageTextToText", "AutoModelForVision2Seq", "AutoModelForSeq2SeqLM",
             "AutoModelForTextToWaveform")
    classes = [getattr(transformers, name) for name in names if hasattr(transformers, name)]
    fitting = [each for each in classes if type(config) in each._model_mapping.keys()]
    model = (fitting or [transformers.AutoModelForCausalLM])[0].from_config(config, trust_remote_code=trust)
    return getattr(model, "thinker", model) if "omni" in config.model_type else model
def attach(model, asked):
    return init_adapter(model.config, model, *parsed(asked), True)
"""


class _LlamaFactory(Framework):
    name = "llamafactory"
    title = "LLaMA-Factory"
    command_modules = ("llamafactory.cli",)
    tools: ClassVar[Mapping[str, str]] = {"torchrun": "torch", "llamafactory-cli": "llamafactory"}
    engine = "llamafactory"
    loose_numbers = True
    telltales = frozenset({"stage", "finetuning_type", "do_train", "template", "dataset", "dataset_dir"})
    makes_data = True
    builder = _BUILDER

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return super().recognises(config) or self._is_version_1(config)

    def _is_version_1(self, config: Mapping[str, Any]) -> bool:
        return "model" in config and not _VERSION_1.isdisjoint(config)

    def refusal(self, config: Mapping[str, Any], source: str) -> UsageError | None:
        if not self._is_version_1(config):
            return None
        return UsageError(
            f"{source} is a training configuration for LLaMA-Factory 1, which cannot train on several nodes yet",
            hint="write it for version 0.9, with model_name_or_path, stage and dataset (LlamaFactory#10484)",
        )

    def command(self, verb: str, path: str) -> str:
        return f"llamafactory-cli {verb} {path}"

    def flag_words(self, flags: Sequence[str]) -> tuple[str, ...]:
        # It reads options or a file.
        return ()

    def module(self, verb: str) -> str:
        # Its launcher trains if a worker runs it.
        return "llamafactory.launcher"

    def checks_keys(self, variables: Iterable[str]) -> bool:
        return _OTHER_ARGUMENTS.isdisjoint(variables)

    def data(self, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        return ()

    def dataset_paths(self, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        folder = arguments.get("dataset_dir", self.defaults.dataset_dir if "dataset" in arguments else None)
        if not isinstance(folder, str) or folder == "ONLINE" or folder.startswith("REMOTE:"):
            return ()
        return (folder, f"{folder.rstrip('/')}/dataset_info.json")

    def datasets(self, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(name for key in ("dataset", "eval_dataset") for name in listed(arguments.get(key)))

    def holds_out(self, arguments: Mapping[str, Any]) -> bool:
        # What was tokenized before is split already, or is not.
        return not arguments.get("tokenized_path") or bool(arguments.get("eval_dataset"))


FRAMEWORK = _LlamaFactory()
