"""Collectives of torch.distributed: counts calls and their sizes, and times how long a worker waits in them.

S is counted as in nccl-tests: for an all-gather, gather or scatter the size of all workers' parts, for a reduce-scatter
or all-to-all the size of one worker's input, else the size of the tensor.

On the CPU the host waits, in the phase `comm`, or `comm_local` inside a node. On a GPU the computing stream waits,
which pairs of CUDA events time without synchronizing: later steps query whether the events are over. FSDP and DeepSpeed
call collectives on other streams. The computing stream then waits for those by events, or the host does and launches no
computation meanwhile. That wait is timed instead, but no longer than the calls themselves took, since a loop may also
compute on such a stream. Waits elsewhere are not seen: DDP's reducer waits in C++.
"""

from __future__ import annotations

import collections
import functools
import inspect
import os
import sys
import threading
import weakref
from typing import Any, Callable, Deque, Dict, List, NamedTuple, Optional, Sequence, Tuple

from . import compiler
from .guard import Guard, Hooks
from .last_calls import LastCalls
from .steps import Steps, is_capturing

# From `_KEPT_PAIRS` waits in a step on, the finished ones are added up. The host cannot be further ahead of the device
# than the driver's launch queue, which is shorter than `_MOST_PAIRS`.
_KEPT_PAIRS = 512
_MOST_PAIRS = 16384
# The most timed calls on other streams that nobody has waited for.
_MOST_SPANS = 4096
# Waits that one query covers.
_ADDED = 64
# The host is never this many steps ahead of the device; if a device hangs, older steps are dropped.
_MOST_PENDING = 64
# Attribute of an event: the stream it was recorded on and the number of calls there so far, or None.
_MARK = "_multinode_mark"

_Reader = Callable[[Tuple[Any, ...], Dict[str, Any]], Any]
_Ended = Callable[[], None]
_GroupOf = Callable[[Any, Any], Any]
_Count = Callable[[str, Any, float], None]


class _Kind(NamedTuple):
    """The collective of a function, and the parameters that determine its size and group."""

    op: str  # the collective, as in CallCount
    sized: str = ""  # parameter with the tensor or tensors; empty for a barrier, which carries nothing
    shared: bool = False  # whether the tensor is one worker's share of S
    group: str = "group"


# batch_isend_irecv and the collectives of objects are missing, because they call others of these.
_PROCESS_GROUP: Dict[str, _Kind] = {
    "all_reduce": _Kind("all_reduce", "tensor"),
    "all_reduce_coalesced": _Kind("all_reduce", "tensors"),
    "all_gather": _Kind("all_gather", "tensor_list"),
    "all_gather_into_tensor": _Kind("all_gather", "output_tensor"),
    "all_gather_single": _Kind("all_gather", "output_tensor"),
    "_all_gather_base": _Kind("all_gather", "output_tensor"),
    "all_gather_coalesced": _Kind("all_gather", "output_tensor_lists"),
    "reduce_scatter": _Kind("reduce_scatter", "input_list"),
    "reduce_scatter_tensor": _Kind("reduce_scatter", "input"),
    "reduce_scatter_single": _Kind("reduce_scatter", "input"),
    "_reduce_scatter_base": _Kind("reduce_scatter", "input"),
    "broadcast": _Kind("broadcast", "tensor"),
    "all_to_all": _Kind("all_to_all", "input_tensor_list"),
    "all_to_all_single": _Kind("all_to_all", "input"),
    "reduce": _Kind("reduce", "tensor"),
    "gather": _Kind("gather", "tensor", shared=True),
    "scatter": _Kind("scatter", "tensor", shared=True),
    "send": _Kind("send", "tensor"),
    "isend": _Kind("send", "tensor"),
    "recv": _Kind("recv", "tensor"),
    "irecv": _Kind("recv", "tensor"),
    "barrier": _Kind("barrier"),
    "monitored_barrier": _Kind("barrier"),
}
"""Functions of torch.distributed.distributed_c10d, which torch.distributed re-exports."""

_PACKAGE: Dict[str, _Kind] = {"_broadcast_coalesced": _Kind("broadcast", "tensors", group="process_group")}
"""Functions of torch.distributed itself: DDP's buffers and its first parameters. Its buckets count as one call."""

