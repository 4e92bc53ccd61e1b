"""In-training bandwidth: busbw of the training's all-reduces, against nccl-test and NCCL's Inspector. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from multinode.findings.finding import Finding
from multinode.findings.rule import Rule, RuleGroup
from multinode.profile.calls import last_models
from multinode.profile.figures import Alone, InTraining, TraceView
from multinode.profile.observed import Observed
from multinode.records.samples import DdpSample, NcclOpSample
from multinode.stats.unknown import Unknown, UnknownError, found
from multinode.traffic.algorithms import bus_factor
from multinode.traffic.step_calls import SMALL_BYTES, ScanCurves
from multinode.units import format_figure

# Commit b3aeda4a of NCCL added a ring of operations; the plugin loads into NCCL 2.28 and newer.
NEWER_PLUGIN = "but a plugin built from NCCL 2.30.3 or newer records all of them, even with an older NCCL"

# NCCL's names, and torch's.
_OPS = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
}
_SHARED = frozenset({"AllGather", "ReduceScatter"})
_GB_PER_US = 1e-3  # of bytes in a microsecond
_INSPECTOR = "nccl inspector"
# The plugin writes whole microseconds: half of one matters for a short operation.
_SAME_BUSBW = 0.02
_LEAST_US = 100.0
# It is configured to write twice a second (job/planning.py).
_WRITTEN_WITHIN_S = 1.0


def total_bytes(op: NcclOpSample) -> int:
    """S as in nccl-tests: the whole gathered or scattered buffer."""
    return op.size_bytes * (op.comm_ranks if op.op in _SHARED else 1)


def busbw_gb_per_s(op: NcclOpSample) -> float:
    """Our busbw, from size and time.

    Raises:
        ValueError: the operation has no factor.
    """
    if op.op not in _OPS:
        raise ValueError(f"unknown operation {op.op}")
    factor = 1.0 if op.op == "Reduce" else bus_factor(_OPS[op.op], op.comm_ranks)
    return factor * total_bytes(op) / op.time_us * _GB_PER_US


def view_inspector(observed: Observed) -> InTraining:
    """The all-reduces of all workers that NCCL's Inspector recorded in the measured steps.

    Raises:
        UnknownError: the plugin recorded none, or its figures are inconsistent.
    """
    ops = [op for op in _in_window(observed) if op.op == "AllReduce" and op.comm_ranks == observed.world_size]
    ops = [op for op in ops if total_bytes(op) >= SMALL_BYTES]
    if not ops:
        least = f"{SMALL_BYTES} bytes or more"
        raise UnknownError(
            f"NCCL's Inspector recorded no all-reduce of {least} across all workers in the measured steps"
        )
    odd = sum(not _agrees(op) for op in ops if op.time_us >= _LEAST_US)
    if odd:
        raise UnknownError(
            f"NCCL's Inspector reports a bandwidth for {odd} operations that contradicts their bytes and times"
        )
    whole, recorded = _of_all_workers(ops), _recorded(ops)
    if not whole:
        few = "" if recorded == 1.0 else f": it recorded {recorded:.0%} of the operations, {NEWER_PLUGIN}"
        raise UnknownError(f"NCCL's Inspector recorded no all-reduce on all workers{few}")
    sizes = [total_bytes(workers[0]) for workers in whole]
    took_us = math.fsum(min(op.time_us for op in workers) for workers in whole)
    busbw = bus_factor("all_reduce", observed.world_size) * sum(sizes) / took_us * _GB_PER_US
    if not math.isfinite(busbw):
        raise UnknownError("the times of NCCL's Inspector are implausible")
    if recorded < 1.0:
        return InTraining(busbw_gb_per_s=busbw, source=_INSPECTOR, recorded=recorded)
    steps = observed.counted[-1] - observed.counted[0] + 1
    counts = {size: round(count / steps) for size, count in Counter(sizes).items()}
    return InTraining(
        busbw_gb_per_s=busbw,
        source=_INSPECTOR,
        sizes_bytes=tuple(size for size, count in sorted(counts.items(), reverse=True) for _ in range(count)),
        bytes_per_step=sum(sizes) / steps,
    )


def _in_window(observed: Observed) -> Iterable[NcclOpSample]:
    if not observed.counted:
        return
    first, last = observed.counted[0], observed.counted[-1]
    for node in observed.nodes:
        times = {
            number: [observed.steps[number][rank].time_s for rank in node.ranks if rank in observed.steps[number]]
            for number in (first, last)
        }
        took_s = [
            (observed.steps[first][rank].step_time_us or 0.0) / 1e6
            for rank in node.ranks
            if rank in observed.steps[first]
        ]
        if times[first] and times[last]:
            begin_s, end_s = min(times[first]) - max(took_s), max(times[last]) + _WRITTEN_WITHIN_S
            yield from (op for op in node.of(NcclOpSample) if begin_s < op.written_s <= end_s)


def _recorded(ops: Sequence[NcclOpSample]) -> float:
    numbers: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    for op in ops:
        numbers[op.comm, op.comm_rank].add(op.number)
    return min(len(some) / (max(some) - min(some) + 1) for some in numbers.values())


def _agrees(op: NcclOpSample) -> bool:
    return math.isclose(busbw_gb_per_s(op), op.busbw_gb_per_s, rel_tol=_SAME_BUSBW)


def _of_all_workers(ops: Sequence[NcclOpSample]) -> list[list[NcclOpSample]]:
    by_operation: dict[tuple[str, int], dict[int, NcclOpSample]] = {}
    for op in ops:
        by_operation.setdefault((op.comm, op.number), {})[op.comm_rank] = op
    return [
        list(workers.values())
        for workers in by_operation.values()
        if len(workers) == next(iter(workers.values())).comm_ranks
        and len({op.size_bytes for op in workers.values()}) == 1
    ]


_GB_PER_S = 1e-3  # of bytes in a microsecond
# Steps and records end at different moments.
_ALIKE = 0.05

BANDWIDTHS = RuleGroup("Bandwidth in training")


def _source(code: str, about: str, origin: str) -> Rule:
    return BANDWIDTHS.rule(
        code,
        about=about,
        message=f"The training's all-reduces reach a busbw of {{busbw}} GB/s, {origin}",
        figures=("busbw_gb_per_s",),
    )


_SOURCES = {
    "trace": _source(
        "trace", "busbw from the profiler's window", "calculated from the transfers in the profiler's window"
    ),
    _INSPECTOR: _source(
        "nccl-inspector",
        "busbw from NCCL's Inspector",
        "calculated from the records of NCCL's Inspector plugin (for each operation, the record of the worker that "
        "waited least)",
    ),
    "ddp span": _source(
        "ddp-span",
        "busbw from DDP's counters",
        "calculated from DDP's counters. This is a lower bound, because the counters include waits between the first "
        "and the last bucket",
    ),
}
_SAMPLED = BANDWIDTHS.rule(
    "sampled",
    about="NCCL's Inspector recorded only some of the operations",
    message=f"only {{recorded_share:.0%}} of the operations were recorded, {NEWER_PLUGIN}",
    figures=("recorded_share",),
)
_BESIDE_ALONE = BANDWIDTHS.rule(
    "beside-nccl-test",
    about="comparison with the busbw of an nccl-test",
    message="this is {share:.0%} of the busbw that nccl-test {run_id} measured for the same sizes ({alone} GB/s)",
    figures=("share", "alone_gb_per_s", "run_id"),
)
_AS_ASKED = BANDWIDTHS.rule(
    "bytes-agree",
    about="NCCL recorded the number of bytes that the calls requested",
    message="NCCL recorded {counted} MB per step, which agrees with the {asked} MB that the calls requested",
    figures=("counted_bytes", "asked_bytes"),
)
_NOT_AS_ASKED = BANDWIDTHS.rule(
    "bytes-differ",
    about="NCCL recorded a different number of bytes than the calls requested",
    message="NCCL recorded {counted} MB per step, but the calls requested {asked} MB",
    figures=("counted_bytes", "asked_bytes"),
)


def in_training(
    observed: Observed, trace: TraceView | None, asked_bytes: float = 0.0, scan: ScanCurves | None = None
) -> InTraining:
    """The bandwidth from the best source: a profiler window, NCCL's Inspector, or DDP's counters.

    Args:
        observed: the run.
        trace: the profiler's window.
        asked_bytes: of all-reduces of all workers, by the calls of a worker per step; 0 if unknown.
        scan: an nccl-test of the same nodes and workers, for comparison.
    """
    bandwidth = _by_best_source(observed, trace)
    busbw = bandwidth.busbw_gb_per_s
    if isinstance(busbw, Unknown):
        return bandwidth
    requested = asked_bytes if bandwidth.bytes_per_step is not None and asked_bytes else None
    alone = _alone(bandwidth.sizes_bytes, scan, observed.world_size) if scan is not None else None
    bandwidth = msgspec.structs.replace(bandwidth, asked_bytes=requested, alone=alone)
    return msgspec.structs.replace(bandwidth, findings=tuple(_judge(bandwidth, busbw)))


def _by_best_source(observed: Observed, trace: TraceView | None) -> InTraining:
    if trace is not None and not isinstance(trace.busbw_gb_per_s, Unknown):
        return InTraining(busbw_gb_per_s=trace.busbw_gb_per_s, source="trace", sizes_bytes=trace.message_bytes)
    recorded = found(lambda: view_inspector(observed)) if observed.of(NcclOpSample) else None
    if isinstance(recorded, InTraining):
        return recorded
    counted = found(lambda: _by_counters(observed))
    if isinstance(counted, InTraining):
        return counted
    reasons = [counted.reason]
    if recorded is not None:
        reasons.append(recorded.reason)
    if trace is not None and isinstance(trace.busbw_gb_per_s, Unknown):
        reasons.append(f"the profiler's window: {trace.busbw_gb_per_s.reason}")
    return InTraining(busbw_gb_per_s=Unknown("; ".join(reasons)))


def _alone(sizes_bytes: Sequence[int], scan: ScanCurves, world_size: int) -> Alone | None:
    curve, sizes = scan.curves.get("all_reduce"), [size for size in sizes_bytes if size > 0]
    took_us = sum(curve.predict_us(size) for size in sizes) if curve is not None else 0.0
    if not 0 < took_us < math.inf:
        return None
    return Alone(run_id=scan.run_id, busbw_gb_per_s=_busbw(sizes, took_us, world_size))


def _judge(training: InTraining, busbw: float) -> Iterator[Finding]:
    yield _SOURCES[training.source or ""].found(None, busbw=format_figure(busbw), busbw_gb_per_s=busbw)
    if training.recorded < 1.0:
        yield _SAMPLED.found(None, recorded_share=training.recorded)
    if training.alone is not None and training.alone.busbw_gb_per_s > 0:
        alone = training.alone.busbw_gb_per_s
        yield _BESIDE_ALONE.found(
            None,
            share=busbw / alone,
            alone=format_figure(alone),
            alone_gb_per_s=alone,
            run_id=training.alone.run_id,
        )
    counted, asked = training.bytes_per_step, training.asked_bytes
    if counted is not None and asked:
        yield (_AS_ASKED if abs(counted / asked - 1) <= _ALIKE else _NOT_AS_ASKED).found(
            None,
            counted=format_figure(counted / 1e6),
            counted_bytes=counted,
            asked=format_figure(asked / 1e6),
            asked_bytes=asked,
        )


def _by_counters(observed: Observed) -> InTraining:
    if observed.averaging is not None:
        raise UnknownError("gradients stay on their node; see the rounds for the averages between nodes")
    steps = _counters(observed)
    if not steps:
        raise UnknownError("the measured steps have no DDP counters; to measure the busbw, record a trace (--trace)")
    if _has_hooks(observed):
        raise UnknownError("a communication hook sends something other than DDP's buckets")
    measured = list(_measured(steps, observed.world_size).values())
    if not measured:
        raise UnknownError("no step has plausible DDP counters of all workers")
    ((sizes, _),) = Counter(sizes for sizes, _ in measured).most_common(1)
    median = statistics.median(busbw for _, busbw in measured)
    return InTraining(busbw_gb_per_s=median, source="ddp span", sizes_bytes=sizes)


def step_bandwidths(observed: Observed) -> dict[int, float]:
    """Busbw of each measured step in GB/s, from DDP's counters of the worker that waited least."""
    if observed.world_size < 2 or _has_hooks(observed):  # noqa: PLR2004 - one worker alone has nobody to talk to
        return {}
    return {number: busbw for number, (_, busbw) in _measured(_counters(observed), observed.world_size).items()}


