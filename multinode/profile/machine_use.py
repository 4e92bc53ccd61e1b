"""Use of each node's NICs, processors, memory and GPUs during the measured steps. Pure.

NICs are in `nics`.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from multinode.figures.figure import Figure, Row
from multinode.profile.figures import NOTES, FigureNote
from multinode.profile.nics import NicUse, use_of_nics
from multinode.profile.observed import Observed, ObservedNode
from multinode.records.samples import CgroupSample, CpuSample, GpuSample, NoteSample, StepSample, TcpSample
from multinode.render.sheet import percent
from multinode.stats.counter_rates import Reading, Span, grown_in, in_whole
from multinode.stats.estimate import known_max, known_median
from multinode.stats.unknown import UNMEASURED, Unknown, UnknownError, found, known, or_none, or_unknown
from multinode.units import GIB, UNKNOWN

_MOST_GPUS = 64
# An idle GPU reduces its link to the first generation; only a busy one shows its full rate.
_UNDER_LOAD_PERCENT = 50
_MOST_LANES, _MOST_GEN = 64, 16
_LONGEST_REASON, _MOST_REASONS = 64, 16
_LINK = re.compile(r"gen (\d{1,2}) x(\d{1,2})")


DIVIDED = Unknown("the GPU is divided by MIG, and NVML counts all of its parts together")
"""The use of a GPU that MIG divides."""


class GpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU; medians over the window unless stated otherwise."""

    index: int
    mig: bool = False  # whether MIG divides it; what NVML counts for all of its parts is `DIVIDED` then
    sm_percent: float | Unknown = UNMEASURED  # fraction of time in which a kernel ran
    peak_memory_gib: float | Unknown = UNMEASURED  # of all processes, of `memory_total_gib`
    memory_total_gib: float | None = None
    power_w: float | Unknown = UNMEASURED  # of `power_limit_w`
    power_limit_w: float | None = None
    energy_j: float | Unknown = UNMEASURED  # in the measured steps
    sm_clock_mhz: float | None = None  # of `sm_clock_max_mhz`
    sm_clock_max_mhz: float | None = None
    temperature_c: float | None = None  # maximum
    pcie: str | None = None  # as "gen 3 x8 of gen 4 x16", the lowest under load; None if unknown
    pcie_reduced: bool = False  # whether it has fewer lanes than GPU and slot support
    throttle: dict[str, float] = {}  # fraction of the samples by reason

    def is_narrower(self, other: GpuUse) -> bool:
        """Whether its link is slower than the other's, which has all its lanes; each generation is twice as fast."""
        return self.pcie_reduced or 0 < _link_rate(self.pcie) < _link_rate(other.pcie)


def _of(value: float | Unknown | None, whole: float | None, form: str = ".0f") -> str:
    """A value of what there is: `12.1/24.0`."""
    if value is None or isinstance(value, Unknown):
        return UNKNOWN
    return f"{value:{form}}" if whole is None else f"{value:{form}}/{whole:{form}}"


GPU_INDEX = Figure[int]("index", "GPU", form="number", about="index of the GPU")
GPU_SM = Figure[float](
    "sm_percent", "SM", "%", form="whole", about="percentage of the time in which a kernel ran on the GPU"
)
GPU_MEMORY = Figure[float](
    "peak_memory_gib",
    "memory",
    "GiB",
    form="tenths",
    about="peak memory in use on the GPU",
    cell=lambda row: _of(row.item.peak_memory_gib, row.item.memory_total_gib, ".1f"),
)
GPU_POWER = Figure[float](
    "power_w",
    "power",
    "W",
    form="whole",
    about="power draw of the GPU",
    cell=lambda row: _of(row.item.power_w, row.item.power_limit_w),
)
GPU_CLOCK = Figure[float](
    "sm_clock_mhz",
    "clock",
    "MHz",
    form="whole",
    about="clock of the SMs",
    cell=lambda row: _of(row.item.sm_clock_mhz, row.item.sm_clock_max_mhz),
)
GPU_TEMPERATURE = Figure[float]("temperature_c", "temp", "C", form="whole", about="temperature of the GPU")
GPU_PCIE = Figure[str](
    "pcie",
    "PCIe",
    about="narrowest PCIe link of the GPU under load",
    cell=lambda row: (row.item.pcie or UNKNOWN) + (" (reduced)" if row.item.pcie_reduced else ""),
)
GPU_THROTTLE = Figure[str](
    "throttle",
    "throttled by",
    about="reasons for reduced GPU clocks, each with its share of the samples",
    cell=lambda row: ", ".join(f"{name} {share:.0%}" for name, share in row.item.throttle.items()) or UNKNOWN,
)
GPU_FIGURES: tuple[Figure[Any], ...] = (
    *(GPU_INDEX, GPU_SM, GPU_MEMORY, GPU_POWER, GPU_CLOCK, GPU_TEMPERATURE, GPU_PCIE, GPU_THROTTLE),
)
"""Of a GPU, in tables; the measured ones are exported."""


