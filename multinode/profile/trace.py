"""TraceEvents: communication, computation and steps in a trace of torch.profiler; their overlap.

Untrusted input.
"""

from __future__ import annotations

import bisect
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from multinode.decoding import decode_json
from multinode.findings.finding import Finding
from multinode.findings.rule import Rule, RuleGroup
from multinode.profile.calls import SeenCall
from multinode.profile.figures import NOTES, FigureNote, TraceView, WorkerTrace
from multinode.profile.step_split import WorkerSplit
from multinode.records.run_directory import RunDirectory
from multinode.stats.time_spans import Interval, clip, gaps, intersect, length, merge, subtract
from multinode.stats.unknown import UnknownError, found, or_none
from multinode.traffic.algorithms import bus_factor
from multinode.traffic.step_calls import SMALL_BYTES, ScanCurves
from multinode.units import format_size

# Events take up to four times as much memory as their text.
_MOST_BYTES = 256 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WINDOW = 31  # zlib's word for: with a gzip header, window of any size
# Implausible times; keeps sums of forged values finite.
_LATEST_US = 1e16
_MOST_ELEMENTS = 1 << 50
_MOST_DIMENSIONS = 64
_LONGEST_NAME = 300
_LONGEST_ARGUMENT = 1 << 16
# Events of torch take twice as much, with and without shapes.
_LEAST_EVENT_BYTES = 64
_FEW_EVENTS = 1000
# Tolerance by which the end of a span may follow the end of its wait.
_LATE_END = 0.1
# `worker/trace.py` writes these marks.
_MARK = re.compile(r"multinode step (\d{1,15}) ends")
_GLOO = "gloo:"
_CALLS = ("c10d::", "_c10d_functional::")
_DEVICE_COMMUNICATION = ("nccl", "rccl", "oneccl")
_NCCL_KERNEL = re.compile(r"(?:AllReduce|AllGather|ReduceScatter|Broadcast|SendRecv|Reduce|AllToAll)")
# Bytes per element, by torch's dtype names in kernel arguments and in types of inputs.
_ELEMENT_BYTES = {
    **dict.fromkeys(("double", "long", "long int", "int64", "float64", "uint64"), 8),
    **dict.fromkeys(("float", "int", "int32", "float32", "uint32"), 4),
    **dict.fromkeys(("half", "bfloat16", "short", "short int", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("char", "signed char", "byte", "unsigned char", "bool", "int8", "uint8"), 1),
}
_OPS = {
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reducescatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all": "all_to_all",
    "all_to_allv": "all_to_all",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "_broadcast_oop": "broadcast",
    "reduce": "reduce",
    "_reduce_oop": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
    "recvanysource": "recv",
    "sendrecv": "sendrecv",
}


class TraceStep(msgspec.Struct, frozen=True, kw_only=True):
    """One complete optimizer step; `start_us` and `end_us` by the trace's clock, as seen by the host."""

    step: int
    start_us: float
    end_us: float


class CollectiveSpan(msgspec.Struct, frozen=True, kw_only=True):
    """One collective, from when this worker joined until it had its result."""

    op: str  # as in CallCount; `unknown` if the trace does not say
    size_bytes: int | None  # S as in nccl-tests; None if unknown. For gloo's all-gather, one worker's share.
    ranks: int | None = None  # workers in the group; None if unknown (gloo does not report it)
    group: str = ""  # name and members of the group, as in the trace; empty if unknown
    step: int  # the optimizer step that called it
    start_us: float  # by the trace's clock; also `end_us`
    end_us: float


class TraceEvents(msgspec.Struct, frozen=True, kw_only=True):
    """The window of one worker; intervals are merged, in microseconds of the trace's clock."""

    device: str  # `cuda` if GPU kernels were recorded, otherwise `cpu`
    steps: tuple[TraceStep, ...]  # complete steps, in order
    collectives: tuple[CollectiveSpan, ...]  # of these steps, by start
    # computation: on a GPU any kernel that does not communicate, otherwise an operator of a training thread
    computing: tuple[Interval, ...]
    # times when communication costs nothing: `computing`, and on a CPU the time between two operators in which no
    # collective ended
    hiding: tuple[Interval, ...]


_NULL = msgspec.Raw(b"null")


class _Arguments(msgspec.Struct):
    """Arguments of an event, as torch writes them; decoded when needed."""

    collective: msgspec.Raw = msgspec.field(name="Collective name", default=_NULL)
    sent: msgspec.Raw = msgspec.field(name="In msg nelems", default=_NULL)
    received: msgspec.Raw = msgspec.field(name="Out msg nelems", default=_NULL)
    dtype: msgspec.Raw = _NULL
    ranks: msgspec.Raw = msgspec.field(name="Group size", default=_NULL)
    group: msgspec.Raw = msgspec.field(name="Process Group Name", default=_NULL)
    members: msgspec.Raw = msgspec.field(name="Process Group Ranks", default=_NULL)
    correlation: msgspec.Raw = _NULL
    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=_NULL)
    types: msgspec.Raw = msgspec.field(name="Input type", default=_NULL)


