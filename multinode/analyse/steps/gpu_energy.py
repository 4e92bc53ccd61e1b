"""GPU energy: what the GPUs of a run drew, and what a sample took of it. Pure.

Only where every GPU tells it: a sum of some of them would pass for the whole.
"""

from __future__ import annotations

import math

import msgspec

from multinode.analyse.steps.summary import Summary
from multinode.analyse.telemetry.gpus import GpuUse

__all__ = ["GpuEnergy", "energy_of"]

# Watts or joules that all GPUs of a run can have drawn.
_MOST = 1e12


class GpuEnergy(msgspec.Struct, frozen=True, kw_only=True):
    """Of all GPUs of a run together.

    Attributes:
        power_w: drawn while the steps that count ran.
        j_per_sample: energy of a sample, in J.
        reason: why one of them is None; else empty.
    """

    power_w: float | None = None
    j_per_sample: float | None = None
    reason: str = ""


def energy_of(summary: Summary, global_batch: int | None) -> GpuEnergy:
    """Power is NVML's, a GPU's median; energy its counter over the samples of the window, else power over samples/s.

    Args:
        summary: of the run.
        global_batch: samples of an optimizer step; None is unknown.
    """
    bare = next((node for node in summary.nodes if len(node.gpus) < max(1, len(node.ranks))), None)
    if bare is not None or not summary.nodes:
        where = f" of {bare.node}" if bare is not None else ""
        return GpuEnergy(
            reason=f"not every GPU{where} was sampled" if bare and bare.gpus else f"no GPU{where} was sampled"
        )
    gpus = [gpu for node in summary.nodes for gpu in node.gpus]
    power_w = _sum(gpus, "power_w")
    j_per_sample = _counted(_sum(gpus, "energy_j"), summary.steady_steps * (global_batch or 0))
    if j_per_sample is None and power_w is not None and summary.samples_per_s:
        j_per_sample = power_w / summary.samples_per_s
    reason = "" if power_w is not None and j_per_sample is not None else "not every GPU tells what it draws"
    return GpuEnergy(power_w=power_w, j_per_sample=j_per_sample, reason=reason)


def _counted(energy_j: float | None, samples: int) -> float | None:
    return energy_j / samples if energy_j is not None and samples > 0 else None


def _sum(gpus: list[GpuUse], field: str) -> float | None:
    told: list[float | None] = [getattr(gpu, field) for gpu in gpus]
    known = [value for value in told if value is not None and 0 <= value <= _MOST]
    return math.fsum(known) if len(known) == len(told) else None
