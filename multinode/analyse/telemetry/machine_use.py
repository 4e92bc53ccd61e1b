"""Machine use: what each node's cards, processors, memory and GPUs did while the steps that count ran. Pure.

Cards are `cards`', GPUs `gpus`'. Nodes are not trusted: what cannot be is None, and `missing` says why.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from multinode.analyse.run.observed import Observed, ObservedNode
from multinode.analyse.stats.counter_rates import Reading, Span, grown_in, in_whole, is_moment
from multinode.analyse.telemetry.cards import CardUse, use_of_cards
from multinode.analyse.telemetry.gpus import GpuUse, use_of_gpus
from multinode.core.run.samples import CgroupSample, CpuSample, NoteSample, StepSample, TcpSample

__all__ = ["CardUse", "GpuUse", "NodeUse", "use_of"]

_BYTES_PER_GIB = 1 << 30
_US_PER_S = 1e6
_MOST_GIB = 1e6
_MOST_CORES = 1e5
_MOST_STEP_US = 1e12
_LONGEST_NOTE = 200
# What the samplers' notes begin with, and whose reason they are.
_NOTES = {"gpus": "no GPU samples: ", "quota_cores": "no cgroup samples: "}
# Fields of NodeUse that are means, and those of CpuSample, with the most that they can be.
_MEANS = {
    "cpu_busy_percent": ("busy_percent", 100),
    "cpu_iowait_percent": ("iowait_percent", 100),
    "cpu_steal_percent": ("steal_percent", 100),
    "job_cores": ("job_cores", _MOST_CORES),
}
_UNSAMPLED = "not sampled while the steps that count ran"
_INCREDIBLE = "what it says cannot be true"


class NodeUse(msgspec.Struct, frozen=True, kw_only=True):
    """One node over the window of the steps that count.

    Attributes:
        cards: the network cards that were sampled.
        cpu_busy_percent: of all cores, mean; likewise `cpu_iowait_percent`, `cpu_steal_percent`.
        job_cores: cores that the job used, mean.
        quota_cores: processors that its cgroup allows; None is no limit, or unknown.
        throttled_share: part of the window in which the cgroup had used them up; None is unknown.
        memory_available_gib: the least.
        retransmitted_share: of the TCP segments sent in the whole run; None is unknown.
        peak_worker_memory_gib: by rank, on its GPU, else resident in its process.
        missing: reason by name of what could not be sampled.
    """

    node: str
    node_rank: int
    ranks: tuple[int, ...]
    cards: tuple[CardUse, ...] = ()
    gpus: tuple[GpuUse, ...] = ()
    cpu_busy_percent: float | None = None
    cpu_iowait_percent: float | None = None
    cpu_steal_percent: float | None = None
    job_cores: float | None = None
    quota_cores: float | None = None
    throttled_share: float | None = None
    memory_available_gib: float | None = None
    retransmitted_share: float | None = None
    peak_worker_memory_gib: dict[int, float] = {}
    missing: dict[str, str] = {}


class _Figures(msgspec.Struct, kw_only=True):
    """What was found out, by the names of NodeUse's fields; and why the rest was not."""

    known: dict[str, float | None] = {}
    missing: dict[str, str] = {}


def use_of(node: ObservedNode, observed: Observed) -> NodeUse:
    """The node's use, from the end of its last warm-up step to the end of its last step that counts, by its own clock.

    Args:
        node: what it recorded.
        observed: the run, which says what steps count.
    """
    span = _span(node, observed)
    figures = _Figures()
    cards, figures.missing = use_of_cards(node, None if isinstance(span, str) else span)
    gpus: tuple[GpuUse, ...] = ()
    if isinstance(span, str):
        figures.missing["window"] = span
    else:
        gpus, reasons = use_of_gpus(node, span)
        figures.missing |= reasons
        _add_processors(figures, node.of(CpuSample), span)
        _add_limit(figures, node.of(CgroupSample), span)
    _add_retransmissions(figures, node.of(TcpSample))
    _add_notes(figures, node, has_gpus=bool(gpus))
    return NodeUse(
        node=node.name,
        node_rank=node.node_rank,
        ranks=node.ranks,
        cards=cards,
        gpus=gpus,
        peak_worker_memory_gib=_worker_memory_gib(node),
        missing=figures.missing,
        **figures.known,
    )


def _span(node: ObservedNode, observed: Observed) -> Span | str:
    """From the first to the last step that counts of those that the node recorded; or why that is not known."""
    own = [number for number in observed.counted if _end_of(node, observed.steps[number]) is not None]
    if not own:
        return "none of its workers recorded a step that counts"
    before = max((number for number in observed.steps if number < observed.counted[0]), default=None)
    start_ns = _end_of(node, observed.steps[before]) if before is not None else None
    if start_ns is None:
        start_ns = _begin_of(node, observed.steps[own[0]])
    end_ns = _end_of(node, observed.steps[own[-1]])
    if start_ns is None or end_ns is None:
        return f"when step {own[0]}, its first that counts, began is not known"
    if not is_moment(start_ns) or not is_moment(end_ns) or not start_ns < end_ns:
        return f"what its clock showed at the ends of the steps up to {own[-1]} cannot be true"
    return Span(start_ns=start_ns, end_ns=end_ns)