class _Event(msgspec.Struct):
    """An event in Chrome's trace format; `ts` and `dur` in microseconds."""

    ph: str = ""
    cat: str | None = None
    name: str = ""
    tid: int | str | None = None
    ts: float = 0.0
    dur: float = 0.0
    args: _Arguments | None = None

    @property
    def end(self) -> float:
        return self.ts + self.dur

    def is_communication(self) -> bool:
        """Whether this kernel is one of NCCL or a similar library."""
        return self.name.lower().startswith(_DEVICE_COMMUNICATION)


class _Trace(msgspec.Struct):
    traceEvents: list[_Event]  # noqa: N815 - the format's own word


_DECODER = msgspec.json.Decoder(_Trace, strict=False)


def read_trace(data: bytes, most_bytes: int = _MOST_BYTES) -> TraceEvents:
    """Read a trace exported by torch.profiler, gzipped or not.

    Args:
        data: the file.
        most_bytes: maximum unpacked size.

    Raises:
        ValueError: it is not such a trace, is too large, or has no complete step; one line.
    """
    text = _unpack(data, most_bytes)
    if text.count(b"{") > max(_FEW_EVENTS, len(text) // _LEAST_EVENT_BYTES):
        raise ValueError("not a torch.profiler trace: it has more events than its size allows")
    try:
        events = [event for event in _DECODER.decode(text).traceEvents if event.ph == "X" and _is_sound(event)]
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"not a torch.profiler trace: {_one_line(error)}") from None
    steps = _steps(events)
    if not steps:
        raise ValueError("it contains no complete step")
    return _on_device(events, steps) if any(event.cat == "kernel" for event in events) else _on_host(events, steps)


# Compressed; uncompressed it takes many times as much.
_LARGEST_TRACE = 64 << 20


_UNFETCHED = NOTES.rule(
    "trace-not-fetched",
    about="a profiler's window that was not copied",
    message="it was not fetched",
    figures=("rank",),
)
_UNREADABLE = NOTES.rule(
    "trace-unreadable",
    about="a profiler's window that cannot be read",
    message="it cannot be read: {reason}",
    figures=("rank", "reason"),
)


def read_traces(directory: RunDirectory, ranks: Iterable[int]) -> tuple[dict[int, TraceEvents], tuple[FigureNote, ...]]:
    """The copied windows, by rank, and notes on why others cannot be read."""
    events: dict[int, TraceEvents] = {}
    notes: list[FigureNote] = []
    for rank in ranks:
        path = directory.trace_path(rank)
        try:
            with path.open("rb") as file:
                # A truncated trace is invalid, and the reader says so.
                events[rank] = read_trace(file.read(_LARGEST_TRACE))
        except FileNotFoundError:
            notes.append(_note_on(_UNFETCHED, rank))
        except (OSError, ValueError) as error:
            notes.append(_note_on(_UNREADABLE, rank, str(error)))
    return events, tuple(notes)


def _note_on(rule: Rule, rank: int, reason: str | None = None) -> FigureNote:
    return FigureNote(**rule.fields(None, {"rank": rank, "reason": reason}), concerns=f"trace of rank {rank}")


def _unpack(data: bytes, most_bytes: int) -> bytes:
    text, more = data, False
    if data.startswith(_GZIP_MAGIC):
        unpacker = zlib.decompressobj(_GZIP_WINDOW)
        try:
            text = unpacker.decompress(data, most_bytes)
        except zlib.error as error:
            raise ValueError(f"not a gzip file: {_one_line(error)}") from None
        more = bool(unpacker.unconsumed_tail)
        if not more and not unpacker.eof:
            raise ValueError("the gzip file ends too early")
    if more or len(text) > most_bytes:
        raise ValueError(f"it is larger than {format_size(most_bytes)}; record fewer steps")
    return text


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _is_sound(event: _Event) -> bool:
    # Comparisons with NaN are false.
    return abs(event.ts) < _LATEST_US and 0 <= event.dur < _LATEST_US


