"""Device benchmark: a worker under torchrun that times its own device and records every raw timing.

It needs torch, so it runs in the job's environment, as `torchrun <agent.pyz> devices`, with its request in
MULTINODE_REQUEST. Workers do not communicate. A test that fails is recorded with its reason, and the others continue.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, Optional

from ..channel import Record
from ..facts.software import read_processor_name
from ..rundir import RunDir
from ..sample.sampler import SampleFile
from .device_ops import DeviceOp, find_device, list_ops, time_events

_US_PER_S = 1e6
# Warm-up time until clocks and caches are steady.
_WARM_S = 0.2
# Shortest duration of one timing. A control group limits processors per tenth of a second: a shorter timing would see
# all of them or none.
_LEAST_TIMING_S = {"cpu": 0.2, "cuda": 0.005}
_LEAST_TIMINGS, _MOST_TIMINGS = 3, 1000
# A shorter call may be over before Python has launched the next one. In a CUDA graph, the GPU launches them itself.
_LAUNCH_BOUND_S = 1e-4
# Matrix products that would take more than this share of the time are left out. A product whose size was requested may
# take all of the time, and at least some seconds.
_LARGEST_PART = 0.2
_ASKED_S = 10.0
# Limit of the controller.
_MOST_SECONDS = 600
# A product that takes this long is enough to extrapolate to larger ones; trials begin with this number of rows.
_TELLING_S = 0.1
_FIRST_TRIED = 256
# A worker that makes progress has a result within this time plus this many times the duration of a test.
_SILENT_S, _SILENT_TESTS = 240.0, 6
_LOOK_EVERY_S = 0.2
# If calls become slower than they began, timing stops after this many times the planned duration.
_PATIENCE = 4.0
_LONGEST_ERROR = 300


def main() -> None:
    """Run the requested tests, and write one record per test to this worker's samples."""
    request = json.loads(os.environ["MULTINODE_REQUEST"])
    run = RunDir(os.environ["MULTINODE_RUN_ID"])
    with _turn(run, request["seconds"]) if request["turns"] else contextlib.nullcontext(lambda: None) as get_on:
        import torch

        worker = _DeviceWorker(torch, request, run)
        worker.record([worker.describe()])
        index = 0
        for _ in range(request["repeats"]):
            for op in list_ops(torch, request, worker.device):
                worker.record([{"kind": "speed", "index": index, **op.fields, **worker.measure(op)}])
                index += 1
                get_on()


@contextlib.contextmanager
def _turn(run: RunDir, seconds: float) -> Iterator[Callable[[], None]]:
    """A lock that one worker of this node and run holds at a time; a worker that dies releases it.

    Yields a function to call after each result: the others give up if the holder has had no result for minutes.
    """
    path = os.path.join(run.path, "turn")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def get_on() -> None:
        # Use this node's clock: the directory may be on a file server with another clock.
        os.utime(path, (time.time(), time.time()))

    try:
        _wait_for_turn(descriptor, _SILENT_S + _SILENT_TESTS * seconds)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, os.environ["LOCAL_RANK"].encode(), 0)
        get_on()
        yield get_on
    finally:
        os.close(descriptor)


def _wait_for_turn(descriptor: int, silent_s: float) -> None:
    while True:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if time.time() - os.fstat(descriptor).st_mtime > silent_s:
            holder = os.pread(descriptor, 16, 0).decode(errors="replace") or "another"
            raise RuntimeError(
                (f"worker {holder} of this node returned no result for {silent_s:.0f} s: its device hangs")
            )
        time.sleep(_LOOK_EVERY_S)


