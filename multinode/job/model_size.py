"""Model sizes from a config.json: how many parameters a model has, and how many a LoRA adapter trains.

Knows the shapes of decoders that are built like Llama. Of any other model it says nothing rather than a wrong figure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from multinode.traffic.algorithms import Layout
from multinode.traffic.traffic import Strategy, TrafficInputs

# model_type: whether q, k and v have a bias, and o one, where config.json does not say; whether q and k are normalised.
_ATTENTION = {
    "llama": (False, False, False),
    "mistral": (False, False, False),
    "qwen2": (True, False, False),
    "qwen3": (False, False, True),
}
# Those whose modeling code reads attention_bias.
_READ_ATTENTION_BIAS = frozenset({"llama", "qwen3"})
# Above these a config.json is nonsense; products stay far from what a float can hold.
_MOST = 10**7
_NORMS_A_LAYER = 2
_EMBEDDING = "embed_tokens"
_HEAD = "lm_head"


class Linear(msgspec.Struct, frozen=True):
    """One linear module of a layer: `outputs` x `inputs` weights, and `outputs` more where it has a bias."""

    inputs: int
    outputs: int
    bias: bool = False

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.outputs * (self.inputs + self.bias)


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a decoder, by where they are.

    Attributes:
        layers: how many layers it has.
        linears: the linear modules of one layer, by their names in the model.
        norms_a_layer: parameters of one layer's normalisations.
        hidden: width of the residual stream, which is also the size of the last normalisation.
        vocabulary: rows of the embedding.
        tied: whether the output layer is the embedding.
    """

    layers: int
    linears: dict[str, Linear]
    norms_a_layer: int
    hidden: int
    vocabulary: int
    tied: bool

    @property
    def parameters(self) -> int:
        """All parameters of the model; a tied embedding counts once."""
        layer = sum(linear.parameters for linear in self.linears.values()) + self.norms_a_layer
        return self.layers * layer + self.outside_layers

    @property
    def outside_layers(self) -> int:
        """Parameters of the embedding, the last normalisation and the output layer."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden


def parse_model(config: Mapping[str, Any]) -> ModelShape | None:
    """The shape that a config.json describes; None where the architecture is unknown or a number is no size."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _ATTENTION:
        return None
    hidden, layers = _size(config, "hidden_size"), _size(config, "num_hidden_layers")
    heads, inner = _size(config, "num_attention_heads"), _size(config, "intermediate_size")
    vocabulary = _size(config, "vocab_size")
    if hidden is None or layers is None or heads is None or inner is None or vocabulary is None:
        return None
    # Absent or null, both take what most models have.
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
    """What LoRA trains: rank x (inputs + outputs) a module (PEFT); None where a target is no module that is known.

    Args:
        shape: the model that it is put on.
        rank: of the adapters.
        targets: names of modules; `all` alone is every linear module but the output layer, as LLaMA-Factory has it.
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
    """Rows, columns and count of the matrices that are trained.

    Args:
        shape: the model.
        rank: of an adapter; None trains the whole model.
        targets: of an adapter, as `lora_parameters` has them.
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


COUNTED = "parameters, gradients, Adam's states and DDP's buckets; activations are not counted"

_BYTES_PER_GIB = 1 << 30
_FP32_BYTES, _HALF_BYTES = 4, 2
_ADAM_BYTES = 2 * _FP32_BYTES
_SHARES_OPTIMIZER = frozenset(set(Strategy) - {Strategy.DDP})
_SHARES_GRADIENTS = frozenset(
    {Strategy.ZERO2, Strategy.ZERO3, Strategy.FSDP, Strategy.SHARD_GRAD_OP, Strategy.HYBRID_SHARD}
)
_SHARES_PARAMETERS = frozenset({Strategy.ZERO3, Strategy.FSDP, Strategy.HYBRID_SHARD})
_DEEPSPEED = frozenset({Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3})


class StatePlacement(msgspec.Struct, frozen=True, kw_only=True):
    """How the states are kept.

    Attributes:
        half: whether the training computes in bf16 or fp16.
        frozen_bits: of one parameter that is not trained; None is 16 of a training in half, else 32.
        optimizer_elsewhere: whether the optimizer's states lie in the node's own memory, or on a disk; likewise
            `parameters_elsewhere`.
    """

    half: bool = False
    frozen_bits: int | None = None
    optimizer_elsewhere: bool = False
    parameters_elsewhere: bool = False


class MemoryNeed(msgspec.Struct, frozen=True, kw_only=True):
    """Of one worker, in GiB.

    Attributes:
        parameters_gib: trained and frozen.
        gradients_gib: of what is trained.
        optimizer_gib: Adam's two moments, and the fp32 copy that DeepSpeed's workers step on.
        buckets_gib: into which DDP copies the gradients.
    """

    parameters_gib: float
    gradients_gib: float
    optimizer_gib: float
    buckets_gib: float = 0.0

    @property
    def total_gib(self) -> float:
        """All of them."""
        return self.parameters_gib + self.gradients_gib + self.optimizer_gib + self.buckets_gib


def memory_need(
    strategy: Strategy, load: TrafficInputs, layout: Layout, placement: StatePlacement
) -> MemoryNeed | None:
    """What the states take; None where the number of parameters is not known.

    With T trained and F frozen parameters on n workers, in bytes, as the engines keep them:

    - DDP: 4T, gradients 4T, Adam 8T, buckets 4T (torch copies each gradient into its bucket unless it is told to use
      views). What is trained is fp32 whatever it computes in, as LLaMA-Factory and autocast have it.
    - ZeRO-1 in half: 2T, gradients 2T, (4 + 8)T/n (Rajbhandari et al. 2020); in fp32 4T and 4T. ZeRO-2: gradients /n.
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
        buckets_gib=trained * width / _BYTES_PER_GIB if strategy is Strategy.DDP and layout.workers > 1 else 0.0,
    )


def _gib(size_bytes: float, workers: int, strategy: Strategy, shared: frozenset[Strategy]) -> float:
    return size_bytes / (workers if strategy in shared else 1) / _BYTES_PER_GIB