def _steps(events: Iterable[_Event]) -> tuple[TraceStep, ...]:
    marks: dict[int, float] = {}
    for event in events:
        mark = _MARK.fullmatch(event.name)
        if mark:
            marks.setdefault(int(mark[1]), event.ts)
    steps: list[TraceStep] = []
    number = min(marks, default=0)
    # Windows have no gaps, and the clock is monotonic.
    while marks.get(number + 1, -math.inf) > marks.get(number, math.inf):
        steps.append(TraceStep(step=number + 1, start_us=marks[number], end_us=marks[number + 1]))
        number += 1
    return tuple(steps)


class _Calendar:
    """The step of a time, or None."""

    def __init__(self, steps: Sequence[TraceStep]) -> None:
        self._starts = [step.start_us for step in steps]
        self._steps = steps

    def step_at(self, moment_us: float) -> int | None:
        place = bisect.bisect_right(self._starts, moment_us) - 1
        if place < 0 or moment_us >= self._steps[place].end_us:
            return None
        return self._steps[place].step


def _on_device(events: Sequence[_Event], steps: tuple[TraceStep, ...]) -> TraceEvents:
    """A kernel belongs to the step in which the host launched it, as the device lags behind."""
    launched = {
        number: event.ts
        for event in events
        if event.cat in {"cuda_runtime", "cuda_driver"} and event.args
        if isinstance(number := _plain(event.args.correlation), int)
    }
    calendar = _Calendar(steps)
    kernels = [event for event in events if event.cat == "kernel"]
    collectives = []
    for event in kernels:
        arguments = event.args or _Arguments()
        number = _plain(arguments.correlation)
        step = calendar.step_at(launched.get(number, event.ts) if isinstance(number, int) else event.ts)
        if step is not None and event.is_communication():
            collectives.append(_nccl_span(event, arguments, step))
    computing = tuple(merge((event.ts, event.end) for event in kernels if not event.is_communication()))
    return TraceEvents(
        device="cuda", steps=steps, collectives=_in_order(collectives), computing=computing, hiding=computing
    )


def _nccl_span(event: _Event, arguments: _Arguments, step: int) -> CollectiveSpan:
    op = _op_of(_plain(arguments.collective))
    if op == "unknown":
        named = _NCCL_KERNEL.search(event.name)
        op = _op_of(named[0]) if named else op
    elements = _plain(arguments.received if op == "all_gather" else arguments.sent)
    ranks, group, members = _plain(arguments.ranks), _plain(arguments.group), _plain(arguments.members)
    return CollectiveSpan(
        op=op,
        size_bytes=_size(elements, _plain(arguments.dtype)),
        ranks=ranks if _is_count(ranks) and ranks > 0 else None,
        # Two groups may have the same name.
        group=f"{group or ''} {members or ''}".strip()[:_LONGEST_NAME],
        step=step,
        start_us=event.ts,
        end_us=event.end,
    )


def _on_host(events: Sequence[_Event], steps: tuple[TraceStep, ...]) -> TraceEvents:
    """Spans of gloo start when one of its threads takes the call."""
    calendar = _Calendar(steps)
    spans = [event for event in events if event.name.startswith(_GLOO)]
    # Calls are made by training threads; gloo's own threads have operators too, which copy results.
    calls: dict[int | str | None, list[float]] = {}
    for event in events:
        if event.name.startswith(_CALLS):
            calls.setdefault(event.tid, []).append(event.ts)
    for times in calls.values():
        times.sort()
    gloos = {event.tid for event in spans} - calls.keys()
    collectives = [_gloo_span(event, step) for event in spans if (step := calendar.step_at(event.ts)) is not None]
    computing = merge(
        (event.ts, event.end)
        for event in events
        if event.cat == "cpu_op" and event.tid not in gloos and not _communicates(event, calls.get(event.tid, ()))
    )
    return TraceEvents(
        device="cpu",
        steps=steps,
        collectives=_in_order(collectives),
        computing=tuple(computing),
        hiding=tuple(_hiding(computing, spans, (steps[0].start_us, steps[-1].end_us))),
    )


