"""FLOPs per token of a training, and the peaks of GPUs.

Counts matrix multiplications, two FLOP per multiply-add. Normalizations, activations, the loss and the optimizer are
left out, as is usual. Measured speeds are in `profile/throughput.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import msgspec

from multinode.job.model_size import ModelShape
from multinode.records.samples import TokenWork

# FLOP per weight and token: 2 forward, 2 backward for the inputs' gradient, and 2 for the weight's own, if trained.
_FORWARD, _FROZEN, _TRAINED = 2, 4, 6
# Both operands of attention's two products have a gradient: forward once, backward twice.
_ATTENTION_PASSES = 3
_WHOLE = "whole, as PaLM's MFU does"


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
    words = [f"{base} x {matrices:,} parameters of matrices (output layer counted, embedding not)"]
    if adapter_parameters is not None:
        words.append(f"{_TRAINED} x {adapter:,} of the adapter")
    half = "half (causal)" if causal else _WHOLE
    words.append(f"{_ATTENTION_PASSES} x attention over {sequence_tokens:,.0f} tokens, counted {half}")
    rule = " + ".join(words)
    if not recompute:
        return Flops(model=model, hardware=model, causal=causal, rule=rule)
    again = _FORWARD * (linears + adapter) + attention
    rule += "; of the hardware, each layer's forward pass once more"
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
        rule += f"; of experts {work.experts}"
    if work.attention_width is None:
        rule += "; attention is not counted: a lower bound"
    if work.left_out:
        rule += f"; {work.left_out:,} parameters of encoders are not counted: a lower bound"
    model = sum(each * weights for each, weights, _ in kinds) + _ATTENTION_PASSES * attention
    if not work.recomputed:
        return Flops(model=model, hardware=model, causal=False, rule=rule)
    again = _FORWARD * work.recomputed + attention
    rule += "; of the hardware, each layer's forward pass once more"
    return Flops(model=model, hardware=model + again, causal=False, rule=rule)


def _linear_weights(shape: ModelShape) -> int:
    return shape.layers * sum(linear.inputs * linear.outputs for linear in shape.linears.values())


def _attention(shape: ModelShape, tokens: float) -> float:
    """Forward, per token: its scores and the weighted mean of the values, each of the queries' width.

    Heads that share keys and values save memory, not multiplications.
    """
    return 4 * shape.layers * tokens * shape.linears["q_proj"].outputs


# A GeForce multiprocessor computes as many FLOP per clock in fp32 as its tensor cores in tf32.
_GEFORCE_FP32 = 256


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """Peak rates of one GPU."""

    tflops: float  # TFLOP/s (1e12) of dense matrices in `half`, accumulated in fp32
    source: str  # where that figure is from
    fp32_tflops: float | None = None  # outside the tensor cores; None if unknown, likewise the others
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


def peak_of(gpu_name: str) -> Peak | None:
    """The peak of a GPU by the name that NVML, or torch for AMD, reports; None if unknown.

    MIG slices, mobile GPUs and versions with another power limit have names of their own, and no peak here.
    """
    # Older drivers omit the vendor's name.
    return _PEAKS.get(gpu_name.strip().removeprefix("NVIDIA "))


def mean_peak(gpu_names: Collection[str], dtype: str) -> tuple[float | None, str]:
    """Mean TFLOP/s of the workers' GPUs in a precision, with its description; None with the reason.

    Args:
        gpu_names: one per worker.
        dtype: `fp32`, `tf32`, `fp16` or `bf16`; peaks in other types are unknown.
    """
    peaks, counts = dict[str, tuple[float, str]](), Counter(name.strip() for name in gpu_names)
    for name in counts:
        peak = peak_of(name)
        tflops, source = peak.in_precision(dtype) if peak is not None else (None, "")
        if tflops is None:
            return None, f"the peak of {name} in {dtype} is unknown"
        peaks[name] = tflops, source
    if not peaks:
        return None, "no worker uses a GPU"
    mean = sum(tflops * counts[name] for name, (tflops, _) in peaks.items()) / counts.total()
    mixed = ", ".join(f"{count} x {name}" for name, count in counts.items())
    source = f"mean of {mixed}" if len(peaks) > 1 else next(source for _, source in peaks.values())
    summed = "" if dtype == "fp32" else " with fp32 accumulation"
    return mean, f"{mean:g} TFLOP/s per GPU, dense {dtype}{summed} ({source})"


def _geforce(tflops: float, multiprocessors: int, boost_ghz: float, whitepaper: str, memory_gb_per_s: float) -> Peak:
    """Tensor cores of a GeForce accumulate in fp32 at half rate: 512 FLOP per clock and multiprocessor."""
    made = f"{multiprocessors} multiprocessors x {{}} FLOP x {boost_ghz:g} GHz"
    fp32 = round(multiprocessors * _GEFORCE_FP32 * boost_ghz / 1000, 1)
    return Peak(
        tflops=tflops,
        source=f"NVIDIA {whitepaper} architecture; {made.format(2 * _GEFORCE_FP32)}",
        fp32_tflops=fp32,
        tf32_tflops=fp32,
        memory_gb_per_s=memory_gb_per_s,
        others_source=f"NVIDIA {whitepaper} architecture; {made.format(_GEFORCE_FP32)}",
    )


def _data_sheet(
    tflops: float, sheet: str, note: str = "dense figure", others: tuple[float, float, float] | None = None
) -> Peak:
    fp32, tf32, memory = others or (None, None, None)
    return Peak(
        tflops=tflops,
        source=f"NVIDIA {sheet} data sheet, {note}",
        fp32_tflops=fp32,
        tf32_tflops=tf32,
        memory_gb_per_s=memory,
        others_source=f"NVIDIA {sheet} data sheet, without sparsity" if others else "",
    )


# Data sheets often print the figure with structured sparsity first, which dense training does not reach.
_HALVED = "half of the {} TFLOP/s with sparsity"


def _a100(memory_gb_per_s: float) -> Peak:
    return _data_sheet(312.0, "A100", others=(19.5, 156.0, memory_gb_per_s))


def _fp16_only(tflops: float, fp32: float, memory_gb_per_s: float, source: str) -> Peak:
    return Peak(
        tflops=tflops,
        source=source,
        fp32_tflops=fp32,
        memory_gb_per_s=memory_gb_per_s,
        others_source=source,
        half="fp16",
    )


def _rtx_pro(multiprocessors: int, boost_ghz: float, memory_gb_per_s: float) -> Peak:
    """Tensor cores of workstation Blackwell accumulate in fp32 at full rate: 1024 FLOP per clock and multiprocessor."""
    made = f"NVIDIA RTX PRO Blackwell architecture; {multiprocessors} multiprocessors x {{}} FLOP x {boost_ghz:g} GHz"
    tflops = multiprocessors * boost_ghz / 1000
    return Peak(
        tflops=round(tflops * 1024, 1),
        source=made.format(1024),
        fp32_tflops=round(tflops * 256, 1),
        tf32_tflops=round(tflops * 512, 1),
        memory_gb_per_s=memory_gb_per_s,
        others_source=made.format("256 or 512"),
    )


def _instinct(model: str, memory_gb_per_s: float) -> Peak:
    """AMD CDNA 3 with 304 compute units."""
    return Peak(
        tflops=1307.4,
        source=f"AMD Instinct {model} data sheet, without sparsity",
        fp32_tflops=163.4,
        tf32_tflops=653.7,
        memory_gb_per_s=memory_gb_per_s,
        others_source=f"AMD Instinct {model} data sheet, without sparsity; fp32 of vectors",
    )


_V100_SXM2 = _fp16_only(125.0, 15.7, 900.0, "NVIDIA V100 data sheet, SXM2")
_V100_PCIE = _fp16_only(112.0, 14.0, 900.0, "NVIDIA V100 data sheet, PCIe")
_H100_SXM = (67.0, 494.5, 3350.0)

_PEAKS = {
    "Tesla V100-SXM2-16GB": _V100_SXM2,
    "Tesla V100-SXM2-32GB": _V100_SXM2,
    "Tesla V100-PCIE-16GB": _V100_PCIE,
    "Tesla V100-PCIE-32GB": _V100_PCIE,
    "Tesla T4": _fp16_only(65.0, 8.1, 320.0, "NVIDIA Turing architecture, Tesla T4"),
    "GeForce RTX 2080 Ti": _fp16_only(
        53.8, 13.4, 616.0, "NVIDIA Turing architecture; 68 multiprocessors x 512 FLOP x 1.545 GHz"
    ),
    "GeForce RTX 3090": _geforce(71.2, 82, 1.695, "GA102", 936.0),
    "GeForce RTX 3090 Ti": _geforce(80.0, 84, 1.86, "GA102", 1008.0),
    "GeForce RTX 4080": _geforce(97.5, 76, 2.505, "Ada", 716.8),
    "GeForce RTX 4090": _geforce(165.2, 128, 2.52, "Ada", 1008.0),
    "GeForce RTX 4090 D": _geforce(147.1, 114, 2.52, "Ada", 1008.0),
    "GeForce RTX 5080": _geforce(112.6, 84, 2.617, "RTX Blackwell", 960.0),
    "GeForce RTX 5090": _geforce(209.5, 170, 2.407, "RTX Blackwell", 1792.0),
    "RTX 6000 Ada Generation": _data_sheet(364.2, "RTX 6000 Ada", _HALVED.format(728.5), (91.1, 182.1, 960.0)),
    "RTX A6000": _data_sheet(154.8, "RTX A6000", _HALVED.format(309.7), (38.7, 77.4, 768.0)),
    "RTX PRO 6000 Blackwell Workstation Edition": _rtx_pro(188, 2.617, 1792.0),
    "A10": _data_sheet(125.0, "A10", others=(31.2, 62.5, 600.0)),
    "A30": _data_sheet(165.0, "A30", others=(10.3, 82.0, 933.0)),
    "A40": _data_sheet(149.7, "A40", others=(37.4, 74.8, 696.0)),
    "L4": _data_sheet(121.0, "L4", _HALVED.format(242), (30.3, 60.0, 300.0)),
    "L20": _data_sheet(119.5, "L20", others=(59.8, 59.8, 864.0)),
    "L40": _data_sheet(181.05, "L40", others=(90.5, 90.5, 864.0)),
    "L40S": _data_sheet(362.05, "L40S", others=(91.6, 183.0, 864.0)),
    "A100-SXM4-40GB": _a100(1555.0),
    "A100-SXM4-80GB": _a100(2039.0),
    "A100-PCIE-40GB": _a100(1555.0),
    "A100 80GB PCIe": _a100(1935.0),
    # An A100 with slower links between GPUs.
    "A800-SXM4-80GB": _a100(2039.0),
    "A800 80GB PCIe": _a100(1935.0),
    "H100 80GB HBM3": _data_sheet(989.5, "H100", "SXM, " + _HALVED.format(1979), _H100_SXM),
    "H100 PCIe": _data_sheet(756.5, "H100", "PCIe, " + _HALVED.format(1513), (51.0, 378.0, 2000.0)),
    "H100 NVL": _data_sheet(835.5, "H100", "NVL, " + _HALVED.format(1671), (60.0, 417.5, 3900.0)),
    "H200": _data_sheet(989.5, "H200", "SXM, " + _HALVED.format(1979), (67.0, 494.5, 4800.0)),
    "H200 NVL": _data_sheet(835.5, "H200", "NVL, " + _HALVED.format(1671), (60.0, 417.5, 4800.0)),
    # H100s with slower links between GPUs.
    "H800": _data_sheet(989.5, "H800", "SXM, " + _HALVED.format(1979), _H100_SXM),
    "H800 PCIe": _data_sheet(756.5, "H800", "PCIe, " + _HALVED.format(1513), (51.0, 378.0, 2000.0)),
    "GH200 480GB": _data_sheet(989.5, "GH200", _HALVED.format(1979), (67.0, 494.5, 4000.0)),
    "H20": _data_sheet(148.0, "H20", others=(44.0, 74.0, 4000.0)),
    # The data sheets' other figures are rounded and for eight GPUs, or for a rack of 72.
    "B200": _data_sheet(2250.0, "HGX B200", _HALVED.format(4500)),
    "B300 SXM6 AC": _data_sheet(2250.0, "HGX B300", _HALVED.format(4500)),
    "GB200": _data_sheet(2500.0, "GB200 NVL72", _HALVED.format(5000)),
    "AMD Instinct MI300X": _instinct("MI300X", 5325.0),
    "AMD Instinct MI325X": _instinct("MI325X", 6000.0),
}
