"""Use of each node's NICs, processors, memory and GPUs during the measured steps. Pure.

NICs are in `nics`. Unknown values are None, with the reason in `missing`.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial

import msgspec

from multinode.profile.nics import NicUse, use_of_nics
from multinode.profile.observed import Observed, ObservedNode
from multinode.records.samples import CgroupSample, CpuSample, GpuSample, NoteSample, StepSample, TcpSample
from multinode.stats.counter_rates import Reading, Span, grown_in, in_whole
from multinode.stats.estimate import attempt, known_max, known_median
from multinode.stats.unknown import UnknownError
from multinode.units import GIB

_MOST_GPUS = 64
# An idle GPU reduces its link to the first generation; only a busy one shows its full rate.
_UNDER_LOAD_PERCENT = 50
_MOST_LANES, _MOST_GEN = 64, 16
_LONGEST_REASON, _MOST_REASONS = 64, 16
_DIVIDED = "sm_percent, memory, power and energy"
_LINK = re.compile(r"gen (\d{1,2}) x(\d{1,2})")


class GpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU; medians over the window unless stated otherwise."""

    index: int
    mig: bool = False  # whether MIG divides it; what NVML counts for all of its parts is unknown then
    sm_percent: float | None = None  # fraction of time in which a kernel ran
    peak_memory_gib: float | None = None  # of all processes, of `memory_total_gib`
    memory_total_gib: float | None = None
    power_w: float | None = None  # of `power_limit_w`
    power_limit_w: float | None = None
    energy_j: float | None = None  # in the measured steps; None if NVML does not count it
    sm_clock_mhz: float | None = None  # of `sm_clock_max_mhz`
    sm_clock_max_mhz: float | None = None
    temperature_c: float | None = None  # maximum
    pcie: str | None = None  # as "gen 3 x8 of gen 4 x16", the lowest under load; None if unknown
    pcie_reduced: bool = False  # whether it has fewer lanes than GPU and slot support
    throttle: dict[str, float] = {}  # fraction of the samples by reason

    def is_narrower(self, other: GpuUse) -> bool:
        """Whether its link is slower than the other's, which has all its lanes; each generation is twice as fast."""
        return self.pcie_reduced or 0 < _link_rate(self.pcie) < _link_rate(other.pcie)


