"""torch.cuda without a GPU: streams, events and a network on one clock, below the Python of torch, which stays its own.

`install()` puts them under an imported torch, of any build, before hooks are. Nothing computes: kernels and collectives
are lengths of time on streams. A stream runs one at a time, in order, and not before the host has launched it; the host
goes on at once, and waits only in what synchronises.
"""

# ruff: noqa: SLF001 - it stands below torch's Python
# mypy: disable-error-code="misc, no-any-return"

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

LAUNCH_MS = 0.005
US_PER_MS = 1000
_DEVICE_TYPE = 1  # of CUDA, in c10::DeviceType
# Of NCCL's communicator; torch hands it to nobody.
_NETWORK = -1


class Gpu:
    """One device and its host."""

    def __init__(self) -> None:
        self.now_ms = 0.0  # the host's clock
        self.ends_ms: dict[int, float] = {0: 0.0}  # by stream, when all that it was given will be over
        self.current = 0  # the stream that work goes to
        self.network_speed = 1.0  # collectives take their length over this; infinity has them take no time
        self.is_capturing = False  # whether a graph is being captured
        self.calls = 0  # how many calls were made of what the driver would be asked for

    def compute(self, ms: float) -> None:
        """A kernel on the current stream."""
        self.run(self.current, ms)

    def rest(self, ms: float) -> None:
        """The host does something else."""
        self.now_ms += ms

    def run(self, stream: int, ms: float, after_ms: float = 0.0) -> float:
        """Launch something of this length on a stream, not to begin before `after_ms`; returns when it is over."""
        self.now_ms += LAUNCH_MS
        self.ends_ms[stream] = max(self.ends_ms.get(stream, 0.0), self.now_ms, after_ms) + ms
        return self.ends_ms[stream]

    def transfer(self, ms: float) -> float:
        """A collective, called on the current stream: on the network's own, after what that stream has so far."""
        return self.run(_NETWORK, ms / self.network_speed, after_ms=self.ends_ms.get(self.current, 0.0))

    def await_on(self, stream: int, at_ms: float) -> None:
        """Nothing more begins on a stream before this time."""
        self.ends_ms[stream] = max(self.ends_ms.get(stream, 0.0), at_ms)

    def await_on_host(self, at_ms: float) -> None:
        """The host goes on no sooner."""
        self.now_ms = max(self.now_ms, at_ms)


gpu = Gpu()


class StreamBase:
    """As torch._C._CudaStreamBase."""

    made = 0
    stream_id: int
    cuda_stream: int
    device_index = 0
    device_type = _DEVICE_TYPE
    device: Any

    def __new__(cls, stream_id: int | None = None, **_: Any) -> Any:
        self = super().__new__(cls)
        if stream_id is None:
            StreamBase.made += 1
            stream_id = StreamBase.made
        self.stream_id = self.cuda_stream = stream_id
        self.device = torch.device("cuda", 0)
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def query(self) -> bool:
        return gpu.ends_ms.get(self.cuda_stream, 0.0) <= gpu.now_ms

    def synchronize(self) -> None:
        gpu.calls += 1
        gpu.await_on_host(gpu.ends_ms.get(self.cuda_stream, 0.0))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StreamBase) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)


# The real one is a subclass of torch.Stream, and so has all of its names.
for _name in set(dir(torch.Stream)) - set(dir(StreamBase)):
    setattr(StreamBase, _name, None)


class CoreStream:
    """As torch.Stream, of the current one: what is C++ alone, and waits where no Python sees it."""

    def wait_event(self, event: Any) -> None:
        gpu.await_on(gpu.current, event.at_ms or 0.0)


class EventBase:
    """As torch._C._CudaEventBase."""

    keeps_time: bool
    at_ms: float | None = None

    def __new__(cls, enable_timing: bool = False, **_: Any) -> Any:  # noqa: FBT001, FBT002 - as torch has it
        self = super().__new__(cls)
        self.keeps_time = enable_timing
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, stream: Any) -> None:
        gpu.calls += 1
        self.at_ms = max(gpu.ends_ms.get(stream.cuda_stream, 0.0), gpu.now_ms)

    def wait(self, stream: Any) -> None:
        gpu.calls += 1
        gpu.await_on(stream.cuda_stream, self.at_ms or 0.0)

    def query(self) -> bool:
        gpu.calls += 1
        if gpu.is_capturing:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return self.at_ms is None or self.at_ms <= gpu.now_ms

    def synchronize(self) -> None:
        gpu.calls += 1
        gpu.await_on_host(self.at_ms or 0.0)

    def elapsed_time(self, end: Any) -> float:
        gpu.calls += 1
        if not (self.keeps_time and end.keeps_time):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self.at_ms is None or not self.query() or not end.query():
            raise RuntimeError("Both events must be recorded and completed before calculating elapsed time.")
        return float(end.at_ms - self.at_ms)