_FUNCTIONAL: Dict[str, _Kind] = {
    "all_reduce": _Kind("all_reduce", "self"),
    "all_reduce_coalesced": _Kind("all_reduce", "self"),
    "all_gather_single": _Kind("all_gather", "self", shared=True),
    "all_gather_single_coalesced": _Kind("all_gather", "self", shared=True),
    "all_gather_tensor": _Kind("all_gather", "self", shared=True),
    "all_gather_tensor_autograd": _Kind("all_gather", "self", shared=True),
    "all_gather_into_tensor_coalesced": _Kind("all_gather", "self", shared=True),
    "reduce_scatter_single": _Kind("reduce_scatter", "self"),
    "reduce_scatter_single_coalesced": _Kind("reduce_scatter", "inputs"),
    "reduce_scatter_tensor": _Kind("reduce_scatter", "self"),
    "reduce_scatter_tensor_autograd": _Kind("reduce_scatter", "self"),
    "reduce_scatter_tensor_coalesced": _Kind("reduce_scatter", "inputs"),
    "all_to_all_single": _Kind("all_to_all", "self"),
    "all_to_all_single_autograd": _Kind("all_to_all", "self"),
    "broadcast": _Kind("broadcast", "self"),
}
"""Functions of torch.distributed._functional_collectives, which DTensor calls."""

# Python cannot read the signature of pybind11's functions.
_BUILTIN_PARAMETERS = {"_broadcast_coalesced": ["process_group", "tensors", "buffer_size", "src"]}


class _Nesting(threading.local):
    inside = False


