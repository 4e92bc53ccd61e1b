"""Trace view: communication, overlap and bandwidth of a profiler window, from merged intervals. Pure.

Reading a trace file is `trace_events`; what a step does outside of the window is `step_split`.
"""

from __future__ import annotations

import msgspec

__all__ = ["TraceView", "WorkerTrace"]


class WorkerTrace(msgspec.Struct, frozen=True, kw_only=True):
    """The window of one worker, per step in the mean.

    Attributes:
        rank: global rank.
        steps: optimizer steps in the window.
        step_ms: the window over its steps.
        comm_ms: union of the intervals in which a collective was under way.
        exposed_ms: what of it no computation overlapped.
        overlap: |communication and computation| / |communication|.
        compute_ms: union of the intervals in which something was computed.
    """

    rank: int
    steps: int
    step_ms: float
    comm_ms: float
    exposed_ms: float
    overlap: float | None
    compute_ms: float


class TraceView(msgspec.Struct, frozen=True, kw_only=True):
    """All windows of a run.

    Attributes:
        workers: by rank.
        comm_ms: transfer a step: what the worker spent that waited least, as `WorkerTrace.comm_ms`.
        exposed_ms: likewise.
        overlap: of that worker.
        busbw_gb_per_s: of its all-reduces: factor x bytes / union of their transfer times; None without an all-reduce.
        message_bytes: sizes of those all-reduces in a step.
        agreement: a sentence: how it compares with the trace-free figures, and why not where they differ.
        missing: reason by name.
    """

    workers: tuple[WorkerTrace, ...] = ()
    comm_ms: float | None = None
    exposed_ms: float | None = None
    overlap: float | None = None
    busbw_gb_per_s: float | None = None
    message_bytes: tuple[int, ...] = ()
    agreement: str = ""
    missing: dict[str, str] = {}