def use_of_gpus(node: ObservedNode, span: Span, measured_s: float) -> tuple[tuple[GpuUse, ...], tuple[FigureNote, ...]]:
    """The GPUs sampled in the span, by index; and a note for each other one.

    Args:
        node: its records.
        span: from the first to the last measured step.
        measured_s: total time of the measured steps; for a long run only some in the span are read.
    """
    gpus: dict[int, list[GpuSample]] = {}
    for sample in node.of(GpuSample):
        gpus.setdefault(sample.index, []).append(sample)
    used = {index: _use(gpus[index], span, measured_s) for index in sorted(gpus)[:_MOST_GPUS]}
    idle = [index for index, use in used.items() if use is None]
    notes = (FigureNote(**_GPU.fields(node.name, {"gpu": index}), concerns=f"gpu {index}") for index in idle)
    return tuple(use for use in used.values() if use is not None), tuple(notes)


def _use(samples: Sequence[GpuSample], span: Span, measured_s: float) -> GpuUse | None:
    within = [sample for sample in samples if span.start_ns <= sample.mono_ns <= span.end_ns]
    if not within:
        return None
    mig = any(sample.mig for sample in within)
    why = DIVIDED.reason if mig else UNMEASURED.reason
    pcie, reduced = _pcie(within)
    return GpuUse(
        index=samples[0].index,
        mig=mig,
        sm_percent=or_unknown(known_median(sample.sm_percent for sample in within), why),
        peak_memory_gib=or_unknown(known_max(sample.memory_used_gib for sample in within), why),
        memory_total_gib=known_max(sample.memory_total_gib for sample in within),
        power_w=or_unknown(known_median(sample.power_w for sample in within), why),
        power_limit_w=known_median(sample.power_limit_w for sample in within),
        energy_j=_energy_j(samples, span, measured_s, why),
        sm_clock_mhz=known_median(sample.sm_clock_mhz for sample in within),
        sm_clock_max_mhz=known_max(sample.sm_clock_max_mhz for sample in within),
        temperature_c=known_max(sample.temperature_c for sample in within),
        pcie=pcie,
        pcie_reduced=reduced,
        throttle=_throttle(within),
    )


def _energy_j(samples: Sequence[GpuSample], span: Span, measured_s: float, why: str) -> float | Unknown:
    readings = [Reading(sample.mono_ns, sample.energy_j) for sample in samples if sample.energy_j is not None]
    # Scaled to all measured steps if sampling started or ended among them.
    return found(lambda: grown_in(readings, span).per_s * measured_s) if readings else Unknown(why)


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
# Fields of NodeUse that are means, and those of CpuSample.
_MEANS = {
    "cpu_busy_percent": "busy_percent",
    "cpu_iowait_percent": "iowait_percent",
    "cpu_steal_percent": "steal_percent",
    "job_cores": "job_cores",
}
_UNSAMPLED = "not sampled while the measured steps ran"
_GPU = NOTES.rule("gpu-not-sampled", about="a GPU that was not sampled", message=_UNSAMPLED, figures=("gpu",))
_GPUS = NOTES.rule("gpus-not-sampled", about="a node whose GPUs were not sampled", message="no GPU was sampled")
_WHY = NOTES.rule("gpus-unread", about="why a node cannot sample its GPUs", message="{reason}", figures=("reason",))


class NodeUse(msgspec.Struct, frozen=True, kw_only=True):
    """One node during the measured steps."""

    node: str
    node_rank: int
    ranks: tuple[int, ...]
    nics: tuple[NicUse, ...] = ()  # the sampled NICs
    gpus: tuple[GpuUse, ...] = ()
    window_s: float | Unknown = UNMEASURED  # from the start of its first to the end of its last measured step
    # of all cores, mean over the window; also `cpu_iowait_percent`, `cpu_steal_percent`
    cpu_busy_percent: float | Unknown = UNMEASURED
    cpu_iowait_percent: float | Unknown = UNMEASURED
    cpu_steal_percent: float | Unknown = UNMEASURED
    job_cores: float | Unknown = UNMEASURED  # cores used by the job, mean
    memory_available_gib: float | Unknown = UNMEASURED  # minimum
    quota_cores: float | Unknown = UNMEASURED  # processors that its cgroup allows; unknown without a limit
    throttled_share: float | Unknown = UNMEASURED  # fraction of the window in which the cgroup was throttled
    retransmitted_share: float | Unknown = UNMEASURED  # of the TCP segments sent in the whole run
    peak_worker_memory_gib: dict[int, float] = {}  # by rank, allocated on its GPU, otherwise resident in its process
    peak_worker_reserved_gib: dict[int, float] = {}  # by rank, reserved on its GPU by torch's allocator
    notes: tuple[FigureNote, ...] = ()  # why GPUs were not sampled


def _retransmits(row: Row) -> str:
    # The row may be one of the node's NICs.
    return percent(or_none(row[RETRANSMITTED]), ".2f")


def _worker_memory(row: Row) -> str:
    allocated, reserved = row.item.peak_worker_memory_gib, row.item.peak_worker_reserved_gib
    most = [known_max(memory.values()) for memory in (allocated, reserved)]
    texts = [UNKNOWN if gib is None else f"{gib:.2f}" for gib in most]
    return texts[0] if UNKNOWN in texts else "/".join(texts)


