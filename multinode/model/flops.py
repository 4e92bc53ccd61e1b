"""FLOPs per token of a training, and the peaks of GPUs (gpu_peaks.toml).

Counts matrix multiplications, two FLOP per multiply-add. Normalizations, activations, the loss and the optimizer are
left out, as is usual. Measured speeds are in `profile/throughput.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from importlib.resources import files

import msgspec

from multinode.model.model_size import ModelShape
from multinode.records.benchmark import BenchedPeak
from multinode.records.samples import TokenWork

# FLOP per weight and token: 2 forward, 2 backward for the inputs' gradient, and 2 for the weight's own, if trained.
_FORWARD, _FROZEN, _TRAINED = 2, 4, 6
# Both operands of attention's two products have a gradient: forward once, backward twice.
_ATTENTION_PASSES = 3
_WHOLE = "in full, as in PaLM's MFU"


class Flops(msgspec.Struct, frozen=True, kw_only=True):
    """FLOPs of one token."""

    model: float  # what the model needs, regardless of how it is run; for MFU
    hardware: float  # including recomputation; for HFU
    causal: bool  # whether attention counts half, as under a causal mask
    rule: str  # how both were counted, in words


def flops_per_token(
    shape: ModelShape,
    sequence_tokens: float,
    *,
    adapter_parameters: int | None = None,
    recompute: bool = False,
    causal: bool = True,
) -> Flops:
    """FLOPs per token: 6 P + 3 A for a full training, 4 P + 6 P_adapter + 3 A with LoRA.

    P is the number of matrix parameters, including the output layer and excluding the embedding, which is looked up. A
    is forward attention, 4 x layers x tokens x width, half of it if causal (PaLM, appendix B, counts the whole). Under
    LoRA the base has no weight gradients. QLoRA counts as LoRA: dequantization is not counted.

    Args:
        shape: of the model.
        sequence_tokens: tokens that attend to one another, averaged over tokens: for sequences of unequal lengths,
            packed or not, the sum of squared lengths over the sum of lengths.
        adapter_parameters: of a LoRA adapter (`lora_parameters`); None if the whole model is trained.
        recompute: whether each layer's forward pass is repeated in the backward pass (full gradient checkpointing,
            LLaMA-Factory's default; not the output layer's). `use_reentrant_gc: false` saves each layer's last matrix,
            which is not counted here.
        causal: whether a token attends only to earlier tokens.
    """
    linears, adapter = _linear_weights(shape), adapter_parameters or 0
    matrices = linears + shape.vocabulary * shape.hidden
    attention = _attention(shape, sequence_tokens) * (0.5 if causal else 1.0)
    base = _TRAINED if adapter_parameters is None else _FROZEN
    model = base * matrices + _TRAINED * adapter + _ATTENTION_PASSES * attention
    words = [f"{base} x {matrices:,} matrix parameters (with the output layer, without the embedding)"]
    if adapter_parameters is not None:
        words.append(f"{_TRAINED} x {adapter:,} adapter parameters")
    half = "half (causal)" if causal else _WHOLE
    words.append(f"{_ATTENTION_PASSES} x attention over {sequence_tokens:,.0f} tokens, counted {half}")
    rule = " + ".join(words)
    if not recompute:
        return Flops(model=model, hardware=model, causal=causal, rule=rule)
    again = _FORWARD * (linears + adapter) + attention
    rule += "; hardware FLOPs also count each layer's forward pass a second time"
    return Flops(model=model, hardware=model + again, causal=causal, rule=rule)


def flops_of_weights(work: TokenWork, sequence_tokens: float) -> Flops:
    """FLOPs per token of any model: 6 per trained weight, 4 per frozen one with a gradient through it, 2 per other one.

    A frozen weight needs no gradient of its own; one before all that is trained needs none at all.

    Args:
        work: the weights that a token is multiplied with.
        sequence_tokens: as in `flops_per_token`.
    """
    kinds = ((_TRAINED, work.trained, "trained"), (_FROZEN, work.passed, "frozen"), (_FORWARD, work.frozen, "frozen"))
    words = [f"{each} x {weights:,} {kind} weights" for each, weights, kind in kinds if weights]
    seen = (work.attention_width or 0) * sequence_tokens + work.sliding_width * min(sequence_tokens, work.window)
    attention = 4 * seen
    if work.attention_width is not None:
        words.append(f"{_ATTENTION_PASSES} x attention over {sequence_tokens:,.0f} tokens, counted {_WHOLE}")
    rule = " + ".join(words)
    if work.experts:
        rule += f"; for experts, {work.experts}"
    if work.attention_width is None:
        rule += "; attention is not counted: a lower bound"
    if work.left_out:
        rule += f"; {work.left_out:,} parameters of encoders are not counted: a lower bound"
    model = sum(each * weights for each, weights, _ in kinds) + _ATTENTION_PASSES * attention
    if not work.recomputed:
        return Flops(model=model, hardware=model, causal=False, rule=rule)
    again = _FORWARD * work.recomputed + attention
    rule += "; hardware FLOPs also count each layer's forward pass a second time"
    return Flops(model=model, hardware=model + again, causal=False, rule=rule)


def _linear_weights(shape: ModelShape) -> int:
    return shape.layers * sum(linear.inputs * linear.outputs for linear in shape.linears.values())


def _attention(shape: ModelShape, tokens: float) -> float:
    """Forward, per token: its scores and the weighted mean of the values, each of the queries' width.

    Heads that share keys and values save memory, not multiplications.
    """
    return 4 * shape.layers * tokens * shape.linears["q_proj"].outputs


class Peak(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Peak rates of one GPU."""

    tflops: float  # TFLOP/s (1e12) of dense matrices in `half`, accumulated in fp32
    source: str  # where that figure is from
    fp32_tflops: float | None = None  # outside the tensor cores; None if unknown
    tf32_tflops: float | None = None  # of fp32 matrices multiplied as tf32 by the tensor cores
    memory_gb_per_s: float | None = None  # memory bandwidth, reads and writes together
    others_source: str = ""  # where these three are from
    half: str = "bf16"  # `bf16`, or `fp16` for GPUs whose tensor cores support nothing else

    def in_precision(self, dtype: str) -> tuple[float | None, str]:
        """TFLOP/s in `fp32`, `tf32`, `fp16` or `bf16`, and the source; None if unknown."""
        others = {"fp32": self.fp32_tflops, "tf32": self.tf32_tflops}
        if dtype in others:
            return others[dtype], self.others_source
        is_known = dtype in {"fp16", self.half}
        return (self.tflops, self.source) if is_known else (None, "")


