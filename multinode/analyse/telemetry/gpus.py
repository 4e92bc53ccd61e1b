"""GPU use: what each GPU of a node did while the steps that count ran, by NVML's samples. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

import msgspec

from multinode.analyse.run.observed import ObservedNode
from multinode.analyse.stats.counter_rates import Reading, Span, grown_in
from multinode.core.run.samples import GpuSample

__all__ = ["GpuUse", "use_of_gpus"]

_MOST_GPUS = 64
# An idle GPU takes its link down to the first generation; only one that computes shows what it has.
_UNDER_LOAD_PERCENT = 50
_MOST_LANES, _MOST_GEN = 64, 16
_LONGEST_REASON, _MOST_REASONS = 64, 16
# What a figure can be at all.
_BOUNDS = {
    "sm_percent": (0, 100),
    "memory_used_gib": (0, 1e5),
    "memory_total_gib": (0, 1e5),
    "power_w": (0, 1e5),
    "power_limit_w": (0, 1e5),
    "sm_clock_mhz": (0, 1e5),
    "sm_clock_max_mhz": (0, 1e5),
    "temperature_c": (-100, 250),
}


class GpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU; medians over the window unless the name says otherwise.

    Attributes:
        sm_percent: part of the time in which a kernel ran.
        peak_memory_gib: by all processes, of `memory_total_gib`.
        power_w: drawn, of `power_limit_w`.
        energy_j: drawn in the window; None where NVML does not count it.
        sm_clock_mhz: of `sm_clock_max_mhz`.
        temperature_c: the highest.
        pcie: as "gen 3 x8 of gen 4 x16", the lowest seen under load; None is unknown.
        pcie_reduced: whether it has fewer lanes than card and slot could have.
        throttle: part of the samples by reason.
    """

    index: int
    sm_percent: float | None = None
    peak_memory_gib: float | None = None
    memory_total_gib: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None
    sm_clock_mhz: float | None = None
    sm_clock_max_mhz: float | None = None
    temperature_c: float | None = None
    pcie: str | None = None
    pcie_reduced: bool = False
    throttle: dict[str, float] = {}


def use_of_gpus(node: ObservedNode, span: Span) -> tuple[tuple[GpuUse, ...], dict[str, str]]:
    """The GPUs that were sampled, by index; and what could not be said of which, with the reason.

    Args:
        node: what it recorded.
        span: of the steps that count.
    """
    gpus: dict[int, list[GpuSample]] = {}
    for sample in node.of(GpuSample):
        gpus.setdefault(sample.index, []).append(sample)
    missing: dict[str, str] = {}
    used = tuple(use for index in sorted(gpus)[:_MOST_GPUS] if (use := _use(gpus[index], span, missing)) is not None)
    return used, missing


def _use(samples: Sequence[GpuSample], span: Span, missing: dict[str, str]) -> GpuUse | None:
    name = f"gpu {samples[0].index}"
    within = [one for one in samples if span.start_ns <= one.mono_ns <= span.end_ns]
    if not within:
        missing[name] = "not sampled while the steps that count ran"
        return None
    figures = {field: _figures(within, field) for field in _BOUNDS}
    for field in _BOUNDS:
        if figures[field] is None:
            missing[f"{name} {field}"] = "what it says cannot be true"
    pcie, reduced = _pcie(within)
    return GpuUse(
        index=samples[0].index,
        sm_percent=_median(figures["sm_percent"]),
        peak_memory_gib=_highest(figures["memory_used_gib"]),
        memory_total_gib=_highest(figures["memory_total_gib"]),
        power_w=_median(figures["power_w"]),
        power_limit_w=_median(figures["power_limit_w"]),
        energy_j=_energy_j(samples, span, name, missing),
        sm_clock_mhz=_median(figures["sm_clock_mhz"]),
        sm_clock_max_mhz=_highest(figures["sm_clock_max_mhz"]),
        temperature_c=_highest(figures["temperature_c"]),
        pcie=pcie,
        pcie_reduced=reduced,
        throttle=_throttle(within),
    )


def _figures(samples: Sequence[GpuSample], field: str) -> list[float] | None:
    """What was told of it; None where some of that cannot be."""
    told = [value for one in samples if (value := getattr(one, field)) is not None]
    least, most = _BOUNDS[field]
    return told if all(least <= value <= most for value in told) else None


def _median(figures: list[float] | None) -> float | None:
    return statistics.median(figures) if figures else None


def _highest(figures: list[float] | None) -> float | None:
    return max(figures, default=None) if figures else None


def _energy_j(samples: Sequence[GpuSample], span: Span, name: str, missing: dict[str, str]) -> float | None:
    readings = [Reading(one.mono_ns, one.energy_j) for one in samples if one.energy_j is not None]
    if not readings:
        return None
    try:
        # Of the whole span, should sampling have begun or ended in it.
        return grown_in(readings, span).per_s * span.seconds
    except ValueError as error:
        missing[f"{name} energy_j"] = str(error)
        return None


def _pcie(samples: Sequence[GpuSample]) -> tuple[str | None, bool]:
    """The slowest link that was seen under load, in words, and whether lanes are missing."""
    told = [one for one in samples if _is_link(one.pcie_gen, one.pcie_width)]
    loaded = [one for one in told if one.sm_percent is not None and one.sm_percent >= _UNDER_LOAD_PERCENT]
    # A GPU without load may have put its link to sleep; one that does not tell its load is taken as it is.
    seen = loaded or [one for one in told if one.sm_percent is None]
    if not seen:
        return None, False
    # Each generation doubles the rate of a lane.
    slowest = min(seen, key=lambda one: (one.pcie_width or 0) * 2 ** (one.pcie_gen or 0))
    words = f"gen {slowest.pcie_gen} x{slowest.pcie_width}"
    if not _is_link(slowest.pcie_gen_max, slowest.pcie_width_max):
        return words, False
    reduced = (slowest.pcie_width or 0) < (slowest.pcie_width_max or 0)
    return f"{words} of gen {slowest.pcie_gen_max} x{slowest.pcie_width_max}", reduced


def _is_link(gen: int | None, width: int | None) -> bool:
    return gen is not None and width is not None and 1 <= gen <= _MOST_GEN and 1 <= width <= _MOST_LANES


def _throttle(samples: Sequence[GpuSample]) -> dict[str, float]:
    """Part of the samples by reason, the most frequent first."""
    reasons = Counter(
        reason
        for one in samples
        for reason in set(one.throttle)
        if reason.isprintable() and len(reason) <= _LONGEST_REASON
    )
    return {
        reason: count / len(samples)
        for reason, count in sorted(reasons.items(), key=lambda item: (-item[1], item[0]))[:_MOST_REASONS]
    }
