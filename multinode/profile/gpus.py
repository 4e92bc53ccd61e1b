"""GPU use: what each GPU of a node did while the measured steps ran, by NVML's samples. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import msgspec

from multinode.profile.observed import ObservedNode
from multinode.records.samples import GpuSample
from multinode.stats.counter_rates import Reading, Span, grown_in
from multinode.stats.spread import known_max, known_median
from multinode.stats.unknown import attempt

_MOST_GPUS = 64
# An idle GPU takes its link down to the first generation; only one that computes shows what it has.
_UNDER_LOAD_PERCENT = 50
_MOST_LANES, _MOST_GEN = 64, 16
_LONGEST_REASON, _MOST_REASONS = 64, 16
_LINK = re.compile(r"gen (\d{1,2}) x(\d{1,2})")


class GpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU; medians over the window unless the name says otherwise.

    Attributes:
        sm_percent: part of the time in which a kernel ran.
        peak_memory_gib: by all processes, of `memory_total_gib`.
        power_w: drawn, of `power_limit_w`.
        energy_j: drawn in the measured steps; None where NVML does not count it.
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

    def is_narrower(self, other: GpuUse) -> bool:
        """Whether its link is slower than the other's, which has all its lanes; each generation is twice as fast."""
        return self.pcie_reduced or 0 < _link_rate(self.pcie) < _link_rate(other.pcie)


def use_of_gpus(node: ObservedNode, span: Span, measured_s: float) -> tuple[tuple[GpuUse, ...], dict[str, str]]:
    """The GPUs that were sampled, by index; and what could not be said of which, with the reason.

    Args:
        node: what it recorded.
        span: from the first of the measured steps to the last.
        measured_s: that the measured steps took; of a long run only some of those in the span are read.
    """
    gpus: dict[int, list[GpuSample]] = {}
    for sample in node.of(GpuSample):
        gpus.setdefault(sample.index, []).append(sample)
    missing: dict[str, str] = {}
    used = tuple(
        use for index in sorted(gpus)[:_MOST_GPUS] if (use := _use(gpus[index], span, measured_s, missing)) is not None
    )
    return used, missing


def _use(samples: Sequence[GpuSample], span: Span, measured_s: float, missing: dict[str, str]) -> GpuUse | None:
    name = f"gpu {samples[0].index}"
    within = [one for one in samples if span.start_ns <= one.mono_ns <= span.end_ns]
    if not within:
        missing[name] = "not sampled while the measured steps ran"
        return None
    pcie, reduced = _pcie(within)
    return GpuUse(
        index=samples[0].index,
        sm_percent=known_median(one.sm_percent for one in within),
        peak_memory_gib=known_max(one.memory_used_gib for one in within),
        memory_total_gib=known_max(one.memory_total_gib for one in within),
        power_w=known_median(one.power_w for one in within),
        power_limit_w=known_median(one.power_limit_w for one in within),
        energy_j=_energy_j(samples, span, measured_s, f"{name} energy_j", missing),
        sm_clock_mhz=known_median(one.sm_clock_mhz for one in within),
        sm_clock_max_mhz=known_max(one.sm_clock_max_mhz for one in within),
        temperature_c=known_max(one.temperature_c for one in within),
        pcie=pcie,
        pcie_reduced=reduced,
        throttle=_throttle(within),
    )


def _energy_j(
    samples: Sequence[GpuSample], span: Span, measured_s: float, name: str, missing: dict[str, str]
) -> float | None:
    readings = [Reading(one.mono_ns, one.energy_j) for one in samples if one.energy_j is not None]
    if not readings:
        return None
    # Of all measured steps, should sampling have begun or ended among them.
    return attempt(missing, name, lambda: grown_in(readings, span).per_s * measured_s)


def _pcie(samples: Sequence[GpuSample]) -> tuple[str | None, bool]:
    """The slowest link that was seen under load, in words, and whether lanes are missing."""
    told = [one for one in samples if _is_link(one.pcie_gen, one.pcie_width)]
    loaded = [one for one in told if one.sm_percent is not None and one.sm_percent >= _UNDER_LOAD_PERCENT]
    # A GPU without load may have put its link to sleep; one that does not tell its load is taken as it is.
    seen = loaded or [one for one in told if one.sm_percent is None]
    if not seen:
        return None, False
    slowest = min(seen, key=lambda one: (one.pcie_width or 0) << (one.pcie_gen or 0))
    words = f"gen {slowest.pcie_gen} x{slowest.pcie_width}"
    if not _is_link(slowest.pcie_gen_max, slowest.pcie_width_max):
        return words, False
    reduced = (slowest.pcie_width or 0) < (slowest.pcie_width_max or 0)
    return f"{words} of gen {slowest.pcie_gen_max} x{slowest.pcie_width_max}", reduced


def _link_rate(words: str | None) -> int:
    """Of `gen 3 x8 of ...`; 0 is unknown."""
    found = _LINK.match(words or "")
    return int(found[2]) << int(found[1]) if found else 0


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
