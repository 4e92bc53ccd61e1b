"""The question by which a node counts the tensors of a job's model: built as the job builds it, with its adapters."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from multinode.job.job import Job
from multinode.model.model_size import COUNTED_RANK, KNOWN_TYPES
from multinode.records.benchmark import Benchmark

COUNTED_KEYS = frozenset({"additional_target", "quantization_bit", "use_dora", "use_galore", "use_apollo"})
"""Keys that change what is trained in ways that a node's count of the job's own model includes."""
UNCOUNTED = "uncounted"
"""The key, among the entries of a config.json, of why a node could not count the model."""
# As most frameworks do it.
_USUAL = """
import transformers, peft
def build(asked):
    trust = asked["arguments"].get("trust_remote_code") in (True, 1)
    config = transformers.AutoConfig.from_pretrained(asked["model"], trust_remote_code=trust)
    images = getattr(transformers, "AutoModelForImageTextToText", None)
    kind = images if images and type(config) in images._model_mapping.keys() else transformers.AutoModelForCausalLM
    return kind.from_config(config, trust_remote_code=trust)
def attach(model, asked):
    given = asked["arguments"]
    if given.get("finetuning_type") != "lora":
        return model
    targets = given.get("lora_target") or None
    names = "all-linear" if targets == "all" else targets.split(",") if targets else None
    saved = given.get("additional_target")
    saved = saved.split(",") if isinstance(saved, str) else saved
    lora = peft.LoraConfig(r=given["lora_rank"], target_modules=names, modules_to_save=saved or None,
                           use_dora=given.get("use_dora") in (True, 1), task_type="CAUSAL_LM")
    return peft.get_peft_model(model, lora)
"""
# These name files to load; the rest of a job decides nothing about its model.
_FILES = ("_path", "_dir", "_file", "_token")


def count_question(job: Job | Benchmark | None, model: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a node is asked about a job and its model's config.json.

    None of a job whose model nobody can build before it runs, and of an architecture that `model_size` knows, unless a
    key of the job changes what it trains.
    """
    training = job.training if job is not None else None
    if training is None:
        return None
    given, settings = training.arguments, training.settings
    is_plain = settings.finetuning_type in {"full", "lora"} and not any(map(given.get, COUNTED_KEYS))
    is_plain = is_plain and bool(settings.finetuning_type == "full" or settings.lora_target)
    if is_plain and model.get("model_type") in KNOWN_TYPES:
        return None
    arguments = {key: value for key, value in given.items() if not key.endswith(_FILES)}
    if not training.kind.builder:
        arguments |= {"lora_rank": settings.lora_rank}
    return {
        "work": files("multinode.worker").joinpath("token_work.py").read_text(),
        "source": training.kind.builder or _USUAL,
        "arguments": {**arguments, "model_name_or_path": "model"},
        "adapter": {"finetuning_type": "lora", "lora_target": "all", "lora_rank": COUNTED_RANK},
    }