def use_of_gpus(node: ObservedNode, span: Span, measured_s: float) -> tuple[tuple[GpuUse, ...], dict[str, str]]:
    """The sampled GPUs by index; and missing figures with the reason.

    Args:
        node: its records.
        span: from the first to the last measured step.
        measured_s: total time of the measured steps; for a long run only some in the span are read.
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
    within = [sample for sample in samples if span.start_ns <= sample.mono_ns <= span.end_ns]
    if not within:
        missing[name] = _UNSAMPLED
        return None
    if any(sample.mig for sample in within):
        missing[f"{name} {_DIVIDED}"] = "MIG divides it, and NVML counts all of its parts together"
    pcie, reduced = _pcie(within)
    return GpuUse(
        index=samples[0].index,
        mig=any(sample.mig for sample in within),
        sm_percent=known_median(sample.sm_percent for sample in within),
        peak_memory_gib=known_max(sample.memory_used_gib for sample in within),
        memory_total_gib=known_max(sample.memory_total_gib for sample in within),
        power_w=known_median(sample.power_w for sample in within),
        power_limit_w=known_median(sample.power_limit_w for sample in within),
        energy_j=_energy_j(samples, span, measured_s, f"{name} energy_j", missing),
        sm_clock_mhz=known_median(sample.sm_clock_mhz for sample in within),
        sm_clock_max_mhz=known_max(sample.sm_clock_max_mhz for sample in within),
        temperature_c=known_max(sample.temperature_c for sample in within),
        pcie=pcie,
        pcie_reduced=reduced,
        throttle=_throttle(within),
    )


def _energy_j(
    samples: Sequence[GpuSample], span: Span, measured_s: float, name: str, missing: dict[str, str]
) -> float | None:
    readings = [Reading(sample.mono_ns, sample.energy_j) for sample in samples if sample.energy_j is not None]
    if not readings:
        return None
    # Scaled to all measured steps if sampling started or ended among them.
    return attempt(missing, name, lambda: grown_in(readings, span).per_s * measured_s)


def _pcie(samples: Sequence[GpuSample]) -> tuple[str | None, bool]:
    linked = [sample for sample in samples if _is_link(sample.pcie_gen, sample.pcie_width)]
    loaded = [sample for sample in linked if sample.sm_percent is not None and sample.sm_percent >= _UNDER_LOAD_PERCENT]
    # An idle GPU may reduce its link; one with unknown load is used as it is.
    seen = loaded or [sample for sample in linked if sample.sm_percent is None]
    if not seen:
        return None, False
    slowest = min(seen, key=lambda sample: (sample.pcie_width or 0) << (sample.pcie_gen or 0))
    words = f"gen {slowest.pcie_gen} x{slowest.pcie_width}"
    if not _is_link(slowest.pcie_gen_max, slowest.pcie_width_max):
        return words, False
    reduced = (slowest.pcie_width or 0) < (slowest.pcie_width_max or 0)
    return f"{words} of gen {slowest.pcie_gen_max} x{slowest.pcie_width_max}", reduced


def _link_rate(words: str | None) -> int:
    """The rate of `gen 3 x8 of ...`; 0 if unknown."""
    match = _LINK.match(words or "")
    return int(match[2]) << int(match[1]) if match else 0


def _is_link(gen: int | None, width: int | None) -> bool:
    return gen is not None and width is not None and 1 <= gen <= _MOST_GEN and 1 <= width <= _MOST_LANES


def _throttle(samples: Sequence[GpuSample]) -> dict[str, float]:
    reasons = Counter(
        reason
        for sample in samples
        for reason in set(sample.throttle)
        if reason.isprintable() and len(reason) <= _LONGEST_REASON
    )
    return {
        reason: count / len(samples)
        for reason, count in sorted(reasons.items(), key=lambda item: (-item[1], item[0]))[:_MOST_REASONS]
    }


_US_PER_S = 1e6
_LONGEST_NOTE = 200
# The figure that a kind of samples gives.
_FIGURE_OF = {"gpus": "gpus", "cgroup": "quota_cores"}
# Fields of NodeUse that are means, and those of CpuSample.
_MEANS = {
    "cpu_busy_percent": "busy_percent",
    "cpu_iowait_percent": "iowait_percent",
    "cpu_steal_percent": "steal_percent",
    "job_cores": "job_cores",
}
_UNSAMPLED = "not sampled while the measured steps ran"


class NodeUse(msgspec.Struct, frozen=True, kw_only=True):
    """One node during the measured steps."""

    node: str
    node_rank: int
    ranks: tuple[int, ...]
    nics: tuple[NicUse, ...] = ()  # the sampled NICs
    gpus: tuple[GpuUse, ...] = ()
    cpu_busy_percent: float | None = None  # of all cores, mean; likewise `cpu_iowait_percent`, `cpu_steal_percent`
    cpu_iowait_percent: float | None = None
    cpu_steal_percent: float | None = None
    job_cores: float | None = None  # cores used by the job, mean
    quota_cores: float | None = None  # processors that its cgroup allows; None if unlimited or unknown
    throttled_share: float | None = None  # fraction of the window in which the cgroup was throttled; None if unknown
    memory_available_gib: float | None = None  # minimum
    retransmitted_share: float | None = None  # of the TCP segments sent in the whole run; None if unknown
    peak_worker_memory_gib: dict[int, float] = {}  # by rank, allocated on its GPU, otherwise resident in its process
    peak_worker_reserved_gib: dict[int, float] = {}  # by rank, reserved on its GPU by torch's allocator
    missing: dict[str, str] = {}  # reason by name of unsampled figures


def use_of(node: ObservedNode, observed: Observed) -> NodeUse:
    """The node's use from the end of its warm-up to the end of its last measured step, by its own clock.

    Args:
        node: its records.
        observed: the run, with the measured steps.
    """
    missing: dict[str, str] = {}
    span = attempt(missing, "window", lambda: _span(node, observed))
    nics, why_no_rates = use_of_nics(node, span)
    gpus, why_no_gpus = use_of_gpus(node, span, _measured_s(observed)) if span is not None else ((), {})
    missing = why_no_rates | missing | why_no_gpus
    figures = figures_in(node, span, missing) if span is not None else {}
    figures["retransmitted_share"] = attempt(missing, "retransmitted_share", lambda: _retransmitted(node.of(TcpSample)))
    _add_notes(missing, node)
    return NodeUse(
        node=node.name,
        node_rank=node.node_rank,
        ranks=node.ranks,
        nics=nics,
        gpus=gpus,
        peak_worker_memory_gib=_worker_memory_gib(node, "peak_memory_bytes"),
        peak_worker_reserved_gib=_worker_memory_gib(node, "peak_reserved_bytes"),
        missing=missing,
        **figures,
    )


def figures_in(node: ObservedNode, span: Span, missing: dict[str, str]) -> dict[str, float | None]:
    """Means in the span, by the names of NodeUse's fields."""
    processors = sorted(node.of(CpuSample), key=lambda sample: sample.mono_ns)
    limits = sorted(
        (sample for sample in node.of(CgroupSample) if sample.mono_ns <= span.end_ns), key=lambda sample: sample.mono_ns
    )
    means = {name: attempt(missing, name, partial(_mean, processors, field, span)) for name, field in _MEANS.items()}
    within = [sample.memory_available_gib for sample in processors if span.start_ns <= sample.mono_ns <= span.end_ns]
    means["memory_available_gib"] = min((gib for gib in within if gib is not None), default=None)
    if means["memory_available_gib"] is None:
        missing["memory_available_gib"] = _UNSAMPLED
    means["quota_cores"] = limits[-1].quota_cores if limits else None
    if means["quota_cores"] is None:
        # Without a limit there is no throttling.
        missing["quota_cores"] = "its cgroup has no limit" if limits else _UNSAMPLED
    else:
        means["throttled_share"] = attempt(missing, "throttled_share", lambda: _throttled_share(limits, span))
    return means


