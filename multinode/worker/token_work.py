"""Counts the weights that one token is multiplied with, by whether they are trained, for the FLOPs per token.

Only shapes are read, and nothing runs. An embedding costs nothing, an expert costs its share, and an encoder of images
or sound sees no tokens.
"""

from __future__ import annotations

import math
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Tuple

# Prefixes of modules that process patches of images or samples of sound.
_ENCODERS = ("vision", "visual", "image", "audio", "speech", "multi_modal", "mm_projector")
# PEFT keeps the original of a module that it replaces.
_UNUSED = "original_module"
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k")
"""Keys of a configuration that say how many experts a token is sent to."""


class Weight(NamedTuple):
    """One parameter in its module."""

    path: str  # of the module
    owner: Any  # the module
    shape: Tuple[int, ...]  # of the whole parameter, before it was partitioned or packed
    is_trainable: bool
    key: int  # equal for all uses of one parameter


def weights_of(*modules: Any) -> Iterator[Weight]:
    """Parameters of modules without biases, in order, which in most models is that of the forward pass."""
    for module in modules:
        for path, owner in module.named_modules():
            for name, parameter in owner._parameters.items():  # noqa: SLF001 - `parameters` leaves out a second use
                if parameter is not None and not name.endswith("bias"):
                    yield Weight(path, owner, full_shape(parameter), parameter.requires_grad, id(parameter))


def full_shape(parameter: Any) -> Tuple[int, ...]:
    """Shape of a parameter before it was partitioned or packed; a DTensor already has the full shape."""
    partitioned = getattr(parameter, "ds_shape", None)
    # bitsandbytes packs two 4-bit weights into one byte.
    packed = getattr(getattr(parameter, "quant_state", None), "shape", None)
    return tuple(int(size) for size in partitioned or packed or parameter.shape)


def token_work(weights: Iterable[Weight], modules: Iterable[Any]) -> Dict[str, Any]:
    """A TokenWork (records/samples.py), or why it is unknown.

    Args:
        weights: weights of the whole model, in order.
        modules: modules that hold it; their configuration describes attention and experts.
    """
    weights, inside = list(weights), [each for module in modules for each in module.modules()]
    config = _text_config(inside)
    counts = {"trained": 0.0, "passed": 0.0, "frozen": 0.0, "recomputed": 0.0}
    repeats = any(getattr(each, "gradient_checkpointing", False) is True for each in inside)
    experts, left_out = 0, 0
    has_gradient, met = False, set()
    for each in weights:
        parts = each.path.split(".")
        if _UNUSED in parts or each.key in met:
            continue
        if any(part.startswith(_ENCODERS) for part in parts):
            met.add(each.key)
            left_out += math.prod(each.shape)
            continue
        # Weights after the first trained one pass on a gradient.
        has_gradient = has_gradient or each.is_trainable
        if len(each.shape) == 1 or hasattr(each.owner, "num_embeddings"):
            continue
        met.add(each.key)
        size = float(math.prod(each.shape))
        if "experts" in parts:
            experts += 1
            size *= _share_of_experts(config)
        counts["trained" if each.is_trainable else "passed" if has_gradient else "frozen"] += size
        # Layers have numbers; gradient checkpointing only recomputes layers.
        if repeats and any(map(str.isdigit, parts)):
            counts["recomputed"] += size
    if not all(math.isfinite(count) for count in counts.values()):
        return {"is": "unknown", "reason": "its configuration does not say how many experts a token is sent to"}
    return {
        "is": "work",
        **{name: round(count) for name, count in counts.items()},
        **_attention(config),
        "experts": "%d of %d" % _experts(config) if experts else "",
        "left_out": left_out,
    }


def _text_config(inside: List[Any]) -> Any:
    """The transformers configuration; for a multimodal model, that of its language model."""
    for each in inside:
        get = getattr(getattr(each, "config", None), "get_text_config", None)
        if get is not None:
            return get()
    return None


def _experts(config: Any) -> Tuple[int, int]:
    """Experts per token, and all experts; 0 if unknown."""
    counts = (
        next((value for name in names for value in [getattr(config, name, None)] if isinstance(value, int)), 0)
        for names in (EXPERTS_PER_TOKEN, _EXPERTS)
    )
    chosen, all_of_them = counts
    return chosen, all_of_them


def _share_of_experts(config: Any) -> float:
    chosen, all_of_them = _experts(config)
    return chosen / all_of_them if chosen and all_of_them else math.nan


def _attention(config: Any) -> Dict[str, Any]:
    """Sums of the query widths over all layers, and the window; empty if unknown."""
    layers, heads = (getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads"))
    if not isinstance(layers, int) or not isinstance(heads, int):
        return {}
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys = getattr(config, "qk_nope_head_dim", None)
    if keys is not None:
        # DeepSeek's latent attention: scores and values have widths of their own.
        width = (keys + config.qk_rope_head_dim + config.v_head_dim) / 2
    types = getattr(config, "layer_types", None) or ["full_attention"] * layers
    sliding, window = types.count("sliding_attention"), getattr(config, "sliding_window", None) or 0
    return {
        "attention_width": int(types.count("full_attention") * heads * width),
        "sliding_width": int(sliding * heads * width) if window else 0,
        "window": window,
    }