class OnGpu(torch.Tensor):
    """A tensor that says it lies on the device, and holds nothing."""

    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl


class SentWork(c10d.Work):
    """What an asynchronous collective returns."""

    def __init__(self, over_ms: float) -> None:
        super().__init__()
        self.over_ms = over_ms


def tensor_of(ms: float) -> OnGpu:
    """What takes so long to send: a byte a microsecond."""
    return torch.empty(round(ms * US_PER_MS), dtype=torch.uint8, device="meta").as_subclass(OnGpu)


def install() -> Gpu:
    """Have torch compute, and communicate, here."""
    core = torch._C
    for name, value in {
        "_CudaStreamBase": StreamBase,
        "_CudaEventBase": EventBase,
        "_cuda_getDevice": lambda: 0,
        "_cuda_setDevice": lambda _index: None,
        "_cuda_getDeviceCount": lambda: 1,
        "_cuda_getCurrentStream": _current_stream,
        "_cuda_getDefaultStream": lambda _index: (0, 0, _DEVICE_TYPE),
        "_cuda_getCurrentRawStream": lambda _index: gpu.current,
        "_cuda_setStream": _set_stream,
        "_cuda_synchronize": _synchronize,
        "_accelerator_getDeviceIndex": lambda: 0,
        "_accelerator_getStream": lambda _index: CoreStream(),
    }.items():
        setattr(core, name, value)
    cuda = torch.cuda
    cuda._initialized = True
    cuda._exchange_device = cuda._maybe_exchange_device = lambda _index: 0
    torch.backends.cuda.is_built = lambda: True
    graphs: Any = sys.modules["torch.cuda.graphs"]
    graphs._cuda_isCurrentStreamCapturing = lambda: gpu.is_capturing
    streams = _load_again("torch.cuda.streams")
    cuda.streams, cuda.Stream, cuda.Event = streams, streams.Stream, streams.Event
    for name in _COLLECTIVES:
        if hasattr(c10d, name):
            setattr(c10d, name, _sent(getattr(c10d, name)))
    c10d.Work.wait = _wait
    hand_on()
    return gpu


def hand_on() -> None:
    """Have torch.distributed have what its module has: at an import it copies that after hooks."""
    for name in _COLLECTIVES:
        if hasattr(c10d, name):
            setattr(torch.distributed, name, getattr(c10d, name))


# The tensor that says how much, by parameter.
_COLLECTIVES = {
    "all_reduce": "tensor",
    "broadcast": "tensor",
    "all_gather_into_tensor": "output_tensor",
    "_all_gather_base": "output_tensor",
    "all_gather_single": "output_tensor",
    "reduce_scatter_tensor": "input",
    "_reduce_scatter_base": "input",
    "reduce_scatter_single": "input",
    "all_to_all_single": "input",
}


def _load_again(name: str) -> Any:
    """A module of torch's, executed on what `torch._C` has now."""
    path = sys.modules[name].__file__
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(name)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _current_stream(_index: int) -> tuple[int, int, int]:
    gpu.calls += 1
    return gpu.current, 0, _DEVICE_TYPE


def _set_stream(stream_id: int, **_: Any) -> None:
    gpu.current = stream_id


def _synchronize() -> None:
    gpu.await_on_host(max(gpu.ends_ms.values()))


def _sent(function: Any) -> Any:
    """The collective, on the network of here: synchronous ones hold up the current stream, and never the host."""
    parameters = list(inspect.signature(function).parameters)
    sized, asynchronous = parameters.index(_COLLECTIVES[function.__name__]), parameters.index("async_op")

    @functools.wraps(function)
    def sent(*args: Any, **kwargs: Any) -> SentWork | None:
        tensor = args[sized] if sized < len(args) else kwargs[parameters[sized]]
        over_ms = gpu.transfer(tensor.nbytes / US_PER_MS)
        if args[asynchronous] if asynchronous < len(args) else kwargs.get("async_op", False):
            return SentWork(over_ms)
        gpu.await_on(gpu.current, over_ms)
        return None

    return sent


def _wait(work: Any, *_: Any) -> bool:
    gpu.await_on(gpu.current, work.over_ms)
    return True
