"""Communication, overlap and bandwidth of a profiler window, from merged intervals. Pure.

`trace_events` reads the file; `step_split` covers steps outside the window.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from multinode.profile.step_split import WorkerSplit
from multinode.stats.estimate import UnknownError, attempt
from multinode.stats.time_spans import Interval, clip, intersect, length, merge, subtract
from multinode.traffic.algorithms import bus_factor

if TYPE_CHECKING:
    from multinode.profile.trace import CollectiveSpan, TraceEvents

# Tolerance between exposed communication of the window and of the counters, as a fraction of the step.
_AGREES = 0.1
_FEW_STEPS = 3
_SLOWED = 1.1
_BUSY = 0.5
_US_PER_MS = 1000.0
_GB_PER_S = 1e-3
# A span of these has one partner, and the k-th of two workers may be different messages.
_PAIRWISE = frozenset({"send", "recv", "sendrecv", "unknown"})

_Key = tuple[int, str, str, int | None, int]


class WorkerTrace(msgspec.Struct, frozen=True, kw_only=True):
    """The window of one worker, mean per step."""

    rank: int  # global rank
    steps: int  # optimizer steps in the window
    step_ms: float  # the window over its steps
    comm_ms: float  # union of the intervals of collectives
    exposed_ms: float  # the part that no computation overlapped
    overlap: float | None  # |communication and computation| / |communication|
    compute_ms: float  # union of the intervals of computation


class TraceView(msgspec.Struct, frozen=True, kw_only=True):
    """All windows of a run."""

    workers: tuple[WorkerTrace, ...] = ()  # by rank
    comm_ms: float | None = None  # transfer per step: `WorkerTrace.comm_ms` of the worker that waited least
    exposed_ms: float | None = None  # likewise
    overlap: float | None = None  # of that worker
    # of its all-reduces: factor x bytes / union of their transfer times; None without an all-reduce
    busbw_gb_per_s: float | None = None
    message_bytes: tuple[int, ...] = ()  # sizes of those all-reduces per step
    agreement: str = ""  # a sentence that compares it with the trace-free figures
    missing: dict[str, str] = {}  # reason by name


def view_traces(traces: Mapping[int, TraceEvents], world_size: int, counted: WorkerSplit | None = None) -> TraceView:
    """The windows of the traced workers, by rank.

    The k-th call of one kind and size in a step is the same collective in every worker. The longer spans of it include
    waits for a straggler or a slower peer; the shortest is its transfer. Clocks of nodes differ, but all workers end a
    collective together: on each worker's own clock, the transfer is the last part of its span. A backend may run
    several collectives at once, hence the union of their transfers.

    Args:
        traces: by rank.
        world_size: number of workers, for groups of unknown size.
        counted: the mean step by the counters, for comparison.
    """
    if not traces:
        return TraceView(missing={"trace": "no window was recorded"})
    workers = tuple(_worker(rank, events) for rank, events in sorted(traces.items()))
    least = _waited_least(workers)
    missing: dict[str, str] = {}
    if len(traces) == 1 and world_size > 1:
        missing["transfer"] = f"only rank {least.rank} was traced: its waiting for others counts as communication"
    reductions = [span for span in traces[least.rank].collectives if span.op == "all_reduce"]
    return TraceView(
        workers=workers,
        comm_ms=least.comm_ms,
        exposed_ms=least.exposed_ms,
        overlap=least.overlap,
        busbw_gb_per_s=attempt(missing, "busbw_gb_per_s", lambda: _busbw(traces, least.rank, world_size)),
        message_bytes=_usual_sizes(reductions),
        agreement=_agreement(least, counted, traces[least.rank].device),
        missing=missing,
    )


def _worker(rank: int, events: TraceEvents) -> WorkerTrace:
    window = (events.steps[0].start_us, events.steps[-1].end_us)
    # On a GPU, kernels lag slightly behind the host; they are assigned as they come.
    communicating = merge(_spans(events.collectives))
    computing = clip(events.computing, window)
    exposed = length(subtract(communicating, events.hiding))
    took, steps = length(communicating), len(events.steps)
    per_step = _US_PER_MS * steps
    return WorkerTrace(
        rank=rank,
        steps=steps,
        step_ms=(window[1] - window[0]) / per_step,
        comm_ms=took / per_step,
        exposed_ms=exposed / per_step,
        overlap=length(intersect(communicating, events.hiding)) / took if took else None,
        compute_ms=length(computing) / per_step,
    )


def _spans(collectives: Iterable[CollectiveSpan]) -> list[Interval]:
    return [(span.start_us, span.end_us) for span in collectives]


def _busbw(traces: Mapping[int, TraceEvents], rank: int, world_size: int) -> float:
    if world_size < 2:  # noqa: PLR2004 - one worker alone has nobody to talk to
        raise UnknownError("there is one worker")
    named = {other: _named(events.collectives) for other, events in traces.items()}
    reductions = {key: span for key, span in named[rank].items() if span.op == "all_reduce"}
    if not reductions:
        raise UnknownError("no all-reduce ran in the window")
    if any(span.size_bytes is None for span in reductions.values()):
        raise UnknownError("the trace has no all-reduce sizes")
    transfers = []
    carried = 0.0
    for key, span in reductions.items():
        took = min(_took(spans[key]) for spans in named.values() if key in spans)
        transfers.append((span.end_us - took, span.end_us))
        carried += (span.size_bytes or 0) * bus_factor("all_reduce", span.ranks or world_size)
    busy_us = length(merge(transfers))
    if not busy_us:
        raise UnknownError("its all-reduces took no time")
    return carried / busy_us * _GB_PER_S


def _took(span: CollectiveSpan) -> float:
    return span.end_us - span.start_us


def _named(collectives: Iterable[CollectiveSpan]) -> dict[_Key, CollectiveSpan]:
    seen: Counter[tuple[int, str, str, int | None]] = Counter()
    named: dict[_Key, CollectiveSpan] = {}
    for span in collectives:
        if span.op in _PAIRWISE:
            continue
        kind = (span.step, span.group, span.op, span.size_bytes)
        named[*kind, seen[kind]] = span
        seen[kind] += 1
    return named


def _usual_sizes(reductions: Sequence[CollectiveSpan]) -> tuple[int, ...]:
    steps: dict[int, list[int]] = {}
    for span in reductions:
        if span.size_bytes is not None:
            steps.setdefault(span.step, []).append(span.size_bytes)
    usual = Counter(map(tuple, steps.values())).most_common(1)
    return usual[0][0] if usual else ()


def _agreement(worker: WorkerTrace, counted: WorkerSplit | None, device: str) -> str:
    window = f"{worker.exposed_ms:.1f} ms of {worker.step_ms:.1f} ms"
    if counted is None or counted.exposed_ms is None or counted.step_ms <= 0:
        return f"Exposed communication: {window} per step in the window; it is unknown elsewhere."
    both = (
        f"Exposed communication per step: {window} in the window, "
        f"{counted.exposed_ms:.1f} ms of {counted.step_ms:.1f} ms by the counters"
    )
    apart = abs(worker.exposed_ms - counted.exposed_ms) / counted.step_ms
    if apart <= _AGREES:
        return f"{both}: they agree within {apart:.1%} of the step."
    return f"{both}: they differ by {apart:.0%} of the step{_why_apart(worker, counted.step_ms, device)}."


def _why_apart(worker: WorkerTrace, step_ms: float, device: str) -> str:
    if worker.steps < _FEW_STEPS:
        return f"; the window has too few steps ({worker.steps}) to judge"
    if worker.step_ms > _SLOWED * step_ms:
        return f", because the profiler made a step {worker.step_ms / step_ms - 1:.0%} longer"
    if device == "cuda" and worker.compute_ms < _BUSY * worker.step_ms:
        busy = worker.compute_ms / worker.step_ms
        return f", because the GPU computed {busy:.0%} of the time and waited for the host otherwise"
    return " for an unknown reason"


def _waited_least(workers: Sequence[WorkerTrace]) -> WorkerTrace:
    return min(workers, key=lambda worker: (worker.exposed_ms, worker.comm_ms))
