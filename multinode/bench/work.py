"""Tests of `bench`: names, FLOPs or bytes, and data sheets.

FLOPs as usual in publications: two for a multiply-add of a matrix product, nothing for the rest; full attention, causal
or not; a backward pass counts as two forward passes. Pure.
"""

from __future__ import annotations

import math

import msgspec

from multinode.job.flops import Peak, peak_of
from multinode.records.benchmark import DEVICE_DTYPES
from multinode.records.samples import SpeedSample

KINDS = {
    "matmul": "matrix products",
    "memory": "memory bandwidth",
    "bus": "transfers to the GPU",
    "layers": "transformer layers",
}
"""Kinds of tests that are judged together, in words."""
_LAYERS = {"bert": "BERT", "gpt2": "GPT-2", "t5_encoder": "T5 encoder", "t5_decoder": "T5 decoder"}
# Bytes moved, in multiples of a buffer, read and written. As in STREAM, write-allocate reads are not counted.
_MEMORY = {"copy": 2, "triad": 3}
_BUS = {"to_device": "to GPU", "from_device": "from GPU"}
_GIGA, _TERA = 1e9, 1e12
_BACKWARD = 3
# A multiply and an add.
_FLOP = 2
# Of no device that there will be.
_MOST_WORK = 1e24


class TestKey(msgspec.Struct, frozen=True, kw_only=True):
    """Identifies the timings of one test."""

    # Keeps pytest from collecting it as a test.
    __test__ = False

    kind: str  # of KINDS
    name: str  # in words: `4096`, `copy`, `BERT forward`; likewise `label`, with its type
    label: str
    dtype: str  # of DEVICE_DTYPES
    size: str = ""  # rows of the matrices; of a layer, batch and sequence: `16 x 512`; otherwise empty


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Amount of FLOPs or bytes per call; its rate has this unit, in `scale` of them."""

    amount: float
    unit: str
    scale: float


class Sheet(msgspec.Struct, frozen=True, kw_only=True):
    """The data sheet's maximum for a test, in the test's unit, or why it is unknown."""

    peak: float | None = None
    peak_source: str = ""
    peak_reason: str = ""


def key_of(sample: SpeedSample) -> TestKey | None:
    """The timed test; None if it was not requested, or its sizes are impossible."""
    if sample.dtype not in DEVICE_DTYPES or work_of(sample) is None:
        return None
    kind, name, size = "memory", sample.test, ""
    if sample.test == "matmul":
        kind, name, size = "matmul", str(sample.size), str(sample.size)
    elif sample.test in _LAYERS:
        way = "forward + backward" if sample.backward else "forward"
        kind, name, size = "layers", f"{_LAYERS[sample.test]} {way}", f"{sample.batch} x {sample.sequence}"
    elif sample.test in _BUS:
        kind, name = "bus", _BUS[sample.test]
    label = {"matmul": f"matmul {name} {sample.dtype}", "layers": f"{name} {sample.dtype}"}.get(kind, name)
    return TestKey(kind=kind, name=name, label=label, dtype=sample.dtype, size=size)


def work_of(sample: SpeedSample) -> Work | None:
    """The work of a call; None if unknown."""
    if sample.test == "matmul":
        # n x n by n x n: n multiply-adds per result.
        return _work(_FLOP * float(sample.size) ** 3 if sample.size else None, "TFLOP/s", _TERA)
    if sample.test in _LAYERS:
        return _work(_layer_flops(sample), "TFLOP/s", _TERA)
    parts = 1 if sample.test in _BUS else _MEMORY.get(sample.test)
    if parts is None or not sample.size or not sample.width_bytes:
        return None
    return _work(float(parts) * sample.size * sample.width_bytes, "GB/s", _GIGA)


def sheet_of(device: str, name: str | None, key: TestKey) -> Sheet:
    """The data sheet's figure for a test.

    Args:
        device: `cpu` or `cuda`.
        name: of the device.
        key: the test.
    """
    if key.kind == "bus":
        return Sheet(peak_reason="bus bandwidth depends on GPU, slot and CPU: no data sheet lists it")
    if device != "cuda":
        return Sheet(peak_reason="no CPU data sheets are available")
    peak = peak_of(name or "")
    if peak is None:
        return Sheet(peak_reason=f"no data sheet of {name or 'this GPU'} is available")
    figure, source = _figure(peak, key)
    return (
        Sheet(peak=figure, peak_source=source)
        if figure is not None
        else Sheet(peak_reason="its data sheet's figure is missing")
    )


def _figure(peak: Peak, key: TestKey) -> tuple[float | None, str]:
    if key.kind == "memory":
        return peak.memory_gb_per_s, peak.others_source
    return peak.in_precision(key.dtype)


def _layer_flops(sample: SpeedSample) -> float | None:
    """Multiply-adds per token: 4 h^2 for attention projections, 2 s h for scores and mixture, 2 h f for the rest."""
    sizes = (sample.batch, sample.sequence, sample.hidden, sample.feedforward, sample.attentions)
    if None in sizes:
        return None
    batch, sequence, hidden, feedforward, attentions = (float(size or 0) for size in sizes)
    by_token = attentions * (4 * hidden**2 + 2 * sequence * hidden) + 2 * hidden * feedforward
    return _FLOP * batch * sequence * by_token * (_BACKWARD if sample.backward else 1)


def _work(amount: float | None, unit: str, scale: float) -> Work | None:
    if amount is None or not math.isfinite(amount) or not 0 < amount <= _MOST_WORK:
        return None
    return Work(amount=amount, unit=unit, scale=scale)
