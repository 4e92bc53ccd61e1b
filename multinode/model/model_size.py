"""Model sizes: parameters of the model and of a LoRA adapter.

Reads config.json. Knows decoders built like Llama; returns nothing for other models rather than a wrong figure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

# By model_type: bias of q, k and v, bias of o (if config.json does not say), normalized q and k.
_ATTENTION = {
    "llama": (False, False, False),
    "mistral": (False, False, False),
    "qwen2": (True, False, False),
    "qwen3": (False, False, True),
}
KNOWN_TYPES = frozenset(_ATTENTION)
"""Values of `model_type` whose parameters are counted here."""
COUNTED_RANK = 8
"""Rank of the adapter with which a node also counts a model that is trained whole."""
# Models whose code reads attention_bias.
_READ_ATTENTION_BIAS = frozenset({"llama", "qwen3"})
# Larger values in a config.json are nonsense; products stay far below the limits of a float.
_MOST = 10**7
_NORMS_A_LAYER = 2
_EMBEDDING = "embed_tokens"
_HEAD = "lm_head"


class Linear(msgspec.Struct, frozen=True):
    """A linear module of a layer: `outputs` x `inputs` weights, and `outputs` more with a bias."""

    inputs: int
    outputs: int
    bias: bool = False

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.outputs * (self.inputs + self.bias)


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, tag_field="is", tag="shape"):
    """Parameters of a decoder."""

    layers: int  # number of layers
    linears: dict[str, Linear]  # the linear modules of one layer, by name
    norms_a_layer: int  # parameters of one layer's normalizations
    hidden: int  # width of the residual stream, and size of the last normalization
    vocabulary: int  # rows of the embedding
    tied: bool  # whether the output layer is the embedding

    @property
    def parameters(self) -> int:
        """All parameters of the model; a tied embedding counts once."""
        layer = sum(linear.parameters for linear in self.linears.values()) + self.norms_a_layer
        return self.layers * layer + self.outside_layers

    @property
    def outside_layers(self) -> int:
        """Parameters of the embedding, the last normalization and the output layer."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden


def parse_model(config: Mapping[str, Any]) -> ModelShape | None:
    """The shape described by a config.json; None if the architecture is unknown or a number is no size."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _ATTENTION:
        return None
    hidden, layers = _size(config, "hidden_size"), _size(config, "num_hidden_layers")
    heads, inner = _size(config, "num_attention_heads"), _size(config, "intermediate_size")
    vocabulary = _size(config, "vocab_size")
    if hidden is None or layers is None or heads is None or inner is None or vocabulary is None:
        return None
    # Absent or null: the common default.
    head = _size(config, "head_dim") or hidden // heads
    key_heads = _size(config, "num_key_value_heads") or heads
    qkv_bias, o_bias, normalised = _ATTENTION[kind]
    if kind in _READ_ATTENTION_BIAS:
        qkv_bias = o_bias = config.get("attention_bias") is True
    mlp_bias = kind == "llama" and config.get("mlp_bias") is True
    return ModelShape(
        layers=layers,
        linears={
            "q_proj": Linear(hidden, heads * head, qkv_bias),
            "k_proj": Linear(hidden, key_heads * head, qkv_bias),
            "v_proj": Linear(hidden, key_heads * head, qkv_bias),
            "o_proj": Linear(heads * head, hidden, o_bias),
            "gate_proj": Linear(hidden, inner, mlp_bias),
            "up_proj": Linear(hidden, inner, mlp_bias),
            "down_proj": Linear(inner, hidden, mlp_bias),
        },
        norms_a_layer=_NORMS_A_LAYER * hidden + (2 * head if normalised else 0),
        hidden=hidden,
        vocabulary=vocabulary,
        tied=config.get("tie_word_embeddings") is True,
    )


def lora_parameters(shape: ModelShape, rank: int, targets: Collection[str]) -> int | None:
    """Parameters of a LoRA adapter: rank x (inputs + outputs) per module (PEFT); None if a target is unknown.

    Args:
        shape: of the base model.
        rank: of the adapters.
        targets: names of modules; `all` alone is every linear module but the output layer, as in LLaMA-Factory.
    """
    names = set(targets)
    if names == {"all"}:
        names = set(shape.linears)
    ends = names & {_EMBEDDING, _HEAD}
    if not names or not names - ends <= set(shape.linears):
        return None
    widths = [shape.linears[name].inputs + shape.linears[name].outputs for name in names - ends]
    return rank * (shape.layers * sum(widths) + len(ends) * (shape.vocabulary + shape.hidden))


def trained_matrices(shape: ModelShape, rank: int | None, targets: Collection[str]) -> tuple[tuple[int, int, int], ...]:
    """Rows, columns and number of the trained matrices.

    Args:
        shape: the model.
        rank: of an adapter; None trains the whole model.
        targets: of an adapter, as for `lora_parameters`.
    """
    if rank is None:
        layers = ((linear.outputs, linear.inputs, shape.layers) for linear in shape.linears.values())
        return (*layers, (shape.vocabulary, shape.hidden, 1 if shape.tied else 2))
    chosen = [linear for name, linear in shape.linears.items() if "all" in targets or name in targets]
    pairs = (((rank, linear.inputs, shape.layers), (linear.outputs, rank, shape.layers)) for linear in chosen)
    return tuple(matrix for pair in pairs for matrix in pair)


def _size(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if type(value) is int and 0 < value < _MOST else None