def _has_hooks(observed: Observed) -> bool:
    return any(model.settings.get("comm_hooks") for model in last_models(observed).values())


def _measured(
    steps: Mapping[int, Mapping[int, Sequence[DdpSample]]], world_size: int
) -> dict[int, tuple[tuple[int, ...], float]]:
    whole = {number: list(workers.values()) for number, workers in steps.items() if len(workers) == world_size}
    return {number: step for number, workers in whole.items() if (step := _of_step(workers, world_size)) is not None}


def _counters(observed: Observed) -> dict[int, dict[int, list[DdpSample]]]:
    counted = set(observed.counted)
    steps: dict[int, dict[int, list[DdpSample]]] = {}
    for node in observed.nodes:
        for sample in node.of(DdpSample):
            if sample.step in counted and sample.rank in node.ranks:
                steps.setdefault(sample.step, {}).setdefault(sample.rank, []).append(sample)
    return steps


def _of_step(workers: Sequence[Sequence[DdpSample]], world_size: int) -> tuple[tuple[int, ...], float] | None:
    sizes = tuple(size for reduction in workers[0] for size in reduction.bucket_sizes_bytes)
    spans_us = [math.fsum(reduction.comm_us for reduction in reductions) for reductions in workers]
    if not sum(sizes):
        return None
    span_us = min(spans_us)
    if not span_us:
        return None
    busbw = _busbw(sizes, span_us, world_size)
    return (sizes, busbw) if math.isfinite(busbw) else None


def _busbw(sizes: Sequence[int], took_us: float, world_size: int) -> float:
    return bus_factor("all_reduce", world_size) * sum(sizes) / took_us * _GB_PER_S