def _communicates(event: _Event, calls: Sequence[float]) -> bool:
    """Whether an operator is a call, or makes one: autograd's operators contain the hooks of FSDP, which wait.

    What else it does is in operators inside of it, or between two of them.

    Args:
        event: the operator.
        calls: when its thread made calls, ascending.
    """
    place = bisect.bisect_left(calls, event.ts)
    return place < len(calls) and calls[place] <= event.end


def _hiding(computing: Sequence[Interval], spans: Iterable[_Event], window: Interval) -> list[Interval]:
    ends = sorted(event.end for event in spans)
    waited = [
        (start, end)
        for start, end in gaps(computing, window)
        # Gloo's thread wakes the waiter before it records the end of its span.
        if bisect.bisect_right(ends, end + _LATE_END * (end - start)) > bisect.bisect_left(ends, start)
    ]
    return gaps(waited, window)


def _gloo_span(event: _Event, step: int) -> CollectiveSpan:
    sizes = _lists(event.args.dims) if event.args else []
    types = _lists(event.args.types) if event.args else []
    sent = [_size(_elements(dims), dtype) for dims, dtype in zip(sizes, types, strict=False)]
    sizes_sent = [size for size in sent if size is not None]
    return CollectiveSpan(
        op=_op_of(event.name.removeprefix(_GLOO)),
        size_bytes=sum(sizes_sent) if sizes_sent and len(sizes_sent) == len(sizes) else None,
        step=step,
        start_us=event.ts,
        end_us=event.end,
    )


def _plain(raw: msgspec.Raw) -> Any:
    try:
        return decode_json(raw, object) if memoryview(raw).nbytes <= _LONGEST_ARGUMENT else None
    except (msgspec.DecodeError, RecursionError):
        return None


def _lists(raw: msgspec.Raw) -> list[Any]:
    try:
        return decode_json(raw, list)
    except (msgspec.DecodeError, RecursionError):
        return []


def _elements(dims: Any) -> int | None:
    if (
        not isinstance(dims, list)
        or len(dims) > _MOST_DIMENSIONS
        or not all(_is_count(dimension) for dimension in dims)
    ):
        return None
    return math.prod(dims)


def _size(elements: Any, dtype: Any) -> int | None:
    if not _is_count(elements) or not isinstance(dtype, str):
        return None
    width = _ELEMENT_BYTES.get(dtype.lower().rpartition("::")[2])
    return elements * width if width else None


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < _MOST_ELEMENTS


def _op_of(name: Any) -> str:
    return _OPS.get(name.lower(), "unknown") if isinstance(name, str) else "unknown"


def _in_order(collectives: Iterable[CollectiveSpan]) -> tuple[CollectiveSpan, ...]:
    return tuple(sorted(collectives, key=lambda span: (span.start_us, span.end_us)))


# Tolerance between exposed communication of the window and of the counters, as a fraction of the step.
_AGREES = 0.1
_FEW_STEPS = 3
# By so much a training's collectives may be slower than nccl-test's.
_RATE_VARIES = 0.2
_BYTES_PER_MB = 1e6
_SLOWED = 0.1
_BUSY = 0.5
_MANY_KERNELS = 0.5
_US_PER_MS = 1000.0
_GB_PER_S = 1e-3
# A span of these has one partner, and the k-th of two workers may be different messages.
_PAIRWISE = frozenset({"send", "recv", "sendrecv", "unknown"})

_Key = tuple[int, str, str, int | None, int]

_ONE_TRACED = NOTES.rule(
    "one-worker-traced",
    about="a profiler's window of only one of several workers",
    message="only rank {rank} was traced, so the time that it waits for other ranks counts as communication",
    figures=("rank",),
)


