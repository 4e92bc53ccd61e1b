"""The question by which a node counts the tensors of a job's model: built as the job builds it, with its adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from multinode.job.job import Job, LlamaFactoryJob
from multinode.model.model_size import KNOWN_TYPES
from multinode.records.benchmark import Benchmark

COUNTED_KEYS = frozenset({"additional_target", "quantization_bit", "use_dora", "use_galore", "use_apollo"})
"""Keys that change what is trained in ways that a node's count of the job's own model includes."""
UNCOUNTED = "uncounted"
"""The key, among the entries of a config.json, of why a node could not count the model."""
# As `load_model` and `init_adapter` of LLaMA-Factory 0.9 (model/loader.py, model/adapter.py) do it.
_LLAMAFACTORY = """
import transformers
from llamafactory.hparams import FinetuningArguments, ModelArguments
from llamafactory.model.adapter import init_adapter
def parsed(asked):
    parser = transformers.HfArgumentParser((ModelArguments, FinetuningArguments))
    return parser.parse_dict(asked["arguments"], allow_extra_keys=True)
def build(asked):
    trust = asked["arguments"].get("trust_remote_code") is True
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
# These name files to load; the rest of a job decides nothing about its model.
_FILES = ("_path", "_dir", "_file", "_token")


def count_question(job: Job | Benchmark | None, model: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a node is asked about a job and its model's config.json.

    None of a job whose model nobody can build before it runs, and of an architecture that `model_size` knows, unless a
    key of the job changes what it trains.
    """
    if not isinstance(job, LlamaFactoryJob):
        return None
    is_plain = job.settings.finetuning_type in {"full", "lora"} and not any(map(job.config.get, COUNTED_KEYS))
    if is_plain and model.get("model_type") in KNOWN_TYPES:
        return None
    arguments = {key: value for key, value in job.config.items() if not key.endswith(_FILES)}
    return {
        "source": _LLAMAFACTORY,
        "arguments": {**arguments, "model_name_or_path": "model"},
        "small": {"finetuning_type": "lora", "lora_target": "all", "lora_rank": 8},
    }
