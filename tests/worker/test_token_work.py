"""FLOPs per token from a model's modules, against what torch counts while the same model runs forward and backward."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest

from multinode.model.flops import flops_of_weights
from multinode.records.samples import TokenWork
from multinode.worker.token_work import token_work, weights_of

pytestmark = pytest.mark.torch

TOKENS = 64
SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 16}
# Dense ones, tied and not; with windows; with experts, shared ones and latent attention.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 32},
    "gemma2": {"head_dim": 16, "sliding_window": 128},
    "gemma3_text": {"head_dim": 16},
    "glm4": {"head_dim": 16, "pad_token_id": 0},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 8, "head_dim": 16, **EXPERTS},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        **EXPERTS,
        **LATENT,
    },
}


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Which torch sets when something of it is imported.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def model_of(kind: str, **changes: Any) -> Any:
    transformers = import_module("transformers")
    settings = (SMALL if kind != "gpt2" else {"vocab_size": 512}) | MODELS[kind] | changes
    config = transformers.AutoConfig.for_model(kind, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    # Torch counts no grouped products.
    model.set_experts_implementation("eager")
    return model.train()


def counted(model: Any) -> float:
    work = msgspec.convert(token_work(weights_of(model), [model]), TokenWork)
    return flops_of_weights(work, TOKENS).hardware


def run(model: Any) -> float:
    torch = import_module("torch")
    tokens = torch.randint(1, 512, (2, TOKENS))
    with import_module("torch.utils.flop_counter").FlopCounterMode(display=False) as mode:
        model(input_ids=tokens, labels=tokens).loss.backward()
    return float(mode.get_total_flops() / tokens.numel())


@pytest.mark.parametrize("kind", MODELS)
def test_a_training_of_all_weights_computes_what_torch_counts(kind: str) -> None:
    model = model_of(kind)
    assert counted(model) == pytest.approx(run(model), rel=1e-4)


@pytest.mark.parametrize("kind", MODELS)
def test_an_adapter_hands_gradients_through_what_is_frozen(kind: str) -> None:
    peft = import_module("peft")
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", fan_in_fan_out=kind == "gpt2")
    model = peft.get_peft_model(model_of(kind), config)
    # The first layer's own input needs no gradient.
    assert counted(model) == pytest.approx(run(model), rel=0.03)


@pytest.mark.parametrize("kind", ["gemma2", "gpt2", "mixtral", "qwen3_moe"])
def test_layers_that_repeat_their_forward_pass_compute_it_twice(kind: str) -> None:
    model = model_of(kind)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert counted(model) == pytest.approx(run(model), rel=0.01)


def test_what_is_frozen_before_all_that_is_trained_needs_no_gradient() -> None:
    model = model_of("llama", num_hidden_layers=8)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".7." in name)
    work = msgspec.convert(token_work(weights_of(model), [model]), TokenWork)
    layer, head = (143360 - 512 * 64) // 3, 512 * 64
    assert (work.trained, work.passed, work.frozen) == (layer, head, 7 * layer)


def test_encoders_see_no_tokens_and_unknown_experts_are_no_guess() -> None:
    torch = import_module("torch")
    transformers = import_module("transformers")
    vision = {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 64}
    config = transformers.Qwen2VLConfig(text_config=SMALL, vision_config=vision)
    model = transformers.Qwen2VLForConditionalGeneration(config)
    work = msgspec.convert(token_work(weights_of(model), [model]), TokenWork)
    assert (work.trained, work.attention_width) == (143360, 192)
    assert "parameters of encoders are not counted: a lower bound" in flops_of_weights(work, TOKENS).rule
    routed = torch.nn.ModuleDict({"experts": torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(8))})
    assert "how many experts" in token_work(weights_of(routed), [routed])["reason"]


def test_a_module_of_anybody_is_counted_without_attention() -> None:
    torch = import_module("torch")
    module = torch.nn.Sequential(torch.nn.Embedding(512, 4), torch.nn.Linear(4, 5), torch.nn.LayerNorm(5))
    work = msgspec.convert(token_work(weights_of(module), [module]), TokenWork)
    assert flops_of_weights(work, TOKENS).model == 6 * 4 * 5
    assert flops_of_weights(work, TOKENS).rule == "6 x 20 trained weights; attention is not counted: a lower bound"