_PEAKS = msgspec.toml.decode(files(__package__).joinpath("gpu_peaks.toml").read_bytes(), type=dict[str, Peak])


def peak_of(gpu_name: str) -> Peak | None:
    """The peak of a GPU by the name that NVML, or torch for AMD, reports; None if unknown.

    MIG slices, mobile GPUs and versions with another power limit have names of their own, and no peak here.
    """
    return _PEAKS.get(_name_of(gpu_name))


def _name_of(gpu_name: str) -> str:
    # Older drivers omit the vendor's name.
    return gpu_name.strip().removeprefix("NVIDIA ")


def _benched(gpu_name: str, dtype: str, benched: Collection[BenchedPeak]) -> tuple[float | None, str]:
    for peak in benched:
        if (_name_of(peak.gpu), peak.dtype) == (_name_of(gpu_name), dtype):
            return peak.tflops, f"not the peak, which is unknown: the fastest product of bench {peak.run_id}"
    return None, ""


def mean_peak(
    gpu_names: Collection[str], dtype: str, benched: Collection[BenchedPeak] = ()
) -> tuple[float | None, str]:
    """Mean TFLOP/s of the workers' GPUs in a precision, with its description; None with the reason.

    Args:
        gpu_names: one per worker.
        dtype: `fp32`, `tf32`, `fp16` or `bf16`; peaks in other types are unknown.
        benched: what benches measured, for GPUs whose peak is unknown.
    """
    peaks, counts = dict[str, tuple[float, str]](), Counter(name.strip() for name in gpu_names)
    benched_names: list[str] = []
    for name in counts:
        peak = peak_of(name)
        tflops, source = peak.in_precision(dtype) if peak is not None else (None, "")
        if tflops is None:
            tflops, source = _benched(name, dtype, benched)
            benched_names.append(name)
        if tflops is None:
            return None, f"the peak of {name} in {dtype} is unknown"
        peaks[name] = tflops, source
    if not peaks:
        return None, "no worker uses a GPU"
    mean = sum(tflops * counts[name] for name, (tflops, _) in peaks.items()) / counts.total()
    mixed = ", ".join(f"{count} x {name}" for name, count in counts.items())
    measured = "".join(f"; {name}: {peaks[name][1]}" for name in benched_names)
    source = f"mean of {mixed}{measured}" if len(peaks) > 1 else next(source for _, source in peaks.values())
    summed = "" if dtype == "fp32" else " with fp32 accumulation"
    return mean, f"{mean:g} TFLOP/s per GPU, dense {dtype}{summed} ({source})"
