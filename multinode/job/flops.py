"""FLOPs: what a training computes for a token, and from a speed TFLOP/s, MFU and HFU.

Counts the multiplications of matrices, an addition and a multiplication each; normalisations, activations, the loss and
the optimizer are left out, as everybody leaves them out. Measured speeds are in `steady`.
"""

from __future__ import annotations

import msgspec

from multinode.job.model_size import ModelShape

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
    it whole. `tests/job/test_flops.py` reproduces the first two.

    Attributes:
        model_tflops: TFLOP/s per GPU that the training needs.
        hardware_tflops: TFLOP/s per GPU that are computed.
        mfu: the first over the peak in the precision that ran; None where the peak is not known.
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
        sequence_tokens: how many tokens attend to one another, on average over tokens: of sequences of unequal
            lengths, packed or not, the sum of the squares of their lengths over the sum of their lengths.
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


def utilisation(flops: Flops, tgs: float, peak_tflops: float | None, denominator: str) -> Utilisation:
    """What a speed means in TFLOP/s per GPU, and as a share of the peak.

    Args:
        flops: of one token.
        tgs: tokens per second and GPU. Padding is no token: what is computed for it counts as lost.
        peak_tflops: of the GPU, or the mean of them (`mean_peak`); None where it is not known.
        denominator: the peak in words, or why there is none.
    """
    model, hardware = (tgs * each / _TERA for each in (flops.model, flops.hardware))
    return Utilisation(
        model_tflops=model,
        hardware_tflops=hardware,
        mfu=model / peak_tflops if peak_tflops else None,
        hfu=hardware / peak_tflops if peak_tflops else None,
        denominator=denominator,
        rule=flops.rule,
    )


def _linear_weights(shape: ModelShape) -> int:
    """Weights of the layers' linear modules; biases are added, not multiplied."""
    return shape.layers * sum(linear.inputs * linear.outputs for linear in shape.linears.values())


def _attention(shape: ModelShape, tokens: float) -> float:
    """Forward, for one token: its scores with so many tokens, and their values' mean, each of the queries' width.

    Heads that share keys and values share memory, not multiplications.
    """
    return 4 * shape.layers * tokens * shape.linears["q_proj"].outputs