class CollectiveHooks:
    """Wraps functions of torch.distributed to count and time their outermost calls.

    Args:
        steps: its phase clock times waits of the host.
        count: called with a collective's name, the process group (None: the default one) and S in bytes.
        last_calls: each call is written there before it is made.
    """

    def __init__(
        self,
        steps: Steps,
        guard: Guard,
        count: _Count,
        device: DeviceWaits,
        last_calls: Optional[LastCalls] = None,
    ) -> None:
        self._phases = steps.phases
        self._guard = guard
        self._count = count
        self._device = device
        self._last_calls = last_calls
        self._nesting = _Nesting()
        # whether each group is inside this node; and asynchronous results of such groups
        self._local: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._results: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def hooks(self) -> Hooks:
        """Modules to wait for, and what to do with each.

        The first module is wrapped before others copy its functions. So torch.distributed, DeepSpeed, and
        torch.compile's table of collectives, which compares identities, all get the wrapped ones.
        """
        return [
            ("torch.distributed.distributed_c10d", self._hook_process_groups),
            ("torch.distributed", self._hook_package),
            ("torch.distributed._functional_collectives", self._hook_functional),
            ("torch.cuda.streams", self._hook_events),
            ("torch.cuda", self._hook_device),
            ("torch.accelerator", self._hook_accelerator),
        ]

    def _hook_process_groups(self, module: Any) -> None:
        self._replace(module, _PROCESS_GROUP)
        module.Work.wait = self._timed(module.Work.wait)

    def _hook_package(self, module: Any) -> None:
        self._replace(module, _PACKAGE)

    def _hook_functional(self, module: Any) -> None:
        self._replace(module, _FUNCTIONAL, functools.partial(_group_of, module))
        module.wait_tensor = self._timed(module.wait_tensor)

    def _hook_events(self, module: Any) -> None:
        """Wrap Event.record and Event.wait, which wait_event, wait_stream and record_event of streams call."""
        record, wait, device = module.Event.record, module.Event.wait, self._device
        mark, begin = device.mark, device.begin_event

        @functools.wraps(record)
        def recorded(event: Any, stream: Any = None) -> None:
            record(event, stream)
            if compiler.is_compiling() or not device.outstanding:
                return
            try:
                mark(event, stream)
            except Exception as error:  # noqa: BLE001 - see _counted
                self._guard.tell("marking an event", error)

        @functools.wraps(wait)
        def waited(event: Any, stream: Any = None) -> None:
            if compiler.is_compiling() or not device.outstanding:
                wait(event, stream)
                return
            ended = None
            try:
                ended = begin(event, stream)
            except Exception as error:  # noqa: BLE001 - see _counted
                self._guard.tell("timing a wait for an event", error)
            if ended is None:
                wait(event, stream)
                return
            try:
                wait(event, stream)
            finally:
                self._end(ended)

        module.Event.record, module.Event.wait = recorded, waited
        self._time_waits(module.Event, "synchronize", device.begin_event_on_host)
        self._time_waits(getattr(module, "Stream", None), "synchronize", device.begin_stream_on_host)

    def _hook_device(self, module: Any) -> None:
        self._time_waits(module, "synchronize", self._device.begin_device_on_host)

    def _hook_accelerator(self, module: Any) -> None:
        """Wrap torch.accelerator; its C++ streams, whose waits are not seen, are replaced by those of torch.cuda."""
        self._hook_device(module)
        current, device = getattr(module, "current_stream", None), self._device
        torch = sys.modules["torch"]
        cuda = getattr(torch, "cuda", None)
        streams = [getattr(owner, "Stream", None) for owner in (torch, cuda)]
        if current is None or not all(streams) or not set(_public(streams[0])) <= set(_public(streams[1])):
            return

        @functools.wraps(current)
        def current_stream(*args: Any) -> Any:
            if compiler.is_compiling() or not device.in_use():
                return current(*args)
            return sys.modules["torch"].cuda.current_stream(*args)

        module.current_stream = current_stream

    def _time_waits(self, owner: Any, name: str, begin: Callable[..., Optional[_Ended]]) -> None:
        """Time a function in which the host waits for streams with calls that nobody has waited for."""
        device, function = self._device, getattr(owner, name, None)
        if function is None:
            return

        @functools.wraps(function)
        def awaiting(*args: Any, **kwargs: Any) -> Any:
            if compiler.is_compiling() or not device.outstanding:
                return function(*args, **kwargs)
            ended = None
            try:
                ended = begin(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - see _counted
                self._guard.tell("timing a wait for a stream", error)
            try:
                return function(*args, **kwargs)
            finally:
                if ended is not None:
                    self._end(ended)

        setattr(owner, name, awaiting)

    def _replace(self, module: Any, kinds: Dict[str, _Kind], group_of: Optional[_GroupOf] = None) -> None:
        for name, kind in _present(module, kinds).items():
            function = getattr(module, name)
            try:
                setattr(module, name, self._counted(function, _Call(function, kind), group_of))
            except Exception as error:  # noqa: BLE001 - the other functions can be counted all the same
                self._guard.tell("counting the calls of %s.%s" % (module.__name__, name), error)

    def _counted(self, function: Callable[..., Any], call: _Call, group_of: Optional[_GroupOf]) -> Callable[..., Any]:
        """Wrap a function so that its outermost calls are counted and timed."""
        nesting, last_calls = self._nesting, self._last_calls

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if compiler.is_compiling() or nesting.inside:
                return function(*args, **kwargs)
            nesting.inside = True
            ended = returned = None
            try:
                tensors = call.tensors(args, kwargs)
                group = self._group(call, group_of, args, kwargs)
                local = self._is_local(group)
                ended = self._begin(call, tensors, args, kwargs, local=local)
                if last_calls is not None:
                    # A functional collective returns a tensor that is waited for later.
                    is_waited = group_of is None and call.waits(args, kwargs)
                    returned = self._write(last_calls, call, group, tensors, is_waited=is_waited)
                result = function(*args, **kwargs)
            finally:
                nesting.inside = False
                if ended is not None:
                    self._end(ended)
            try:
                if returned is not None:
                    returned()
                if local and result is not None:
                    self._remember(result)
                size_bytes = _size_bytes(tensors)
                self._count(call.op, group, size_bytes * _workers(group) if call.shared else size_bytes)
            except Exception as error:  # noqa: BLE001 - a training never stops because it is being watched
                self._guard.tell("counting a collective", error)
            return result

        return counted

    def _write(
        self, last_calls: LastCalls, call: _Call, group: Any, tensors: Any, *, is_waited: bool
    ) -> Optional[_Ended]:
        try:
            is_waited = is_waited and not _is_on_gpu(tensors)
            return last_calls.enter(call.op, group, tensors, is_share=call.shared, is_waited=is_waited)
        except Exception as error:  # noqa: BLE001 - see _counted
            self._guard.tell("writing a collective", error)
            return None

    def _group(self, call: _Call, group_of: Optional[_GroupOf], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        group = call.group(args, kwargs)
        try:
            return group if group_of is None else group_of(group, call.tag(args, kwargs))
        except Exception as error:  # noqa: BLE001 - see _counted
            self._guard.tell("reading a collective's group", error)
            return None

    def _is_local(self, group: Any) -> bool:
        """Whether all workers of a group are on this node, in a job of several nodes."""
        # None is the default group, which spans all nodes; a number stands for a group without this worker.
        if group is None or isinstance(group, int):
            return False
        try:
            known = self._local.get(group)
            if known is None:
                known = self._local[group] = _is_local(group)
        except Exception as error:  # noqa: BLE001 - see _counted
            self._guard.tell("placing a group", error)
            return False
        return known

    def _remember(self, result: Any) -> None:
        """Remember the result of a local group for a later wait: a Work, or a functional collective's tensor."""
        result = getattr(result, "elem", result)
        self._results[id(result)] = result

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that waits for a collective; calls inside a timed collective are not timed again."""
        nesting = self._nesting

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if compiler.is_compiling() or nesting.inside:
                return function(*args, **kwargs)
            result = args[0] if args else None
            ended = self._begin_wait(local=self._results.get(id(result)) is result and result is not None)
            try:
                return function(*args, **kwargs)
            finally:
                if ended is not None:
                    self._end(ended)

        return timed

    def _begin(
        self, call: _Call, tensors: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any], *, local: bool
    ) -> Optional[_Ended]:
        try:
            # On a GPU the host continues at once, so its time says nothing.
            if _is_on_gpu(tensors):
                return self._device.begin(local=local) if call.waits(args, kwargs) else None
            return self._phases.leave if self._phases.enter(_phase(local=local)) else None
        except Exception as error:  # noqa: BLE001 - see _counted
            self._guard.tell("timing a collective", error)
            return None

    def _begin_wait(self, *, local: bool) -> Optional[_Ended]:
        # A Work does not tell its device, so host and device are both timed; one of the two hardly waits. If another
        # stream waits, the host does not.
        try:
            device_ended = self._device.begin(local=local)
            if _is_elsewhere(device_ended) or not self._phases.enter(_phase(local=local)):
                return device_ended
            if device_ended is None:
                return self._phases.leave
            return functools.partial(_end_both, self._phases.leave, device_ended)
        except Exception as error:  # noqa: BLE001 - see _counted
            self._guard.tell("timing a wait", error)
            return None

    def _end(self, ended: _Ended) -> None:
        try:
            ended()
        except Exception as error:  # noqa: BLE001 - see _counted
            self._guard.tell("timing a collective", error)


class CudaStream:
    """The default stream of the current GPU, on which torch computes unless told otherwise.

    It is as cheap as torch allows: `torch.cuda.current_stream()` checks a lot and creates an object, and a training
    with small steps may wait hundreds of times per step.
    """

    def __init__(self) -> None:
        self._in_use = False
        self._current: Optional[Callable[[], int]] = None
        self._event: Optional[Callable[[], Any]] = None
        self._streams: Dict[Tuple[int, int], Any] = {}

    def in_use(self) -> bool:
        """Whether this worker uses a GPU; the check does not initialize CUDA."""
        if not self._in_use:
            self._in_use = bool(sys.modules["torch"].cuda.is_initialized())
        return self._in_use

    def current(self) -> int:
        """The handle of the current stream: 0 is the default stream.

        It is never 0 during the capture of a CUDA graph, which needs another stream.
        """
        if self._current is None:
            self._current = _current_handle(sys.modules["torch"])
        return self._current()

    def here(self, device: Any) -> Any:
        """The current stream of this GPU as torch's object; the GPU must be the current one."""
        torch = sys.modules["torch"]
        quick = _quick(torch)
        if quick is None:
            return torch.cuda.current_stream(device)
        index_of, handle_of = quick
        index = index_of()
        key = (index, handle_of(index))
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = torch.cuda.current_stream(device)
        return stream

    def event(self) -> Any:
        """A new timing event. `record` records on the default stream, `record_on` on a given one."""
        if self._event is None:
            self._event = _event_of_computing(sys.modules["torch"])
        return self._event()


def _quick(torch: Any) -> Optional[Tuple[Callable[[], int], Callable[[int], int]]]:
    """Functions for the current GPU and its current stream's handle, which torch's compiler uses; None if missing."""
    core = getattr(torch, "_C", None)
    index_of, handle_of = (getattr(core, name, None) for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"))
    return None if index_of is None or handle_of is None else (index_of, handle_of)


def _current_handle(torch: Any) -> Callable[[], int]:
    quick = _quick(torch)
    if quick is None:
        return lambda: int(torch.cuda.current_stream().cuda_stream)
    index_of, handle_of = quick
    return lambda: handle_of(index_of())


def _event_of_computing(torch: Any) -> Callable[[], Any]:
    cuda, quick = torch.cuda, _quick(torch)
    event, base = cuda.Event, getattr(getattr(torch, "_C", None), "_CudaEventBase", None)
    # The C++ method that torch's `record` calls, or else torch's `record` without our wrapper.
    below = base if base is not None and issubclass(event, base) else None
    record = getattr(event.record, "__wrapped__", event.record) if below is None else below.record
    streams: Dict[int, Any] = {}

    def record_on_computing(self: Any) -> None:
        if quick is None:
            stream = cuda.current_stream()
            record(self, cuda.default_stream() if stream.cuda_stream else stream)
            return
        index = quick[0]()
        stream = streams.get(index)
        if stream is None:
            stream = streams[index] = cuda.default_stream()
        record(self, stream)

    methods = {"record": record_on_computing, "record_on": record}
    if below is not None:
        methods.update(query=below.query, elapsed_time=below.elapsed_time)
    return functools.partial(type("ComputingEvent", (event,), methods), enable_timing=True)


class _OtherStream:
    """Collectives on a stream other than the computing one.

    Attributes:
        issued: calls so far; `awaited` of them have been waited for, and `before` of them are of earlier steps.
        spans: spans of the calls that nobody has waited for, in order; None for a call that was not timed.
    """

    __slots__ = ("awaited", "before", "handle", "issued", "spans")

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.issued = self.awaited = self.before = 0
        self.spans: Deque[Optional[_Span]] = collections.deque()


class _Span:
    """A pair of events around a call on a stream other than the computing one, recorded on that stream."""

    __slots__ = ("_stream", "end", "local", "start")

    def __init__(self, start: Any, end: Any) -> None:
        self.start = start
        self.end = end
        self.local = False  # whether it was in a group inside the node
        self._stream: Any = None

    def begin(self, stream: Any) -> None:
        """The call begins on this stream."""
        self._stream = stream
        self.start.record_on(stream)

    def over(self) -> None:
        """The call has been issued: the end event follows it on its stream."""
        self.end.record_on(self._stream)


def _is_elsewhere(ended: Optional[_Ended]) -> bool:
    """Whether this ends a wait that does not delay the computing stream."""
    return ended is _on_another_stream or isinstance(getattr(ended, "__self__", None), _Span)


def _public(owner: Any) -> List[str]:
    return [name for name in dir(owner) if not name.startswith("_")]


class _Wait:
    """A pair of events around a wait, and the number of calls of the step that it times.

    Attributes:
        spans: calls on other streams; only their time counts as waiting. None: the whole wait counts.
    """

    __slots__ = ("_waits", "calls", "end", "local", "spans", "start")

    def __init__(self, waits: DeviceWaits, start: Any, end: Any) -> None:
        self._waits = waits
        self.start = start
        self.end = end
        self.calls = 0
        self.spans: Optional[List[_Span]] = None
        self.local = False  # whether it was in a group inside the node

    def over(self) -> None:
        """The wait ends."""
        self._waits.end(self)

    def took_ms(self) -> Tuple[float, float]:
        """Milliseconds of the wait that calls took, and those of calls inside the node; all events are over."""
        whole_ms = float(self.start.elapsed_time(self.end))
        if self.spans is None or whole_ms <= 0:
            return whole_ms, whole_ms if self.local else 0.0
        took_ms = self._covered_ms(self.spans, whole_ms)
        between = [span for span in self.spans if not span.local]
        if len(between) == len(self.spans):
            return took_ms, 0.0
        # A call inside the node that overlaps one between nodes does not extend the wait.
        return took_ms, took_ms - self._covered_ms(between, whole_ms)

    def _covered_ms(self, spans: Sequence[_Span], whole_ms: float) -> float:
        # Calls on several streams may overlap.
        ends = sorted(
            (max(0.0, self.start.elapsed_time(span.start)), min(whole_ms, self.start.elapsed_time(span.end)))
            for span in spans
        )
        took_ms = reached_ms = 0.0
        for start_ms, end_ms in ends:
            took_ms += max(0.0, end_ms - max(start_ms, reached_ms))
            reached_ms = max(reached_ms, end_ms)
        return took_ms


class _StepWaits(NamedTuple):
    """Waits of the computing stream in a step."""

    step: int
    added_ms: Tuple[float, float]  # milliseconds of waits that are added up already, and those inside the node
    pairs: List[_Wait]
    # calls of the step that the pairs time. Calls of earlier steps do not count: an earlier wait for them may have been
    # missed.
    calls: int
    of_calls: int  # all calls of this step
    dropped: int  # waits beyond the limit


def _on_another_stream() -> None:
    """Ends a wait that delays no computation."""


class DeviceWaits:
    """Records an event before and after each wait, and adds up the times between them.

    A wait lasts from the last computation before the call to the end of the collective. It includes the transfer as
    well as waiting for slower peers.
    """

    def __init__(self, steps: Steps, stream: Any) -> None:
        # number of calls on other streams that nobody has waited for; if it is 0, no event has to be marked
        self.outstanding = 0
        self._steps = steps
        self._stream = stream
        self._lock = threading.Lock()
        self._pairs: List[_Wait] = []
        self._added_ms = (0.0, 0.0)
        self._calls = 0
        self._of_calls = 0
        self._dropped = 0
        self._others: Dict[int, _OtherStream] = {}
        self._unused: List[_Wait] = []
        self._unused_spans: List[_Span] = []
        self._pending: Deque[_StepWaits] = collections.deque(maxlen=_MOST_PENDING)
        steps.meters.append(self.close)

    def in_use(self) -> bool:
        """Whether this worker uses a GPU."""
        return bool(self._stream.in_use())

    def begin(self, *, local: bool = False) -> Optional[_Ended]:
        """A wait begins; returns the function that ends it, or None if it is not timed.

        On another stream, it delays no computation until the computing stream or the host waits for that stream.
        """
        if not self._stream.in_use():
            return None
        current = self._stream.current()
        with self._lock:
            self._of_calls += 1
            if current:
                span = self._begin_span(local=local)
                self._issue(current, [span])
                return _on_another_stream if span is None else span.over
        return self._begin_pair(1, local=local)

    def mark(self, event: Any, stream: Any) -> None:
        """An event was recorded on a stream (None: the current one): it marks the calls on that stream so far."""
        other = self._others.get(self._handle(stream))
        if other is not None and other.issued > other.awaited:
            setattr(event, _MARK, (other, other.issued))
        elif getattr(event, _MARK, None) is not None:
            setattr(event, _MARK, None)

    def begin_event(self, event: Any, stream: Any = None) -> Optional[_Ended]:
        """A stream (None: the current one) begins to wait for an event; returns as `begin`.

        If it is not the computing stream, its calls stay outstanding until the computing stream waits for this one.
        """
        mark = getattr(event, _MARK, None)
        if mark is None:
            return None
        other, issued = mark
        if issued <= other.awaited:
            return None
        handle = self._handle(stream)
        if handle == other.handle:
            return None
        with self._lock:
            calls, late, spans = self._take(other, issued)
            if handle:
                self._issue(handle, spans, late)
                return None
        return self._begin_pair(calls, spans)

    def begin_event_on_host(self, event: Any) -> Optional[_Ended]:
        """The host begins to wait for an event, so it launches no computation; returns as `begin`."""
        mark = getattr(event, _MARK, None)
        return self._begin_on_host([mark] if mark is not None else [])

    def begin_stream_on_host(self, stream: Any) -> Optional[_Ended]:
        """The host begins to wait for a stream; returns as `begin`."""
        other = self._others.get(int(stream.cuda_stream))
        return self._begin_on_host([(other, other.issued)] if other is not None else [])

    def begin_device_on_host(self, *_: Any, **__: Any) -> Optional[_Ended]:
        """The host begins to wait for all streams; returns as `begin`."""
        return self._begin_on_host([(other, other.issued) for other in list(self._others.values())])

    def _begin_on_host(self, awaited: List[Tuple[_OtherStream, int]]) -> Optional[_Ended]:
        with self._lock:
            taken = [self._take(other, issued) for other, issued in awaited if issued > other.awaited]
        if not taken:
            return None
        return self._begin_pair(sum(calls for calls, _, _ in taken), [span for *_, spans in taken for span in spans])

    def _begin_span(self, *, local: bool) -> Optional[_Span]:
        """A call begins on the current stream, which is not the computing one; None if it cannot be timed."""
        if self.outstanding >= _MOST_SPANS or is_capturing():
            return None
        span = self._unused_spans.pop() if self._unused_spans else _Span(self._stream.event(), self._stream.event())
        span.local = local
        span.begin(self._stream.here(None))
        return span

    def _issue(self, handle: int, spans: Sequence[Optional[_Span]], late: int = 0) -> None:
        other = self._others.get(handle)
        if other is None:
            other = self._others[handle] = _OtherStream(handle)
        other.issued += len(spans)
        other.before += late
        other.spans.extend(spans)
        self.outstanding += len(spans)

    def _take(self, other: _OtherStream, issued: int) -> Tuple[int, int, List[Optional[_Span]]]:
        """Take the calls that are waited for, up to number `issued`: counts of this and of earlier steps, and spans."""
        calls = issued - other.awaited
        late = min(calls, max(0, other.before - other.awaited))
        other.awaited = issued
        self.outstanding -= calls
        return calls - late, late, [other.spans.popleft() for _ in range(calls)]

    def _handle(self, stream: Any) -> int:
        return self._stream.current() if stream is None else int(stream.cuda_stream)

    def _begin_pair(
        self, calls: int, spans: Optional[Sequence[Optional[_Span]]] = None, *, local: bool = False
    ) -> Optional[_Ended]:
        """A wait for a number of calls begins; calls on other streams have spans."""
        timed = [span for span in spans or () if span is not None]
        with self._lock:
            if len(self._pairs) >= _KEPT_PAIRS:
                self._add_up()
            if len(self._pairs) >= _MOST_PAIRS:
                self._dropped += 1
                return None
            wait = self._unused.pop() if self._unused else None
        wait = wait or _Wait(self, self._stream.event(), self._stream.event())
        # A call without a span was not timed.
        wait.calls = calls if spans is None else max(0, calls - (len(spans) - len(timed)))
        wait.spans = timed if spans is not None else None
        wait.local = local
        wait.start.record()
        return wait.over

    def _add_up(self) -> None:
        """Add up the waits of this step that are over, so that their events can be reused."""
        if is_capturing():
            return
        over = 0
        # Waits are in stream order: if the last one of a group is over, all of them are.
        while over < len(self._pairs) and self._pairs[min(over + _ADDED, len(self._pairs)) - 1].end.query():
            over = min(over + _ADDED, len(self._pairs))
        done, self._pairs = self._pairs[:over], self._pairs[over:]
        self._added_ms = self._sum_ms(self._added_ms, done)

    def _sum_ms(self, before: Tuple[float, float], pairs: Sequence[_Wait]) -> Tuple[float, float]:
        """Add the times of waits that are over; frees their events for reuse."""
        took_ms = [before, *(wait.took_ms() for wait in pairs)]
        sum_ms = (sum(whole for whole, _ in took_ms), sum(local for _, local in took_ms))
        for wait in pairs:
            self._unused_spans.extend(wait.spans or ())
            wait.spans = None
        self._unused.extend(pairs)
        return sum_ms

    def close(self, step: int) -> Dict[str, Any]:
        """A meter: queues the waits of this step, and records steps whose waits are over."""
        with self._lock:
            ended = _StepWaits(step, self._added_ms, self._pairs, self._calls, self._of_calls, self._dropped)
            self._pairs, self._added_ms, self._calls, self._of_calls, self._dropped = [], (0.0, 0.0), 0, 0, 0
            for other in self._others.values():
                other.before = other.issued
        # A step with untimed calls is recorded, too: it differs from a step without calls.
        if ended.of_calls or ended.pairs:
            self._pending.append(ended)
        while self._pending and _are_over(self._pending[0]):
            self._record(self._pending.popleft())
        return {}

    def end(self, wait: _Wait) -> None:
        """A wait that began ends."""
        # The lock keeps the pairs in stream order.
        with self._lock:
            wait.end.record()
            self._pairs.append(wait)
            self._calls += wait.calls

    def _record(self, waits: _StepWaits) -> None:
        with self._lock:
            wait_ms, local_ms = self._sum_ms(waits.added_ms, waits.pairs)
        fields = {"calls": waits.calls, "of_calls": waits.of_calls}
        if waits.dropped:
            fields["dropped"] = waits.dropped
        times = {"wait_us": wait_ms * 1000, **({"local_us": local_ms * 1000} if local_ms else {})}
        self._steps.note("device_wait", step=waits.step, **times, **fields)


class _Call:
    """Reads the arguments of one function's calls.

    Raises:
        ValueError: the function lacks a parameter of its `_Kind`.
    """

    def __init__(self, function: Callable[..., Any], kind: _Kind) -> None:
        name = function.__name__
        parameters = _BUILTIN_PARAMETERS.get(name) or list(inspect.signature(function).parameters)
        for wanted in (kind.sized, kind.group):
            if wanted and wanted not in parameters:
                raise ValueError("%s has no parameter %s" % (name, wanted))
        self.op = kind.op
        self.shared = kind.shared
        # reads the tensor or tensors of a call; None for a barrier
        self.tensors = _reader(parameters, kind.sized)
        # reads the process group as it was given; None is the default group
        self.group = _reader(parameters, kind.group)
        # reads the tag by which functional collectives distinguish groups of equal ranks
        self.tag = _reader(parameters, "tag")
        self._asynchronous = _reader(parameters, "async_op")
        # These two are always asynchronous, without a parameter that says so.
        self._never_waits = name in ("isend", "irecv")

    def waits(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> bool:
        """Whether the call is synchronous, so that later work waits for it."""
        return not (self._never_waits or self._asynchronous(args, kwargs))


def _reader(parameters: List[str], name: str) -> _Reader:
    position = parameters.index(name) if name in parameters else len(parameters)

    def read(args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        return args[position] if position < len(args) else kwargs.get(name)

    return read


def _present(module: Any, kinds: Dict[str, _Kind]) -> Dict[str, _Kind]:
    """The functions that this torch has, without older names that only warn and call a newer function."""
    return {name: kind for name, kind in kinds.items() if hasattr(module, name) and not _hands_on(module, name)}


def _hands_on(module: Any, name: str) -> bool:
    # A deprecated functional collective warns about its caller, then calls the newer one. If it were wrapped, the
    # warning would name us as the caller.
    newer = name.replace("_into_tensor", "_single").replace("_tensor", "_single")
    return module.__name__.endswith("_functional_collectives") and newer != name and hasattr(module, newer)


def _end_both(first: _Ended, second: _Ended) -> None:
    try:
        first()
    finally:
        second()


def _is_on_gpu(tensors: Any) -> bool:
    while isinstance(tensors, (list, tuple)) and tensors:
        tensors = tensors[0]
    return bool(getattr(tensors, "is_cuda", False))


def _size_bytes(tensors: Any) -> int:
    if isinstance(tensors, (list, tuple)):
        return sum(map(_size_bytes, tensors))
    return 0 if tensors is None else tensors.nbytes


def _is_local(group: Any) -> bool:
    """Whether all workers of a group are on this node, of several; ranks of a node are consecutive."""
    first = int(os.environ.get("RANK", "0")) - int(os.environ.get("LOCAL_RANK", "0"))
    count, world = (int(os.environ.get(name, "0")) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    if not 1 < count < world or not isinstance(group, c10d.ProcessGroup):
        return False
    return all(first <= rank < first + count for rank in c10d.get_process_group_ranks(group))


def _phase(*, local: bool) -> str:
    return "comm_local" if local else "comm"


def _workers(group: Any) -> int:
    """Number of workers in a group; 0 for a group without this worker, which is given as a number."""
    return int(sys.modules["torch"].distributed.get_world_size(group)) if not isinstance(group, int) else 0


def _group_of(functional: Any, group: Any, tag: Any) -> Any:
    """The process group of a functional collective, which may be given in many forms.

    During tracing nothing is sent: the result is then a number, as for a group without this worker.
    """
    c10d = functional.c10d
    if functional._are_we_tracing():  # noqa: SLF001 - torch asks itself so
        return c10d.GroupMember.NON_GROUP_MEMBER
    if isinstance(group, str):
        return c10d._resolve_process_group(group)  # noqa: SLF001 - a name is resolved so
    if isinstance(group, tuple):
        mesh, dimension = group
        return mesh.get_group(dimension)
    if isinstance(group, list):
        return c10d._find_pg_by_ranks_and_tag(tag or "", group)  # noqa: SLF001 - ranks are resolved so
    return group.get_group() if hasattr(group, "get_group") else group


def _are_over(waits: _StepWaits) -> bool:
    # Pairs are in stream order, so the last one is over last.
    return not waits.pairs or bool(waits.pairs[-1].end.query())
