"""Collectives: which functions of torch.distributed communicate, what a call carries, and who waits how long in them.

S is counted as nccl-tests does: of an all-gather, a gather and a scatter what all workers have together, of a
reduce-scatter and an all-to-all what one worker puts in, of all else the tensor.

On the CPU the host waits, in the phase `comm`, or `comm_local` inside a node. On a GPU the computing stream does, timed
by pairs of CUDA events, and nothing is synchronised: events are asked at later steps whether they have come to pass.
FSDP and DeepSpeed call collectives on streams of their own, which the computing stream waits for by events, or the
host, which then gives it nothing to compute: that wait is timed in their place, as far as the calls themselves took so
long: a loop may compute on such a stream, too. What waits elsewhere is not seen: DDP's reducer waits in C++.
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
from .steps import Steps, is_capturing

# So many waits of a step are kept; those that are over by then are added up. The host is never further ahead of the
# device than the driver's queue of launches lets it be, which is shorter than the second number.
_KEPT_PAIRS = 512
_MOST_PAIRS = 16384
# Calls on another stream that nobody waits for.
_MOST_SPANS = 4096
# So many of them are asked about at once.
_ADDED = 64
# The host is never so many steps ahead of the device; were a device stuck, nothing would pile up.
_MOST_PENDING = 64
# Of an event: the stream that it was recorded on, and how many calls had gone there; None where none had.
_MARK = "_multinode_mark"

_Reader = Callable[[Tuple[Any, ...], Dict[str, Any]], Any]
_Ended = Callable[[], None]
_GroupOf = Callable[[Any, Any], Any]
_Count = Callable[[str, Any, float], None]


class _Kind(NamedTuple):
    """What a function does, and which of its parameters says how much."""

    op: str  # the collective, as CallCount names it
    sized: str = ""  # the parameter that holds the tensor, or the tensors; none for a barrier, which carries nothing
    shared: bool = False  # whether that is one worker's share of S
    group: str = "group"


# Not here, because they call others of these for each of their parts: batch_isend_irecv, the collectives of objects.
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
"""Of torch.distributed.distributed_c10d, which torch.distributed hands on."""

_PACKAGE: Dict[str, _Kind] = {"_broadcast_coalesced": _Kind("broadcast", "tensors", group="process_group")}
"""Of torch.distributed itself: DDP's buffers and its first parameters. Flattened to buckets inside; counted as one."""

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
"""Of torch.distributed._functional_collectives: what DTensor calls."""

# pybind11's functions have no signature that Python can read.
_BUILTIN_PARAMETERS = {"_broadcast_coalesced": ["process_group", "tensors", "buffer_size", "src"]}


class _Nesting(threading.local):
    inside = False