def _throttled_share(limits: Iterable[CgroupSample], span: Span) -> float:
    """Fraction of a span in which a cgroup was throttled.

    The kernel adds up the time of all waiting processors, which can exceed the elapsed time.
    """
    return min(
        1.0, grown_in([Reading(sample.mono_ns, sample.throttled_us) for sample in limits], span).per_s / _US_PER_S
    )


def _span(node: ObservedNode, observed: Observed) -> Span:
    own = [number for number in observed.counted if _ends(node, observed.steps[number])]
    if not own:
        raise UnknownError("none of its workers recorded a measured step")
    before = max((number for number in observed.steps if number < observed.counted[0]), default=None)
    begins = _ends(node, observed.steps[before]) if before is not None else []
    # Without a recorded warm-up, the start of the first step of the node's workers.
    start_ns = max(begins, default=None) if begins else _begin_of(node, observed.steps[own[0]])
    if start_ns is None:
        raise UnknownError(f"the start of step {own[0]}, the first measured one, is unknown")
    end_ns = max(_ends(node, observed.steps[own[-1]]))
    if not 0 <= start_ns < end_ns:
        raise UnknownError(f"its clock times up to step {own[-1]} are implausible")
    return Span(start_ns=start_ns, end_ns=end_ns)


def _measured_s(observed: Observed) -> float:
    times = (
        [times_us.step_time_us for times_us in step.values() if times_us.step_time_us]
        for step in observed.counted_steps
    )
    return sum(statistics.median(times_us) for times_us in times if times_us) / _US_PER_S


def _ends(node: ObservedNode, workers: dict[int, StepSample]) -> list[int]:
    return [worker.mono_ns for rank, worker in workers.items() if rank in node.ranks]


def _begin_of(node: ObservedNode, workers: dict[int, StepSample]) -> int | None:
    return min(
        (
            worker.mono_ns - round(worker.step_time_us * 1000)
            for rank, worker in workers.items()
            if rank in node.ranks and worker.step_time_us is not None
        ),
        default=None,
    )


def _mean(samples: Iterable[CpuSample], field: str, span: Span) -> float:
    weighed, seconds, since_ns = 0.0, 0.0, None
    for sample in samples:
        value = getattr(sample, field)
        since_ns = sample.mono_ns if since_ns is None else since_ns
        if value is not None:
            overlap_s = span.overlap_s(since_ns, sample.mono_ns)
            weighed += value * overlap_s
            seconds += overlap_s
            since_ns = sample.mono_ns
    if not seconds:
        raise UnknownError(_UNSAMPLED)
    return weighed / seconds


def _retransmitted(samples: list[TcpSample]) -> float:
    """In the whole run. The kernel's sent segments (RFC 4022, tcpOutSegs) exclude retransmissions."""
    sent = in_whole(Reading(sample.mono_ns, sample.sent_segments) for sample in samples)
    again = in_whole(Reading(sample.mono_ns, sample.retransmitted_segments) for sample in samples)
    if not sent + again:
        raise UnknownError("nothing was sent")
    return again / (sent + again)


def _add_notes(missing: dict[str, str], node: ObservedNode) -> None:
    if not node.of(GpuSample):
        missing.setdefault("gpus", "no GPU was sampled")
    for note in node.of(NoteSample):
        name = _FIGURE_OF.get(note.lacks)
        if name in missing and note.rank is None:
            missing[name] = note.message[:_LONGEST_NOTE]


def _worker_memory_gib(node: ObservedNode, field: str) -> dict[int, float]:
    peaks: dict[int, float] = {}
    for step in node.of(StepSample):
        peak_bytes = getattr(step, field)
        if step.rank in node.ranks and peak_bytes is not None:
            peaks[step.rank] = max(peaks.get(step.rank, 0.0), peak_bytes / GIB)
    return dict(sorted(peaks.items()))