NODE_NAME = Figure[str]("node", "node", about="name of the node")
CPU_BUSY = Figure[float]("cpu_busy_percent", "busy", "%", form="tenths", about="CPU use of the node")
CPU_IOWAIT = Figure[float]("cpu_iowait_percent", "iowait", "%", form="tenths", about="CPU time spent waiting for disks")
CPU_STEAL = Figure[float](
    "cpu_steal_percent", "steal", "%", form="tenths", about=("CPU time that the hypervisor took from the node (steal)")
)
JOB_CORES = Figure[float](
    "job_cores",
    "job",
    "cores",
    form="figure",
    about="CPU cores used by the job",
    cell=lambda row: UNKNOWN if (cores := or_none(row.item.job_cores)) is None else f"{cores:.2f}",
)
QUOTA_CORES = Figure[float](
    "quota_cores", "quota", "cores", form="number", about="CPU cores that the job's cgroup may use"
)
THROTTLED = Figure[float](
    "throttled_share",
    "throttled",
    "by quota",
    form="share",
    about=("share of the time in which the cgroup was throttled"),
)
MEMORY_AVAILABLE = Figure[float](
    "memory_available_gib", "free", "GiB", form="tenths", about="minimum memory that was available to the job"
)
WORKER_MEMORY = Figure[float](
    "peak_worker_memory_gib",
    "worker",
    "GiB",
    form="figure",
    about="highest peak memory of the node's workers: allocated memory, and memory reserved by torch",
    cell=_worker_memory,
)
RETRANSMITTED = Figure[float](
    "retransmitted_share",
    "retrans",
    form="share",
    about="TCP retransmits as a share of sent segments",
    cell=_retransmits,
)


def node_row(node: NodeUse, part: NicUse | GpuUse | None = None) -> Row:
    """The values of a node, or of one of its NICs or GPUs, by the names of their figures."""
    item = node if part is None else part
    return Row(item, msgspec.structs.asdict(node) | msgspec.structs.asdict(item) | {NODE_NAME.name: node.node})


def use_of(node: ObservedNode, observed: Observed) -> NodeUse:
    """The node's use from the end of its warm-up to the end of its last measured step, by its own clock.

    Args:
        node: its records.
        observed: the run, with the measured steps.
    """
    window = found(lambda: _span(node, observed))
    span = or_none(window)
    gpus, notes = use_of_gpus(node, span, _measured_s(observed)) if span is not None else ((), ())
    figures = figures_in(node, span) if span is not None else {}
    told = {note.lacks: note.message[:_LONGEST_NOTE] for note in node.of(NoteSample) if note.rank is None}
    if not node.of(GpuSample):
        rule = _WHY if "gpus" in told else _GPUS
        notes = (FigureNote(**rule.fields(node.name, {"reason": told.get("gpus")}), concerns="gpus"),)
    if "cgroup" in told and isinstance(figures.get("quota_cores"), Unknown):
        figures["quota_cores"] = Unknown(told["cgroup"])
    return NodeUse(
        node=node.name,
        node_rank=node.node_rank,
        ranks=node.ranks,
        nics=use_of_nics(node, span),
        gpus=gpus,
        window_s=found(lambda: known(window).seconds),
        retransmitted_share=found(lambda: _retransmitted(node.of(TcpSample))),
        peak_worker_memory_gib=_worker_memory_gib(node, "peak_memory_bytes"),
        peak_worker_reserved_gib=_worker_memory_gib(node, "peak_reserved_bytes"),
        notes=notes,
        **figures,
    )


def figures_in(node: ObservedNode, span: Span) -> dict[str, float | Unknown]:
    """Means in the span, by the names of NodeUse's fields."""
    processors = sorted(node.of(CpuSample), key=lambda sample: sample.mono_ns)
    limits = sorted(
        (sample for sample in node.of(CgroupSample) if sample.mono_ns <= span.end_ns), key=lambda sample: sample.mono_ns
    )
    means = {name: found(partial(_mean, processors, field, span)) for name, field in _MEANS.items()}
    within = [sample.memory_available_gib for sample in processors if span.start_ns <= sample.mono_ns <= span.end_ns]
    available = min((gib for gib in within if gib is not None), default=None)
    quota = limits[-1].quota_cores if limits else None
    means["memory_available_gib"] = or_unknown(available, _UNSAMPLED)
    means["quota_cores"] = or_unknown(quota, "its cgroup has no limit" if limits else _UNSAMPLED)
    if quota is not None:
        # Without a limit there is no throttling.
        means["throttled_share"] = found(lambda: _throttled_share(limits, span))
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


def _worker_memory_gib(node: ObservedNode, field: str) -> dict[int, float]:
    peaks: dict[int, float] = {}
    for step in node.of(StepSample):
        peak_bytes = getattr(step, field)
        if step.rank in node.ranks and peak_bytes is not None:
            peaks[step.rank] = max(peaks.get(step.rank, 0.0), peak_bytes / GIB)
    return dict(sorted(peaks.items()))
