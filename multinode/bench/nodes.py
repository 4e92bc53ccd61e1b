"""Nodes, workers, tests and speeds from the records of `bench`. Judges nothing. Pure.

Untrusted: impossible values and unrequested tests are dropped.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from multinode.bench.figures import (
    BenchNode,
    BenchTest,
    BenchWorker,
    DeviceSpeed,
    TestKey,
    WorkerUse,
    key_of,
    sheet_of,
    work_of,
)
from multinode.cluster.facts import NodeFacts
from multinode.findings.rule import RuleGroup
from multinode.profile.machine_use import figures_in, use_of_gpus
from multinode.profile.observed import ObservedNode
from multinode.records.benchmark import LAUNCH_US
from multinode.records.samples import DeviceSample, GpuSample, Sample, SpeedSample
from multinode.stats.counter_rates import Span
from multinode.stats.estimate import estimate_median, known_median, of_bounds, of_repeats, spread_of
from multinode.stats.unknown import Unknown, or_empty, or_none
from multinode.units import MIB

_Kind = TypeVar("_Kind")

_MOST_TESTS = 100
_LONGEST_TEXT = 100
_LONGEST_ERROR = 300
_DEVICES = frozenset({"cpu", "cuda"})
# Upper limit in any unit.
_FASTEST = 1e7
# Fields of machine use that bench keeps.
_FIGURES = ("cpu_busy_percent", "cpu_steal_percent", "job_cores", "quota_cores", "throttled_share")
_MOST_HOLDERS = 8
_LONGEST_NAME = 40
# Size of driver contexts and the like.
_LEAST_HELD_MIB = 64.0

FINDINGS = RuleGroup("Findings of bench")
_NOT_MEASURED = FINDINGS.rule(
    "not-measured",
    about="a node that could not be measured",
    message="{node} could not be measured ({phase}): {error}",
    figures=("phase", "error"),
)
_TEST_FAILED = FINDINGS.rule(
    "test-failed",
    about="a test that could not be run",
    message="worker {rank} of {node} could not measure {label}: {error}",
    figures=("rank", "label", "error"),
)


class BenchPart(msgspec.Struct, frozen=True, kw_only=True):
    """One node in one phase."""

    phase: str  # of PHASES
    node: str
    node_rank: int
    run_id: str | None = None  # of its run; None if it never started
    ranks: tuple[int, ...] = ()  # of its workers in that run
    gpus: tuple[int, ...] | None = None  # theirs, by local rank; None without GPUs
    facts: NodeFacts | None = None  # of the node; None if unknown
    samples: tuple[Sample, ...] = ()  # of the run
    error: str | None = None  # reason of a failure, if it failed
    is_lost: bool = False  # whether it failed because the node could not be reached


def bench_nodes(parts: Sequence[BenchPart]) -> tuple[BenchNode, ...]:
    """The nodes in node-rank order, from all their parts."""
    by_rank: dict[int, list[BenchPart]] = {}
    for part in parts:
        by_rank.setdefault(part.node_rank, []).append(part)
    return tuple(_node(by_rank[node_rank]) for node_rank in sorted(by_rank))


def _node(parts: Sequence[BenchPart]) -> BenchNode:
    ranks = sorted({rank for part in parts for rank in part.ranks})
    workers = (_worker(rank, parts) for rank in ranks)
    return BenchNode(
        node=parts[0].node,
        node_rank=parts[0].node_rank,
        workers=tuple(worker for worker in workers if worker is not None),
        runs={part.phase: part.run_id for part in parts if part.run_id is not None},
        failures=tuple(
            _NOT_MEASURED.found(part.node, phase=part.phase, error=part.error)
            for part in parts
            if part.error is not None
        ),
    )


def _worker(rank: int, parts: Sequence[BenchPart]) -> BenchWorker | None:
    samples = [
        sample
        for part in parts
        for sample in _of(part, DeviceSample)
        if sample.rank == rank and sample.device in _DEVICES
    ]
    if not samples:
        return None
    about = samples[0]
    part = next(part for part in parts if rank in part.ranks)
    place = part.ranks.index(rank)
    gpu = part.gpus[place] if about.device == "cuda" and part.gpus and place < len(part.gpus) else None
    timed = {part.phase: [speed for speed in _of(part, SpeedSample) if speed.rank == rank] for part in parts}
    sensed = {part.phase: [sample for sample in _of(part, GpuSample) if sample.index == gpu] for part in parts}
    return BenchWorker(
        rank=rank,
        device=about.device,
        name=_text(about.name),
        gpu=gpu,
        threads=about.threads,
        cores=about.cores,
        node_cores=about.node_cores,
        capability=_text(about.capability),
        torch=_text(about.torch),
        cuda=_text(about.cuda),
        tests=_tests(part.node, about, timed, sensed),
        use=_uses(parts, timed, gpu),
        gpu_holders=_find_holders(part.facts, gpu),
    )


def _of(part: BenchPart, kind: type[_Kind]) -> list[_Kind]:
    return [sample for sample in part.samples if isinstance(sample, kind)]


def _text(value: str | None) -> str | None:
    return value[:_LONGEST_TEXT] if value is not None else None


def _tests(
    node: str,
    about: DeviceSample,
    timed: Mapping[str, Sequence[SpeedSample]],
    sensed: Mapping[str, Sequence[GpuSample]],
) -> tuple[BenchTest, ...]:
    by_key: dict[TestKey, dict[str, list[SpeedSample]]] = {}
    for phase, samples in timed.items():
        for sample in samples:
            key = key_of(sample)
            if key is not None and (key in by_key or len(by_key) < _MOST_TESTS):
                by_key.setdefault(key, {}).setdefault(phase, []).append(sample)
    return tuple(_test(node, about, key, phases, sensed) for key, phases in by_key.items())


def _test(
    node: str,
    about: DeviceSample,
    key: TestKey,
    phases: Mapping[str, Sequence[SpeedSample]],
    sensed: Mapping[str, Sequence[GpuSample]],
) -> BenchTest:
    sheet = sheet_of(about.device, about.name, key)
    samples = [sample for phase in phases.values() for sample in phase]
    work = work_of(samples[0])
    speeds = {
        phase: _speed(medians, about.device, sheet.peak, sensed.get(phase, ())) for phase, medians in phases.items()
    }
    errors = [sample.error for sample in samples if sample.error]
    named = msgspec.structs.asdict(key) | {"size": key.size or _buffer(samples[0])}
    return BenchTest(
        **named,
        **msgspec.structs.asdict(sheet),
        unit=work.unit if work is not None else "",
        alone=speeds.get("alone"),
        together=speeds.get("together"),
        error=_TEST_FAILED.found(node, rank=about.rank, label=key.label, error=errors[0][:_LONGEST_ERROR])
        if errors
        else None,
    )


def _buffer(sample: SpeedSample) -> str:
    return f"{(sample.size or 0) * (sample.width_bytes or 0) / MIB:.0f} MiB"


def _speed(
    samples: Sequence[SpeedSample], device: str, peak: float | Unknown, sensed: Sequence[GpuSample]
) -> DeviceSpeed | None:
    repeats = [rates for sample in samples if (rates := _rates(sample))]
    if not repeats:
        return None
    medians = [estimate_median(rates) for rates in repeats]
    estimate = of_repeats([median.value for median in medians]) if len(medians) > 1 else medians[0]
    timings = [rate for rates in repeats for rate in rates]
    during = _during(samples, sensed)
    return DeviceSpeed(
        value=of_bounds(estimate.value, estimate.bounds),
        cv=spread_of(timings).cv,
        timings=len(timings),
        of_peak=None if isinstance(peak, Unknown) else estimate.value / peak,
        launch_bound=device == "cuda" and any(_is_launch_bound(sample) for sample in samples),
        clock_mhz=known_median(gpu.sm_clock_mhz for gpu in during),
        power_w=known_median(gpu.power_w for gpu in during),
    )


def _during(samples: Sequence[SpeedSample], sensed: Sequence[GpuSample]) -> list[GpuSample]:
    spans = [span for sample in samples if (span := _span([sample])) is not None]
    return [gpu for gpu in sensed if any(span.start_ns <= gpu.mono_ns <= span.end_ns for span in spans)]


def _is_launch_bound(sample: SpeedSample) -> bool:
    return not sample.graph and bool(sample.times_us) and statistics.median(sample.times_us) < LAUNCH_US


def _rates(sample: SpeedSample) -> list[float]:
    work = work_of(sample)
    if work is None:
        return []
    rates = (work.amount / work.scale / (time_us / 1e6) for time_us in sample.times_us)
    return [rate for rate in rates if 0 < rate <= _FASTEST]


def _uses(
    parts: Sequence[BenchPart], timed: Mapping[str, Sequence[SpeedSample]], gpu: int | None
) -> dict[str, WorkerUse]:
    uses = {}
    for part in parts:
        span = _span(timed[part.phase])
        if span is not None:
            uses[part.phase] = _use_in(part.samples, span, gpu)
    return uses


def _span(samples: Iterable[SpeedSample]) -> Span | None:
    ends = [
        (sample.began_mono_ns, sample.ended_mono_ns)
        for sample in samples
        if sample.began_mono_ns is not None and sample.ended_mono_ns is not None
    ]
    ends = [(began, ended) for began, ended in ends if began < ended]
    return Span(start_ns=min(end[0] for end in ends), end_ns=max(end[1] for end in ends)) if ends else None


def _use_in(samples: Sequence[Sample], span: Span, gpu: int | None) -> WorkerUse:
    """Use of device and node in a span of the node's monotonic clock.

    Args:
        samples: including those of the node's sampler.
        span: of the worker's measurement.
        gpu: index of the worker's; None for a CPU.
    """
    node = ObservedNode(name="", node_rank=0, ranks=(), samples=tuple(samples))
    gpus, _ = use_of_gpus(node, span, span.seconds)
    figures = figures_in(node, span)
    return WorkerUse(
        seconds=span.seconds,
        gpu=next((gpu_facts for gpu_facts in gpus if gpu_facts.index == gpu), None),
        **{name: or_none(figures.get(name)) for name in _FIGURES},
    )


def _find_holders(facts: NodeFacts | None, gpu: int | None) -> tuple[str, ...]:
    gpu_facts = (
        next((gpu_fact for gpu_fact in or_empty(facts.gpus) if gpu_fact.index == gpu), None)
        if facts is not None
        else None
    )
    held = (
        [process for process in or_empty(gpu_facts.processes) if (process.memory_mib or 0) >= _LEAST_HELD_MIB]
        if gpu_facts is not None
        else []
    )
    return tuple(
        f"process {holder.pid} ({_short(holder.command)} of {_short(holder.user)}, {holder.memory_mib:.0f} MiB)"
        for holder in held[:_MOST_HOLDERS]
    )


def _short(name: str | None) -> str:
    return (name or "unknown")[:_LONGEST_NAME]
