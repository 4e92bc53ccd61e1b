"""FLOPs: what a training computes for a token, and from its speed TFLOP/s, MFU and HFU.

Counts the multiplications of matrices, an addition and a multiplication each; normalisations, activations, the loss and
the optimizer are left out, as everybody leaves them out. Peaks are in `peak_flops`, measured speeds in `steady`.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from multinode.analyse.job.model_size import ModelShape
from multinode.analyse.job.peak_flops import Peak

__all__ = ["Flops", "Utilisation", "flops_per_token", "packed_length", "utilisation", "xtuner_tflops"]

_TERA = 1e12
# FLOP for a weight and token: a multiplication and an addition forward, as many backward for the gradient of what came
# in, and as many again for the weight's own, where it is trained.
_FORWARD, _FROZEN, _TRAINED = 2, 4, 6
# Of attention's two products both sides have a gradient: forward once, backward twice.
_ATTENTION_PASSES = 3


class Flops(msgspec.Struct, frozen=True, kw_only=True):
    """What one token of a training takes, in FLOP.

    Attributes:
        model: what the training needs, however it is run; MFU is made of it.
        hardware: what is computed, what is recomputed included; HFU is made of it.
        causal: whether attention counts half, as a mask leaves it, or whole.
        rule: both figures in words, to stand beside them.
    """

    model: float
    hardware: float
    causal: bool
    rule: str


class Utilisation(msgspec.Struct, frozen=True, kw_only=True):
    """How much of its GPUs a training uses.

    Published tables mean one or the other: "TFLOPs" of XTuner's speed benchmarks and "achieved teraFLOP/s" of
    Megatron-LM (arXiv 2104.04473, equation 3) are hardware figures, with what is computed again; PaLM's MFU (arXiv
    2204.02311, appendix B) is a model figure. XTuner counts causal attention half, as is done here; the other two count
    it whole. `tests/analyse/test_flops.py` reproduces the first two.

    Attributes:
        model_tflops: TFLOP/s a GPU that the training needs.
        hardware_tflops: TFLOP/s a GPU that are computed.
        mfu: the first over the peak; None where the peak is not known.
        hfu: the second, likewise.
        denominator: the peak in words, or why there is none.
        rule: how FLOPs were counted.
    """

    model_tflops: float
    hardware_tflops: float
    mfu: float | None
    hfu: float | None
    denominator: str
    rule: str


def flops_per_token(
    shape: ModelShape,
    sequence_tokens: float,
    *,
    adapter_parameters: int | None = None,
    recompute: bool = False,
    causal: bool = True,
) -> Flops:
    """What a token takes: 6 P + 3 A where all is trained, 4 P + 6 P_adapter + 3 A with LoRA.

    P are the parameters of matrices: the output layer's too, the embedding's, which is looked up, not. A is attention
    forward, 4 x layers x tokens x width, half of it where causal (PaLM, appendix B, counts the whole). Under LoRA the
    base has no weight gradients. QLoRA counts as LoRA: turning the base's four bits into bf16 is not counted.

    Args:
        shape: of the model.
        sequence_tokens: how many tokens attend to one another, in the mean over tokens: the length of a sequence, or
            `packed_length` of several.
        adapter_parameters: of a LoRA adapter (`lora_parameters`); None where the whole model is trained.
        recompute: whether each layer's forward pass is made again in the backward pass, the output layer's is not: full
            gradient checkpointing, LLaMA-Factory's default. With `use_reentrant_gc: false` each layer's last matrix is
            spared, which is not counted here.
        causal: whether a token attends to those before it alone.
    """
    linears, adapter = _linear_weights(shape), adapter_parameters or 0
    matrices = linears + shape.vocabulary * shape.hidden
    attention = _attention(shape, sequence_tokens) * (0.5 if causal else 1.0)
    base = _TRAINED if adapter_parameters is None else _FROZEN
    model = base * matrices + _TRAINED * adapter + _ATTENTION_PASSES * attention
    words = [f"{base} x {matrices:,} parameters of matrices (output layer counted, embedding not)"]
    if adapter_parameters is not None:
        words.append(f"{_TRAINED} x {adapter:,} of the adapter")
    half = "half (causal)" if causal else "whole"
    words.append(f"{_ATTENTION_PASSES} x attention over {sequence_tokens:,.0f} tokens, counted {half}")
    rule = " + ".join(words)
    if not recompute:
        return Flops(model=model, hardware=model, causal=causal, rule=rule)
    again = _FORWARD * (linears + adapter) + attention
    rule += "; of the hardware, each layer's forward pass once more"
    return Flops(model=model, hardware=model + again, causal=causal, rule=rule)


def packed_length(lengths: Collection[int]) -> float:
    """The length of the sequence that the mean token is in: the sum of squares over the sum.

    For sequences packed into one row, each of which attends to itself alone, and for rows of unequal lengths.

    Args:
        lengths: in tokens, of all sequences; padding is none.

    Raises:
        ValueError: there is no token.
    """
    tokens = sum(lengths)
    if tokens <= 0:
        raise ValueError("no token, no mean length")
    return sum(length * length for length in lengths) / tokens


def utilisation(flops: Flops, tgs: float, peak: Peak | None) -> Utilisation:
    """What a speed means in TFLOP/s a GPU, and as a share of the peak.

    Args:
        flops: of one token.
        tgs: tokens a second and GPU. Padding is no token: what is computed for it counts as lost.
        peak: of the GPU, or the mean of them; None where it is not known.
    """
    model, hardware = (tgs * each / _TERA for each in (flops.model, flops.hardware))
    return Utilisation(
        model_tflops=model,
        hardware_tflops=hardware,
        mfu=model / peak.tflops if peak else None,
        hfu=hardware / peak.tflops if peak else None,
        denominator=peak.denominator if peak else "the peak of these GPUs is not known",
        rule=flops.rule,
    )


def xtuner_tflops(shape: ModelShape, sequence_tokens: int, tgs: float) -> float:
    """What XTuner publishes as "TFLOPs" for a speed, in TFLOP/s a GPU, so that its tables can be compared with.

    It is a hardware figure (over the peak, HFU): full training, layers computed a second time in the backward pass,
    causal attention counted half: 8 L (4 h^2 + 3 h f) + 6 h V + 8 L s h a token. It takes every model for one with
    multi-head attention. Where keys and values have fewer heads (Yi, Llama 3, Qwen) it is therefore above
    `Flops.hardware`, which counts the matrices that there are; elsewhere the two are the same.

    Args:
        shape: of the model.
        sequence_tokens: length of the sequences.
        tgs: tokens a second and GPU.
    """
    layers, hidden = shape.layers, shape.hidden
    inner = shape.linears["gate_proj"].outputs
    linears = 8 * layers * (4 * hidden**2 + 3 * hidden * inner)
    return tgs * (linears + 6 * hidden * shape.vocabulary + 8 * layers * sequence_tokens * hidden) / _TERA


def _linear_weights(shape: ModelShape) -> int:
    """Weights of the layers' linear modules; biases are added, not multiplied."""
    return shape.layers * sum(linear.inputs * linear.outputs for linear in shape.linears.values())


def _attention(shape: ModelShape, tokens: float) -> float:
    """Forward, for one token: its scores with so many tokens, and their values' mean, each of the queries' width.

    Heads that share keys and values share memory, not multiplications.
    """
    return 4 * shape.layers * tokens * shape.linears["q_proj"].outputs
