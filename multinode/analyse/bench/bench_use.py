"""Bench use: what processors, control group and GPU of a node did while one of its workers measured. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from multinode.analyse.bench.bench_figures import WorkerUse
from multinode.analyse.run.observed import ObservedNode
from multinode.analyse.stats.counter_rates import Reading, Span, grown_in
from multinode.analyse.telemetry.gpus import use_of_gpus
from multinode.core.cluster.facts import NodeFacts
from multinode.core.run.samples import CgroupSample, CpuSample, Sample

__all__ = ["find_holders", "use_in"]

_US_PER_S = 1e6
_MOST_CORES = 1e5
_MOST_HOLDERS = 8
_LONGEST_NAME = 40
# Contexts that a driver keeps for itself, and the like.
_LEAST_HELD_MIB = 64.0


def use_in(samples: Sequence[Sample], span: Span, gpu: int | None) -> WorkerUse:
    """The use of device and node in a span of the node's monotonic clock.

    Args:
        samples: of the node's sampler, among others.
        span: in which the worker measured.
        gpu: the worker's, by index; None of a processor.
    """
    processors = [one for one in samples if isinstance(one, CpuSample) and span.start_ns < one.mono_ns <= span.end_ns]
    limits = [one for one in samples if isinstance(one, CgroupSample)]
    gpus, _ = use_of_gpus(ObservedNode(name="", node_rank=0, ranks=(), samples=tuple(samples)), span)
    return WorkerUse(
        seconds=span.seconds,
        gpu=next((one for one in gpus if one.index == gpu), None),
        cpu_busy_percent=_mean([one.busy_percent for one in processors], 100),
        cpu_steal_percent=_mean([one.steal_percent for one in processors], 100),
        job_cores=_mean([one.job_cores for one in processors], _MOST_CORES),
        quota_cores=_quota(limits),
        throttled_share=_throttled(limits, span),
    )


def find_holders(facts: NodeFacts | None, gpu: int | None) -> tuple[str, ...]:
    """The processes that held much memory of a GPU when the node was probed, each in a few words."""
    found = next((one for one in facts.gpus if one.index == gpu), None) if facts is not None else None
    held = [one for one in found.processes if (one.memory_mib or 0) >= _LEAST_HELD_MIB] if found is not None else []
    return tuple(
        f"process {one.pid} ({_short(one.command)} of {_short(one.user)}, {one.memory_mib:.0f} MiB)"
        for one in held[:_MOST_HOLDERS]
    )


def _short(name: str | None) -> str:
    return (name or "unknown")[:_LONGEST_NAME]


def _mean(values: Sequence[float | None], most: float) -> float | None:
    """Of samples that each stand for as long; None where there is none, or one cannot be."""
    told = [value for value in values if value is not None]
    return statistics.fmean(told) if told and all(0 <= value <= most for value in told) else None


def _quota(limits: Sequence[CgroupSample]) -> float | None:
    quota = limits[-1].quota_cores if limits else None
    return quota if quota is not None and 0 < quota <= _MOST_CORES else None


def _throttled(limits: Sequence[CgroupSample], span: Span) -> float | None:
    """Without a limit nothing is held; the kernel adds up the waiting of all processors, which can be more than all."""
    if _quota(limits) is None:
        return None
    try:
        grown = grown_in([Reading(one.mono_ns, one.throttled_us) for one in limits], span)
    except ValueError:
        return None
    return min(1.0, grown.per_s / _US_PER_S)
