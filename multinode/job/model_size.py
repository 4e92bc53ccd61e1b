"""Model sizes: parameters of the model and of a LoRA adapter, and the GPU memory that a strategy needs.

Reads config.json. Knows decoders built like Llama; returns nothing for other models rather than a wrong figure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Strategy, TrafficInputs
from multinode.units import GIB

# By model_type: bias of q, k and v, bias of o (if config.json does not say), normalized q and k.
_ATTENTION = {
    "llama": (False, False, False),
    "mistral": (False, False, False),
    "qwen2": (True, False, False),
    "qwen3": (False, False, True),
}
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


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
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
        layers = ((one.outputs, one.inputs, shape.layers) for one in shape.linears.values())
        return (*layers, (shape.vocabulary, shape.hidden, 1 if shape.tied else 2))
    chosen = [one for name, one in shape.linears.items() if "all" in targets or name in targets]
    pairs = (((rank, one.inputs, shape.layers), (one.outputs, rank, shape.layers)) for one in chosen)
    return tuple(matrix for pair in pairs for matrix in pair)


def _size(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if type(value) is int and 0 < value < _MOST else None


COUNTED = "parameters, gradients, Adam states and DDP buckets, without activations"

_FP32_BYTES, _HALF_BYTES = 4, 2
_ADAM_BYTES = 2 * _FP32_BYTES
_SHARES_OPTIMIZER = frozenset(set(Strategy) - {Strategy.DDP})
_SHARES_GRADIENTS = frozenset(
    {Strategy.ZERO2, Strategy.ZERO3, Strategy.FSDP, Strategy.SHARD_GRAD_OP, Strategy.HYBRID_SHARD}
)
_SHARES_PARAMETERS = frozenset({Strategy.ZERO3, Strategy.FSDP, Strategy.HYBRID_SHARD})
_DEEPSPEED = frozenset({Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3})


class StatePlacement(msgspec.Struct, frozen=True, kw_only=True):
    """Where the training states are kept."""

    half: bool = False  # whether the training computes in bf16 or fp16
    frozen_bits: int | None = None  # per frozen parameter; None is 16 in half precision, otherwise 32
    optimizer_elsewhere: bool = False  # whether the optimizer states are in host memory or on disk
    parameters_elsewhere: bool = False  # likewise


class MemoryNeed(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one worker, in GiB."""

    parameters_gib: float  # trained and frozen
    gradients_gib: float  # of the trained parameters
    optimizer_gib: float  # Adam's two moments, and DeepSpeed's fp32 copy
    buckets_gib: float = 0.0  # into which DDP copies the gradients

    @property
    def total_gib(self) -> float:
        """The sum."""
        return self.parameters_gib + self.gradients_gib + self.optimizer_gib + self.buckets_gib


def memory_need(
    strategy: Strategy, load: TrafficInputs, layout: Layout, placement: StatePlacement
) -> MemoryNeed | None:
    """Memory of the states; None if the number of parameters is unknown.

    With T trained and F frozen parameters on n workers, in bytes, as the engines keep them:
    - DDP: 4T, gradients 4T, Adam 8T, buckets 4T (torch copies gradients into buckets unless it uses views).
      LLaMA-Factory and autocast keep trained parameters in fp32.
    - ZeRO-1 in half: 2T, gradients 2T, (4 + 8)T/n (Rajbhandari et al. 2020); in fp32 4T and 4T. ZeRO-2: gradients
    /n.
      ZeRO-3: parameters /n as well, frozen ones included.
    - FSDP: 4T, 4T and 8T, all /n, frozen parameters too; SHARD_GRAD_OP keeps the parameters whole; hybrid shard
      divides by the workers of a node.
    """
    if load.parameters is None:
        return None
    workers = layout.workers_per_node if strategy is Strategy.HYBRID_SHARD else layout.workers
    trained, frozen = load.trainable, max(0, load.parameters - load.trainable)
    deepspeed = strategy in _DEEPSPEED
    width = _HALF_BYTES if deepspeed and placement.half else _FP32_BYTES
    frozen_bits = placement.frozen_bits or 8 * (_HALF_BYTES if placement.half else _FP32_BYTES)
    parameters = trained * width + frozen * frozen_bits / 8
    optimizer = trained * (_ADAM_BYTES + (_FP32_BYTES if deepspeed else 0))
    return MemoryNeed(
        parameters_gib=0.0
        if placement.parameters_elsewhere
        else _gib(parameters, workers, strategy, _SHARES_PARAMETERS),
        gradients_gib=_gib(trained * width, workers, strategy, _SHARES_GRADIENTS),
        optimizer_gib=0.0 if placement.optimizer_elsewhere else _gib(optimizer, workers, strategy, _SHARES_OPTIMIZER),
        buckets_gib=trained * width / GIB if strategy is Strategy.DDP and layout.workers > 1 else 0.0,
    )


def _gib(size_bytes: float, workers: int, strategy: Strategy, shared: frozenset[Strategy]) -> float:
    return size_bytes / (workers if strategy in shared else 1) / GIB