class CollectiveHooks:
    """Replaces functions of torch.distributed by ones that count and time their outermost calls.

    Args:
        steps: whose phases the host's waits are.
        count: called with a collective's name, the process group (None: the default one) and S in bytes.
    """

    def __init__(
        self,
        steps: Steps,
        guard: Guard,
        count: _Count,
        device: DeviceWaits,
    ) -> None:
        self._phases = steps.phases
        self._guard = guard
        self._count = count
        self._device = device
        self._nesting = _Nesting()
        # by group, whether it is inside this node; and of such groups what is waited for later
        self._local: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._results: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def hooks(self) -> Hooks:
        """Modules to wait for, and what is then done with each.

        The first of them is wrapped before anybody has copied its functions: torch.distributed, torch.compile's table
        of collectives (which knows them by identity) and DeepSpeed all take ours.
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
        """Stream.wait_event, Stream.wait_stream and Stream.record_event all call the first two."""
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
        """Its streams are C++ alone, whose waits nobody sees: those of torch.cuda are streams of its kind."""
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
        """Time a function by which the host waits for streams, where nobody has waited for calls on them."""
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
        """The function, with its outermost calls counted and timed."""
        nesting = self._nesting

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if compiler.is_compiling() or nesting.inside:
                return function(*args, **kwargs)
            nesting.inside = True
            ended = None
            try:
                tensors = call.tensors(args, kwargs)
                group = self._group(call, group_of, args, kwargs)
                local = self._is_local(group)
                ended = self._begin(call, tensors, args, kwargs, local=local)
                result = function(*args, **kwargs)
            finally:
                nesting.inside = False
                if ended is not None:
                    self._end(ended)
            try:
                if local and result is not None:
                    self._remember(result)
                size_bytes = _size_bytes(tensors)
                self._count(call.op, group, size_bytes * _workers(group) if call.shared else size_bytes)
            except Exception as error:  # noqa: BLE001 - a training never stops because it is being watched
                self._guard.tell("counting a collective", error)
            return result

        return counted

    def _group(self, call: _Call, group_of: Optional[_GroupOf], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        group = call.group(args, kwargs)
        try:
            return group if group_of is None else group_of(group, call.tag(args, kwargs))
        except Exception as error:  # noqa: BLE001 - see _counted
            self._guard.tell("reading a collective's group", error)
            return None

    def _is_local(self, group: Any) -> bool:
        """Whether all of a group's workers are on this node, of several nodes."""
        # The default group spans all nodes, and for one without this worker a number stands.
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
        """What is waited for later: a Work, or what a functional collective hands on."""
        result = getattr(result, "elem", result)
        self._results[id(result)] = result

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function that waits for a collective, timed unless a collective that is timed already calls it."""
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
            while isinstance(tensors, (list, tuple)) and tensors:
                tensors = tensors[0]
            # On a GPU the host goes on at once, and its time says nothing.
            if getattr(tensors, "is_cuda", False):
                return self._device.begin(local=local) if call.waits(args, kwargs) else None
            return self._phases.leave if self._phases.enter(_phase(local=local)) else None
        except Exception as error:  # noqa: BLE001 - see _counted
            self._guard.tell("timing a collective", error)
            return None

    def _begin_wait(self, *, local: bool) -> Optional[_Ended]:
        # A Work does not say which device it is of: both are timed, and one of the two waits for next to nothing. Where
        # another stream waits, the host does not.
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
    """The stream that torch computes on unless told otherwise, of the current GPU.

    As cheap as torch lets it be: `torch.cuda.current_stream()` makes an object and asks much before, and a training of
    many small steps waits hundreds of times in each.
    """

    def __init__(self) -> None:
        self._in_use = False
        self._current: Optional[Callable[[], int]] = None
        self._event: Optional[Callable[[], Any]] = None
        self._streams: Dict[Tuple[int, int], Any] = {}

    def in_use(self) -> bool:
        """Whether this worker uses a GPU at all; asking starts nothing."""
        if not self._in_use:
            self._in_use = bool(sys.modules["torch"].cuda.is_initialized())
        return self._in_use

    def current(self) -> int:
        """The handle of the stream that what is called now goes to: 0 is this one.

        It never is while a CUDA graph is captured, which needs another stream.
        """
        if self._current is None:
            self._current = _current_handle(sys.modules["torch"])
        return self._current()

    def here(self, device: Any) -> Any:
        """The stream of this GPU, the current one, that what is called now goes to, as torch has it."""
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
        """A new event that keeps the time. Its `record` is of this stream, whichever is the current one.

        And its `record_on` of the stream that it is given.
        """
        if self._event is None:
            self._event = _event_of_computing(sys.modules["torch"])
        return self._event()


def _quick(torch: Any) -> Optional[Tuple[Callable[[], int], Callable[[int], int]]]:
    """The current GPU, and the handle of its current stream, by what torch's compiler uses; None in a torch without."""
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
    # What torch's own calls in the end; else torch's own, without our hook.
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
    """What was called on a stream that is not the computing one.

    Attributes:
        issued: calls so far; `awaited` of them are waited for, and `before` of them were called in an earlier step.
        spans: of those that nobody has waited for yet, in their order; None where one was not timed.
    """

    __slots__ = ("awaited", "before", "handle", "issued", "spans")

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.issued = self.awaited = self.before = 0
        self.spans: Deque[Optional[_Span]] = collections.deque()


class _Span:
    """A pair of events around a call on another stream than the computing one, recorded there."""

    __slots__ = ("_stream", "end", "local", "start")

    def __init__(self, start: Any, end: Any) -> None:
        self.start = start
        self.end = end
        self.local = False  # whether it was in a group inside the node
        self._stream: Any = None

    def begin(self, stream: Any) -> None:
        """The call begins, on this stream."""
        self._stream = stream
        self.start.record_on(stream)

    def over(self) -> None:
        """What follows it on that stream begins."""
        self.end.record_on(self._stream)


def _is_elsewhere(ended: Optional[_Ended]) -> bool:
    """Whether what this ends delays no computation on the computing stream."""
    return ended is _on_another_stream or isinstance(getattr(ended, "__self__", None), _Span)


def _public(owner: Any) -> List[str]:
    return [name for name in dir(owner) if not name.startswith("_")]


