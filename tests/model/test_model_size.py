from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from multinode.model.model_size import lora_parameters, parse_model
from tests.model import trainings

# The sizes in config.json of Meta-Llama-3-8B, Mistral-7B-v0.1, Qwen2.5-0.5B and Qwen3-0.6B, with the number of
# parameters that their model cards and files have.
LLAMA_3_8B = trainings.LLAMA_3_8B | {"attention_bias": False, "tie_word_embeddings": False}
MISTRAL_7B = LLAMA_3_8B | {"model_type": "mistral", "vocab_size": 32000}
QWEN_2_5_05B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN_3_06B = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "attention_bias": False,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (LLAMA_3_8B, 8_030_261_248),
        (MISTRAL_7B, 7_241_732_096),
        (QWEN_2_5_05B, 494_032_768),
        (QWEN_3_06B, 596_049_920),
    ],
)
def test_parameters_are_those_of_the_published_models(config: dict[str, Any], parameters: int) -> None:
    shape = parse_model(config)
    assert shape is not None
    assert shape.parameters == parameters


# In a process of its own: importing transformers changes the environment.
TRANSFORMERS = """
import itertools, json
import torch
from transformers import AutoConfig, AutoModelForCausalLM
sizes = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2}
more = {"intermediate_size": 200, "vocab_size": 500, "head_dim": 32, "pad_token_id": 0}
found = []
for kind, tied, bias in itertools.product(["llama", "mistral", "qwen2", "qwen3"], [True, False], [True, False]):
    choices = {"attention_bias": bias, "mlp_bias": bias, "tie_word_embeddings": tied}
    config = AutoConfig.for_model(kind, **sizes, **more, **choices)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found.append([config.to_dict(), sum(parameter.numel() for parameter in model.parameters())])
print(json.dumps(found))
"""


@pytest.mark.torch
def test_parameters_are_those_that_transformers_makes() -> None:
    answer = subprocess.run([sys.executable, "-c", TRANSFORMERS], capture_output=True, check=True, timeout=600)
    found = json.loads(answer.stdout.splitlines()[-1])
    assert len(found) == 16
    for config, parameters in found:
        shape = parse_model(config)
        assert shape is not None
        assert shape.parameters == parameters, config["model_type"]


def test_lora_on_all_linear_modules_of_llama_3_8b_trains_21_million_parameters() -> None:
    shape = parse_model(LLAMA_3_8B)
    assert shape is not None
    # PEFT: "trainable params: 20,971,520" at rank 8; as fp32 gradients 84 MB.
    assert lora_parameters(shape, 8, ["all"]) == 20_971_520
    assert lora_parameters(shape, 16, ["all"]) == 2 * 20_971_520
    assert lora_parameters(shape, 8, ["q_proj", "v_proj"]) == 8 * 32 * (4096 + 4096 + 4096 + 1024)
    embedding = 8 * (128256 + 4096)
    assert lora_parameters(shape, 8, [*shape.linears, "embed_tokens"]) == 20_971_520 + embedding
    assert lora_parameters(shape, 8, ["qkv"]) is None
    assert lora_parameters(shape, 8, []) is None


@pytest.mark.parametrize(
    "config",
    [
        {},
        LLAMA_3_8B | {"model_type": "qwen2_moe"},
        LLAMA_3_8B | {"model_type": ["llama"]},
        LLAMA_3_8B | {"hidden_size": "4096"},
        LLAMA_3_8B | {"num_attention_heads": 0},
        LLAMA_3_8B | {"num_hidden_layers": True},
        LLAMA_3_8B | {"vocab_size": 10**300},
        {key: value for key, value in LLAMA_3_8B.items() if key != "intermediate_size"},
    ],
)
def test_of_what_is_not_known_nothing_is_said(config: dict[str, Any]) -> None:
    assert parse_model(config) is None
