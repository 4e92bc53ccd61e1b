"""Peak FLOPs: what a GPU's tensor cores can do at the most, by the name that NVML gives it.

One kind of peak alone: dense matrices in bf16 (fp16 has the same), summed in fp32, at the boost clock. Of a GPU that
the table does not have nothing is said: a guessed denominator makes a guessed MFU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

import msgspec

__all__ = ["Peak", "mean_peak", "peak_of"]


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """The peak of one GPU.

    Attributes:
        tflops: TFLOP/s (1e12) of dense bf16 matrices, summed in fp32.
        source: where that figure is from.
    """

    tflops: float
    source: str

    @property
    def denominator(self) -> str:
        """The figure in words, to stand beside every share of it."""
        return f"{self.tflops:g} TFLOP/s a GPU, dense bf16 with fp32 accumulation ({self.source})"


def peak_of(gpu_name: str) -> Peak | None:
    """The peak of the GPU that NVML calls so; None where it is not known.

    A part of a GPU (MIG), a mobile GPU and one with another power limit have names of their own, and no peak here.
    """
    # Older drivers leave the maker's name out.
    return _PEAKS.get(gpu_name.strip().removeprefix("NVIDIA "))


def mean_peak(gpu_names: Sequence[str]) -> Peak | None:
    """The mean peak of the workers' GPUs, one name a worker; None without workers or where one of them is not known."""
    peaks = [peak for name in gpu_names if (peak := peak_of(name)) is not None]
    if not peaks or len(peaks) < len(gpu_names):
        return None
    counts = Counter(name.strip() for name in gpu_names)
    if len(counts) == 1:
        return peaks[0]
    mixed = ", ".join(f"{count} x {name}" for name, count in counts.items())
    return Peak(tflops=fmean(peak.tflops for peak in peaks), source=f"mean of {mixed}")


def _geforce(tflops: float, multiprocessors: int, boost_ghz: float, whitepaper: str) -> Peak:
    """Of a GeForce: its tensor cores sum in fp32 at half their rate, 512 FLOP a clock and multiprocessor."""
    made = f"{multiprocessors} multiprocessors x 512 FLOP x {boost_ghz:g} GHz"
    return Peak(tflops=tflops, source=f"NVIDIA {whitepaper} architecture; {made}")


def _data_sheet(tflops: float, sheet: str, note: str = "dense figure") -> Peak:
    return Peak(tflops=tflops, source=f"NVIDIA {sheet} data sheet, {note}")


# What data sheets print first is often with structured sparsity, which no training of dense weights has.
_HALVED = "half of the {} TFLOP/s that it gives with sparsity"

_A100 = _data_sheet(312.0, "A100")
_H100_SXM = _data_sheet(989.5, "H100", "SXM, " + _HALVED.format(1979))

_PEAKS = {
    "GeForce RTX 3090": _geforce(71.2, 82, 1.695, "GA102"),
    "GeForce RTX 3090 Ti": _geforce(80.0, 84, 1.86, "GA102"),
    "GeForce RTX 4080": _geforce(97.5, 76, 2.505, "Ada"),
    "GeForce RTX 4090": _geforce(165.2, 128, 2.52, "Ada"),
    "GeForce RTX 4090 D": _geforce(147.1, 114, 2.52, "Ada"),
    "GeForce RTX 5080": _geforce(112.6, 84, 2.617, "RTX Blackwell"),
    "GeForce RTX 5090": _geforce(209.5, 170, 2.407, "RTX Blackwell"),
    "RTX 6000 Ada Generation": _data_sheet(364.2, "RTX 6000 Ada", _HALVED.format(728.5)),
    "RTX A6000": _data_sheet(154.8, "RTX A6000", _HALVED.format(309.7)),
    "A30": _data_sheet(165.0, "A30"),
    "A40": _data_sheet(149.7, "A40"),
    "L4": _data_sheet(121.0, "L4", _HALVED.format(242)),
    "L40": _data_sheet(181.05, "L40"),
    "L40S": _data_sheet(362.05, "L40S"),
    # The same chip at the same clock, whatever its memory and its socket.
    "A100-SXM4-40GB": _A100,
    "A100-SXM4-80GB": _A100,
    "A100-PCIE-40GB": _A100,
    "A100 80GB PCIe": _A100,
    "H100 80GB HBM3": _H100_SXM,
    "H100 PCIe": _data_sheet(756.5, "H100", "PCIe, " + _HALVED.format(1513)),
    "H100 NVL": _data_sheet(835.5, "H100", "NVL, " + _HALVED.format(1671)),
    "H200": _data_sheet(989.5, "H200", "SXM, " + _HALVED.format(1979)),
    "H200 NVL": _data_sheet(835.5, "H200", "NVL, " + _HALVED.format(1671)),
    "B200": _data_sheet(2250.0, "HGX B200", _HALVED.format(4500)),
}
