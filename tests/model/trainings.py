"""Jobs and models that the tests of the traffic share."""

from __future__ import annotations

import json
from typing import Any

from multinode.job.job import TrainingJob
from multinode.traffic.step_calls import Strategy

# The sizes of Meta-Llama-3-8B, and of the model that scripts/make_tiny.py makes.
LLAMA_3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
TINY = {
    "model_type": "qwen2",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 688,
    "vocab_size": 2048,
    "tie_word_embeddings": True,
}
FULL = {"model_name_or_path": "model", "stage": "sft", "finetuning_type": "full"}
LORA = {"model_name_or_path": "model", "stage": "sft", "finetuning_type": "lora", "lora_rank": 8, "lora_target": "all"}


def training_job(config: dict[str, Any], **zero: Any) -> TrainingJob:
    """A job; under DeepSpeed where `zero` says what its zero_optimization holds."""
    text = json.dumps({"zero_optimization": zero}) if zero else None
    config = config | ({"deepspeed": "ds.json"} if zero else {})
    return TrainingJob(config_path="sft.yaml", text="", config=config, deepspeed_text=text)


# The small model's traffic in MB, by strategy and accumulation: counted on the NICs of two nodes with one worker each,
# gloo, DeepSpeed 0.19.
MEASURED_SENT = (
    (Strategy.DDP, 1, 14.74),
    (Strategy.DDP, 4, 14.74),
    (Strategy.ZERO2, 1, 22.1),
    (Strategy.ZERO2, 4, 66.3),
)