def _end_of(node: ObservedNode, workers: dict[int, StepSample]) -> int | None:
    return max((one.mono_ns for rank, one in workers.items() if rank in node.ranks), default=None)


def _begin_of(node: ObservedNode, workers: dict[int, StepSample]) -> int | None:
    """Where no warm-up was recorded: when the first of the node's workers began with the first step."""
    return min(
        (
            one.mono_ns - round(one.step_time_us * 1000)
            for rank, one in workers.items()
            if rank in node.ranks and one.step_time_us is not None and 0 <= one.step_time_us < _MOST_STEP_US
        ),
        default=None,
    )


def _add_processors(figures: _Figures, samples: list[CpuSample], span: Span) -> None:
    samples = sorted((one for one in samples if is_moment(one.mono_ns)), key=lambda one: one.mono_ns)
    for name, (field, most) in _MEANS.items():
        try:
            figures.known[name] = _mean(samples, field, most, span)
        except ValueError as error:
            figures.missing[name] = str(error)
    within = [one.memory_available_gib for one in samples if span.start_ns <= one.mono_ns <= span.end_ns]
    told = [gib for gib in within if gib is not None]
    if not told or not all(0 <= gib <= _MOST_GIB for gib in told):
        figures.missing["memory_available_gib"] = _INCREDIBLE if told else _UNSAMPLED
    else:
        figures.known["memory_available_gib"] = min(told)


def _mean(samples: Iterable[CpuSample], field: str, most: float, span: Span) -> float:
    """Over the span; each figure stands for the time since the sample before that had one, and weighs as much.

    Raises:
        ValueError: there is none in the span, or one cannot be.
    """
    weighed, seconds, since_ns = 0.0, 0.0, None
    for sample in samples:
        value = getattr(sample, field)
        since_ns = sample.mono_ns if since_ns is None else since_ns
        if value is not None:
            overlap_s = span.overlap_s(since_ns, sample.mono_ns)
            if overlap_s and not 0 <= value <= most:
                raise ValueError(_INCREDIBLE)
            weighed += value * overlap_s if overlap_s else 0.0
            seconds += overlap_s
            since_ns = sample.mono_ns
    if not seconds:
        raise ValueError(_UNSAMPLED)
    return weighed / seconds


def _add_limit(figures: _Figures, samples: list[CgroupSample], span: Span) -> None:
    """The cgroup's limit; without one nothing is held, and nothing is to be told.

    The kernel adds up the time of all processors that had to wait, which can be more than the time that passed.
    """
    samples = sorted((one for one in samples if one.mono_ns <= span.end_ns), key=lambda one: one.mono_ns)
    quota_cores = samples[-1].quota_cores if samples else None
    if quota_cores is None:
        figures.missing["quota_cores"] = "its cgroup has no limit" if samples else _UNSAMPLED
        return
    if not 0 < quota_cores <= _MOST_CORES:
        figures.missing["quota_cores"] = _INCREDIBLE
        return
    figures.known["quota_cores"] = quota_cores
    try:
        growth = grown_in([Reading(one.mono_ns, one.throttled_us) for one in samples], span)
        figures.known["throttled_share"] = min(1.0, growth.per_s / _US_PER_S)
    except ValueError as error:
        figures.missing["throttled_share"] = str(error)


def _add_retransmissions(figures: _Figures, samples: list[TcpSample]) -> None:
    """Of the whole run. What the kernel counts as sent (RFC 4022, tcpOutSegs) has no retransmissions in it."""
    try:
        sent = in_whole(Reading(one.mono_ns, one.sent_segments) for one in samples)
        again = in_whole(Reading(one.mono_ns, one.retransmitted_segments) for one in samples)
    except ValueError as error:
        figures.missing["retransmitted_share"] = str(error)
        return
    if sent + again > 0:
        figures.known["retransmitted_share"] = again / (sent + again)
    else:
        figures.missing["retransmitted_share"] = "nothing was sent"


def _add_notes(figures: _Figures, node: ObservedNode, *, has_gpus: bool) -> None:
    """Why the samplers themselves say that something is missing."""
    if not has_gpus:
        figures.missing.setdefault("gpus", "no GPU was sampled")
    for note in node.of(NoteSample):
        for name, beginning in _NOTES.items():
            if name in figures.missing and note.rank is None and note.message.startswith(beginning):
                figures.missing[name] = note.message.removeprefix(beginning)[:_LONGEST_NOTE]


def _worker_memory_gib(node: ObservedNode) -> dict[int, float]:
    peaks: dict[int, float] = {}
    for step in node.of(StepSample):
        size_bytes = step.peak_memory_bytes
        if step.rank in node.ranks and size_bytes is not None and 0 <= size_bytes <= _MOST_GIB * _BYTES_PER_GIB:
            peaks[step.rank] = max(peaks.get(step.rank, 0.0), size_bytes / _BYTES_PER_GIB)
    return dict(sorted(peaks.items()))