class _DeviceWorker:
    """This process and its device.

    Args:
        torch: the module.
        request: the fields of a DeviceTest.
        run: the run, whose samples get the records.
    """

    def __init__(self, torch: Any, request: Record, run: RunDir) -> None:
        self._torch = torch
        self._request = request
        self._rank, self._local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        self._file = SampleFile(run, f"rank-{self._rank}.jsonl")
        kind = "cuda" if torch.cuda.is_available() else None
        self.device = find_device(torch, kind=kind, need="each worker needs its own GPU")  # torch's
        # Type, size and seconds of the last matrix product.
        self._product: Optional[tuple[str, int, float]] = None

    def record(self, records: list[Record]) -> None:
        """Append to this worker's samples."""
        self._file.append([{**record, "rank": self._rank} for record in records])

    def describe(self) -> Record:
        """The `device` record."""
        torch, device = self._torch, self.device
        if device.type == "cpu":
            about = {"name": read_processor_name(), "capability": torch.backends.cpu.get_cpu_capability()}
        else:
            properties = torch.cuda.get_device_properties(device)
            about = {
                "name": properties.name,
                "capability": f"sm_{properties.major}{properties.minor}",
                "memory_gib": properties.total_memory / (1 << 30),
                "cuda": torch.version.cuda,
            }
        return {
            "kind": "device",
            "local_rank": self._local_rank,
            "device": device.type,
            "threads": torch.get_num_threads(),
            "cores": len(os.sched_getaffinity(0)),
            "node_cores": _count_cores(),
            "torch": torch.__version__,
            **about,
        }

    def measure(self, op: DeviceOp) -> Record:
        """Timings of an operation, or the error."""
        try:
            too_long = self._takes_too_long(op.fields)
            if too_long is not None:
                return {"error": too_long}
            timed = self._time(op.make())
        except (RuntimeError, TypeError) as error:
            # Out of memory, or an operation that this device lacks: torch has no narrower class for these. Or an older
            # torch lacks one of the operation's options.
            first = str(error).strip().split("\n", maxsplit=1)[0]
            return {"error": first[:_LONGEST_ERROR] or type(error).__name__}
        finally:
            if self.device.type == "cuda":
                self._torch.cuda.empty_cache()
        if op.fields["test"] == "matmul":
            fastest_s = min(timed["times_us"]) / _US_PER_S
            self._product = (op.fields["dtype"], op.fields["size"], fastest_s)
        return timed

    def _takes_too_long(self, fields: Record) -> Optional[str]:
        """Why a matrix product is left out, since it leaves no time for repeats; None if it is measured."""
        if fields["test"] != "matmul":
            return None
        has_sizes, seconds = bool(self._request["sizes"]), self._request["seconds"]
        part, least_s = (1.0, _ASKED_S) if has_sizes else (_LARGEST_PART, 0.0)
        call_s = self._guess(fields["dtype"], fields["size"])
        if call_s <= max(part * seconds, least_s):
            return None
        needed_s = math.ceil(call_s / part)
        way_out = f"; to measure it, use --seconds {needed_s}" if needed_s <= _MOST_SECONDS else ""
        return f"one product would take about {call_s:.2f} s{way_out}"

    def _guess(self, dtype: str, size: int) -> float:
        """Seconds of a product, extrapolated from a smaller one by the cube of the size; 0 if it is too small."""
        if self._product is None or self._product[0] != dtype:
            self._try_small_ones(dtype, size)
        if self._product is None or self._product[0] != dtype:
            return 0.0
        _, known_size, known_s = self._product
        return known_s * (size / known_size) ** 3

    def _try_small_ones(self, dtype: str, size: int) -> None:
        """Time larger and larger products below `size`, until one takes long enough to extrapolate."""
        rows, taken_s = _FIRST_TRIED, 0.0
        while rows < size and taken_s < _TELLING_S:
            wanted = {"kinds": ["matmul"], "dtypes": [dtype], "sizes": [rows]}
            run = next(list_ops(self._torch, wanted, self.device)).make()
            taken_s = min(self._call(run), self._call(run))
            self._product, rows = (dtype, rows, taken_s), rows * 2

    def _call(self, run: Callable[[], Any]) -> float:
        began = time.perf_counter()
        run()
        self._synchronise()
        return time.perf_counter() - began

    def _time(self, run: Callable[[], Any]) -> Record:
        call_s = self._warm_up(run)
        wanted_s = self._request["seconds"]
        calls = max(1, math.ceil(_LEAST_TIMING_S[self.device.type] / call_s))
        count = min(_MOST_TIMINGS, max(_LEAST_TIMINGS, round(wanted_s / (call_s * calls))))
        graph = self._capture(run, calls) if call_s < _LAUNCH_BOUND_S else None
        began_ns = time.monotonic_ns()
        if graph is not None:
            seconds = time_events(self._torch.cuda, graph, 1, count)
        elif self.device.type == "cuda":
            seconds = time_events(self._torch.cuda, run, calls, count)
        else:
            seconds = self._time_clock(run, calls, count)
        return {
            "times_us": [second / calls * _US_PER_S for second in seconds],
            "calls": calls,
            "graph": graph is not None,
            "began_mono_ns": began_ns,
            "ended_mono_ns": time.monotonic_ns(),
        }

    def _warm_up(self, run: Callable[[], Any]) -> float:
        """Call `run` until its speed is steady; returns the seconds per call without the first one."""
        run()
        self._synchronise()
        began, calls = time.perf_counter(), 0
        while True:
            run()
            calls += 1
            self._synchronise()
            passed_s = time.perf_counter() - began
            if passed_s >= _WARM_S:
                return passed_s / calls

    def _capture(self, run: Callable[[], Any], calls: int) -> Optional[Callable[[], Any]]:
        """A function that replays `calls` calls as one CUDA graph; None if they cannot be captured."""
        if self.device.type != "cuda":
            return None
        try:
            graph = self._torch.cuda.CUDAGraph()
            with self._torch.cuda.graph(graph):
                for _ in range(calls):
                    run()
            # The first replay uploads the graph.
            graph.replay()
            self._synchronise()
        except (AttributeError, RuntimeError):
            return None
        replay: Callable[[], Any] = graph.replay
        return replay

    def _time_clock(self, run: Callable[[], Any], calls: int, count: int) -> list[float]:
        patience_s = _PATIENCE * max(self._request["seconds"], _LEAST_TIMING_S["cpu"])
        seconds: list[float] = []
        while len(seconds) < count and (len(seconds) < _LEAST_TIMINGS or sum(seconds) < patience_s):
            began = time.perf_counter()
            for _ in range(calls):
                run()
            seconds.append(time.perf_counter() - began)
        return seconds

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            self._torch.cuda.synchronize(self.device)


def _count_cores() -> Optional[int]:
    """Number of cores in /proc/stat, over which the sampler averages; None if unknown."""
    with contextlib.suppress(OSError), open("/proc/stat", encoding="ascii", errors="replace") as file:
        return sum(line.startswith("cpu") and line[3].isdigit() for line in file) or None
    return None