class _Wait:
    """A pair of events around a wait, and how many calls of the step it times.

    Attributes:
        spans: of calls on other streams, which alone were waited for: None is the whole wait.
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
        """What the calls took of it, and of that those inside the node; all events have come to pass."""
        whole_ms = float(self.start.elapsed_time(self.end))
        if self.spans is None or whole_ms <= 0:
            return whole_ms, whole_ms if self.local else 0.0
        took_ms = self._covered_ms(self.spans, whole_ms)
        between = [span for span in self.spans if not span.local]
        if len(between) == len(self.spans):
            return took_ms, 0.0
        # What passes beside a call between nodes makes nothing longer.
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
    """What the computing stream waited for in a step."""

    step: int
    added_ms: Tuple[float, float]  # by waits that were over while it went on; of that inside the node
    pairs: List[_Wait]
    # calls of the step whose waits the pairs time. One of an earlier step is none of them: who waits for it may have
    # waited before, where it was not seen.
    calls: int
    of_calls: int  # all of this step
    dropped: int  # waits beyond the most that are kept


def _on_another_stream() -> None:
    """What ends a wait that delays no computation."""


class DeviceWaits:
    """Records an event before and one after each wait, and adds up the time between them.

    The sum is of stretches that the stream passed waiting: from the last computation before the call to the end of the
    collective. It holds what was transferred as well as what was waited for a slower peer.
    """

    def __init__(self, steps: Steps, stream: Any) -> None:
        # calls on other streams that nobody has waited for yet; with none there is nothing to be marked
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
        """Whether this worker uses a GPU at all."""
        return bool(self._stream.in_use())

    def begin(self, *, local: bool = False) -> Optional[_Ended]:
        """A wait begins; returns what ends it, or None where it is not timed.

        On another stream than the computing one it delays no computation until that, or the host, waits for the other.
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
        """An event was recorded on a stream (None: the current one), after the calls that went there so far."""
        other = self._others.get(self._handle(stream))
        if other is not None and other.issued > other.awaited:
            setattr(event, _MARK, (other, other.issued))
        elif getattr(event, _MARK, None) is not None:
            setattr(event, _MARK, None)

    def begin_event(self, event: Any, stream: Any = None) -> Optional[_Ended]:
        """A stream (None: the current one) begins to wait for an event; returns as `begin`.

        Where it is not the computing one, what it waits for is waited for again when that waits for it.
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
        """The host begins to wait for an event, and gives the computing stream nothing to do; returns as `begin`."""
        mark = getattr(event, _MARK, None)
        return self._begin_on_host([mark] if mark is not None else [])

    def begin_stream_on_host(self, stream: Any) -> Optional[_Ended]:
        """Likewise for a stream."""
        other = self._others.get(int(stream.cuda_stream))
        return self._begin_on_host([(other, other.issued)] if other is not None else [])

    def begin_device_on_host(self, *_: Any, **__: Any) -> Optional[_Ended]:
        """Likewise for all streams."""
        return self._begin_on_host([(other, other.issued) for other in list(self._others.values())])

    def _begin_on_host(self, awaited: List[Tuple[_OtherStream, int]]) -> Optional[_Ended]:
        with self._lock:
            taken = [self._take(other, issued) for other, issued in awaited if issued > other.awaited]
        if not taken:
            return None
        return self._begin_pair(sum(calls for calls, _, _ in taken), [span for *_, spans in taken for span in spans])

    def _begin_span(self, *, local: bool) -> Optional[_Span]:
        """A call begins on the current stream, which is not the computing one; None where it cannot be timed."""
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
        """Calls on a stream, up to so many, are waited for: how many of this step, of earlier ones, and their spans."""
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
        """A wait for so many calls begins, of which those on other streams have spans."""
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
        """Add up the waits of this step that are over, so that their events can be used again."""
        if is_capturing():
            return
        over = 0
        # In the order of the stream: where the last of some is over, all of them are.
        while over < len(self._pairs) and self._pairs[min(over + _ADDED, len(self._pairs)) - 1].end.query():
            over = min(over + _ADDED, len(self._pairs))
        done, self._pairs = self._pairs[:over], self._pairs[over:]
        self._added_ms = self._sum_ms(self._added_ms, done)

    def _sum_ms(self, before: Tuple[float, float], pairs: Sequence[_Wait]) -> Tuple[float, float]:
        """With the time that these waits took, all of them over; their events are free then."""
        took_ms = [before, *(wait.took_ms() for wait in pairs)]
        sum_ms = (sum(whole for whole, _ in took_ms), sum(local for _, local in took_ms))
        for wait in pairs:
            self._unused_spans.extend(wait.spans or ())
            wait.spans = None
        self._unused.extend(pairs)
        return sum_ms

    def close(self, step: int) -> Dict[str, Any]:
        """A step ends: those before it whose waits are over by now are recorded."""
        with self._lock:
            ended = _StepWaits(step, self._added_ms, self._pairs, self._calls, self._of_calls, self._dropped)
            self._pairs, self._added_ms, self._calls, self._of_calls, self._dropped = [], (0.0, 0.0), 0, 0, 0
            for other in self._others.values():
                other.before = other.issued
        # Of a step whose calls were not timed, that is told as well: it is not the same as no calls.
        if ended.of_calls or ended.pairs:
            self._pending.append(ended)
        while self._pending and _are_over(self._pending[0]):
            self._record(self._pending.popleft())
        return {}

    def end(self, wait: _Wait) -> None:
        """A wait that began ends."""
        # In the order of the stream: the last is over last.
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
        ValueError: it has no parameter of that name.
    """

    def __init__(self, function: Callable[..., Any], kind: _Kind) -> None:
        name = function.__name__
        parameters = _BUILTIN_PARAMETERS.get(name) or list(inspect.signature(function).parameters)
        for wanted in (kind.sized, kind.group):
            if wanted and wanted not in parameters:
                raise ValueError("%s has no parameter %s" % (name, wanted))
        self.op = kind.op
        self.shared = kind.shared
        # of a call's args and kwargs, the tensor or the tensors that say how much; None of a barrier
        self.tensors = _reader(parameters, kind.sized)
        # likewise the process group as it was given; None is the default group
        self.group = _reader(parameters, kind.group)
        # likewise what a functional collective tells groups of the same ranks apart by
        self.tag = _reader(parameters, "tag")
        self._asynchronous = _reader(parameters, "async_op")
        # These two return while their work goes on, and say so by their names alone.
        self._never_waits = name in ("isend", "irecv")

    def waits(self, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> bool:
        """Whether what follows it waits for it: it is not asynchronous."""
        return not (self._never_waits or self._asynchronous(args, kwargs))


def _reader(parameters: List[str], name: str) -> _Reader:
    position = parameters.index(name) if name in parameters else len(parameters)

    def read(args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        return args[position] if position < len(args) else kwargs.get(name)

    return read


def _present(module: Any, kinds: Dict[str, _Kind]) -> Dict[str, _Kind]:
    """Those functions that this torch has; of two names of one function, where the older warns, only the newer."""
    return {name: kind for name, kind in kinds.items() if hasattr(module, name) and not _hands_on(module, name)}


def _hands_on(module: Any, name: str) -> bool:
    # Such a functional collective warns of its age, pointing at its caller, and calls the newer one: were it wrapped,
    # the warning would point at us.
    newer = name.replace("_into_tensor", "_single").replace("_tensor", "_single")
    return module.__name__.endswith("_functional_collectives") and newer != name and hasattr(module, newer)


def _end_both(first: _Ended, second: _Ended) -> None:
    try:
        first()
    finally:
        second()


def _size_bytes(tensors: Any) -> int:
    if isinstance(tensors, (list, tuple)):
        return sum(map(_size_bytes, tensors))
    return 0 if tensors is None else tensors.nbytes


def _is_local(group: Any) -> bool:
    """Whether all workers of a group are on this node, of several: the launcher numbers those of a node in a row."""
    first = int(os.environ.get("RANK", "0")) - int(os.environ.get("LOCAL_RANK", "0"))
    count, world = (int(os.environ.get(name, "0")) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    if not 1 < count < world or not isinstance(group, c10d.ProcessGroup):
        return False
    return all(first <= rank < first + count for rank in c10d.get_process_group_ranks(group))


def _phase(*, local: bool) -> str:
    return "comm_local" if local else "comm"


def _workers(group: Any) -> int:
    """How many are in a group; 0 in one that this worker is not in, for which a number stands."""
    return int(sys.modules["torch"].distributed.get_world_size(group)) if not isinstance(group, int) else 0


def _group_of(functional: Any, group: Any, tag: Any) -> Any:
    """The process group that a functional collective was given in one of its many ways.

    What is only traced calls them too, without anything being sent: then, as for groups without this worker, a number.
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
    # They stand in the order of one stream.
    return not waits.pairs or bool(waits.pairs[-1].end.query())