def view_traces(
    traces: Mapping[int, TraceEvents],
    world_size: int,
    counted: WorkerSplit | None = None,
    called: Sequence[SeenCall] = (),
    scan: ScanCurves | None = None,
) -> TraceView:
    """The windows of the traced workers, by rank.

    The k-th call of one kind and size in a step is the same collective in every worker. The longer spans of it include
    waits for a straggler or a slower peer; the shortest is its transfer. Clocks of nodes differ, but all workers end a
    collective together: on each worker's own clock, the transfer is the last part of its span. A backend may run
    several collectives at once, hence the union of their transfers.

    Args:
        traces: by rank, at least one.
        world_size: number of workers, for groups of unknown size.
        counted: the mean step by the counters, for comparison.
        called: collectives of a step, as the busiest worker called them.
        scan: an nccl-test of the same nodes and workers, for comparison.
    """
    workers = tuple(_worker(rank, events) for rank, events in sorted(traces.items()))
    least = _waited_least(workers)
    single = len(traces) == 1 and world_size > 1
    reductions = [span for span in traces[least.rank].collectives if _is_reduction(span)]
    return TraceView(
        workers=workers,
        comm_ms=least.comm_ms,
        exposed_ms=least.exposed_ms,
        overlap=least.overlap,
        busbw_gb_per_s=found(lambda: _busbw(traces, least.rank, world_size)),
        message_bytes=_usual_sizes(reductions),
        findings=(
            *_compare(least, counted, traces[least.rank].device, _by_bytes(called, scan, world_size)),
            *_judge_kernels(traces[least.rank], called),
        ),
        notes=(FigureNote(**_ONE_TRACED.fields(None, {"rank": least.rank}), concerns="transfer"),) if single else (),
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
    reductions = {key: span for key, span in named[rank].items() if _is_reduction(span)}
    if not reductions:
        raise UnknownError(f"no all-reduce of {SMALL_BYTES} bytes or more ran in the window")
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


def _is_reduction(span: CollectiveSpan) -> bool:
    """Whether its time is that of its bytes: the scalar by which ZeRO looks for overflows has nothing but latency."""
    return span.op == "all_reduce" and (span.size_bytes is None or span.size_bytes >= SMALL_BYTES)


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


class _ByBytes(msgspec.Struct, frozen=True, kw_only=True):
    """What a step's collectives take one after another at the rate of an nccl-test."""

    took_ms: float
    size_bytes: float  # that they ask the busiest worker to send
    run_id: str  # of the nccl-test


def _by_bytes(called: Sequence[SeenCall], scan: ScanCurves | None, world_size: int) -> _ByBytes | None:
    """None without an nccl-test, or where not all large calls are among all workers."""
    curve = scan.curves.get("all_reduce") if scan is not None else None
    large = [call for call in called if not call.is_small and call.ranks > 1]
    if scan is None or curve is None or not large or any(call.ranks != world_size for call in large):
        return None
    factor = bus_factor("all_reduce", world_size)
    took_us = sum(call.count * curve.predict_us(call.asked_bytes / call.count / factor) for call in large if call.count)
    size_bytes = sum(call.asked_bytes for call in large)
    return _ByBytes(took_ms=took_us / _US_PER_MS, size_bytes=size_bytes, run_id=scan.run_id)


WINDOWS = RuleGroup("A profiler's window compared with the counters of the run")
_WINDOW_FIGURES = ("window_exposed_ms", "window_step_ms")
_BOTH_FIGURES = (*_WINDOW_FIGURES, "exposed_ms", "step_ms")
_WINDOW = "{window_exposed_ms} of {window_step_ms}"
_BOTH = (
    f"Exposed communication per step is {_WINDOW} in the profiler's window, and {{exposed_ms}} of {{step_ms}} "
    "according to the counters"
)
_ALONE = WINDOWS.rule(
    "window-alone",
    about="only the profiler's window shows exposed communication",
    message=f"Exposed communication per step is {_WINDOW} in the profiler's window. The counters do not show it.",
    figures=_WINDOW_FIGURES,
)
_AGREE = WINDOWS.rule(
    "agree",
    about="the window and the counters agree",
    message=f"{_BOTH}. They agree to within {{apart:.1%}} of the step time.",
    figures=_BOTH_FIGURES,
)


def _difference(code: str, about: str, why: str, *figures: str) -> Rule:
    return WINDOWS.rule(
        code,
        about=f"the window and the counters differ: {about}",
        message=f"{_BOTH}. They differ by {{apart:.0%}} of the step time{why}.",
        figures=(*_BOTH_FIGURES, *figures),
    )


_FEW = _difference(
    "few-steps",
    "the window has too few steps",
    ". The window has too few steps ({window_steps}) for a reliable comparison",
    "window_steps",
)
_LONGER = _difference(
    "profiled-step",
    "the profiler slows the training",
    ", because the profiler made each step {longer:.0%} longer",
    "longer",
)
_IDLE_GPU = _difference(
    "idle-gpu",
    "the GPU waits for the host",
    ". The GPU computed for {busy_share:.0%} of the time. If a collective runs while the GPU waits for the host, only "
    "the window counts that time as exposed communication. So the window's figure is an upper bound",
    "busy_share",
)
_UNEXPLAINED = _difference("unexplained", "the reason is unknown", " for an unknown reason")
_WINDOW_FITS = WINDOWS.rule(
    "window-fits-nccl-test",
    about="an nccl-test agrees with the window, not with the counters",
    message="At the speed that nccl-test {run_id} measured, the collectives of a step ({size:.3g} MB) take {took_ms}. "
    "The window's figure agrees with that, but the counters' figure is higher.",
    figures=("run_id", "took_ms"),
)
_COUNTERS_FIT = WINDOWS.rule(
    "counters-fit-nccl-test",
    about="an nccl-test agrees with the counters, not with the window",
    message="At the speed that nccl-test {run_id} measured, the collectives of a step ({size:.3g} MB) take {took_ms}. "
    "The counters' figure agrees with that, but the window's figure is higher.",
    figures=("run_id", "took_ms"),
)
_NO_KERNELS = WINDOWS.rule(
    "no-kernels",
    about="collectives that run without NCCL kernels",
    message="The trace has {kernels:.0f} NCCL kernels per step for {calls:.0f} calls. Collectives that use copy "
    "engines or symmetric memory run without NCCL kernels, so the trace does not show them.",
    figures=("kernels", "calls"),
)


def _compare(
    worker: WorkerTrace, counted: WorkerSplit | None, device: str, by_bytes: _ByBytes | None
) -> Iterator[Finding]:
    window = {"window_exposed_ms": worker.exposed_ms, "window_step_ms": worker.step_ms}
    counted_ms = None if counted is None else or_none(counted.exposed_ms)
    if counted is None or counted_ms is None or counted.step_ms <= 0:
        yield _ALONE.found(None, **window)
        return
    step_ms, more_ms = counted.step_ms, worker.exposed_ms - counted_ms
    apart = abs(more_ms) / step_ms
    longer = worker.step_ms / step_ms - 1
    # What makes a trace show more exposed communication than the counters.
    if apart <= _AGREES:
        rule = _AGREE
    elif worker.steps < _FEW_STEPS:
        rule = _FEW
    elif more_ms > 0 and longer > _SLOWED and apart <= longer + _AGREES:
        rule = _LONGER
    elif more_ms > 0 and device == "cuda" and worker.compute_ms < _BUSY * worker.step_ms:
        rule = _IDLE_GPU
    else:
        rule = _UNEXPLAINED
    yield rule.found(
        None,
        **window,
        exposed_ms=counted_ms,
        step_ms=step_ms,
        apart=apart,
        window_steps=worker.steps,
        longer=longer,
        busy_share=worker.compute_ms / worker.step_ms if worker.step_ms else None,
    )
    if rule is not _AGREE and by_bytes is not None:
        # Exposed communication is no longer than the communication.
        most_ms = (1 + _RATE_VARIES) * by_bytes.took_ms
        if (worker.exposed_ms <= most_ms) != (counted_ms <= most_ms):
            size_mb = by_bytes.size_bytes / _BYTES_PER_MB
            fits = _WINDOW_FITS if worker.exposed_ms <= most_ms else _COUNTERS_FIT
            yield fits.found(None, run_id=by_bytes.run_id, size=size_mb, took_ms=by_bytes.took_ms)


def _judge_kernels(events: TraceEvents, called: Sequence[SeenCall]) -> Iterator[Finding]:
    calls = sum(call.count for call in called if call.op != "barrier" and call.ranks > 1)
    kernels = len(events.collectives) / len(events.steps)
    # Several calls may be one kernel (ncclGroupStart).
    if events.device == "cuda" and kernels < _MANY_KERNELS * calls:
        yield _NO_KERNELS.found(None, kernels=kernels, calls=calls)


def _waited_least(workers: Sequence[WorkerTrace]) -> WorkerTrace:
    return min(workers, key=lambda worker: (worker.exposed_ms, worker.comm_ms))
