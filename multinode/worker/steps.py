"""Steps: counts the optimizer steps of this worker, and records each with the fields of all meters.

`hooks` finds the steps. The meter of memory is here; the others are in the modules that measure.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections import Counter
from typing import Any, Callable, Dict, List, Optional

from ..node.processes import boot_id
from .guard import Guard
from .phases import PhaseClock
from .recorder import Recorder

# Best first: the Trainer counts optimizer steps itself; under ZeRO the optimizer hook fires once per parameter group.
_SOURCES = ("trainer", "deepspeed", "optimizer")
_MEMORY_INTERVAL_S = 1.0
# Linux counts ru_maxrss in KiB.
_MAXRSS_BYTES = 1024
_MOST_RATIOS = 64

Meter = Callable[[int], Dict[str, Any]]
"""Called with the step's number at the end of each step; returns fields of its record (records/samples.py)."""


class Steps:
    """Counts by the best source of steps so far."""

    def __init__(self, recorder: Recorder, guard: Guard) -> None:
        self.phases = PhaseClock(guard)  # the clock whose phases are recorded with each step
        self.meters: List[Meter] = [self._phases_us]  # called at each step; one that raises is reported and dropped
        self.count = 0
        self._recorder = recorder
        self._guard = guard
        self._source: Optional[str] = None
        self._last_ns: Optional[int] = None
        # number of steps by rows in the batches per sample of the step
        self._rows_per_sample: Counter[float] = Counter()
        # Recorded with the first step: the writer's thread must not start before the user's code.
        self._begun_ns = time.monotonic_ns()

    def begin(self, source: str) -> bool:
        """A source starts to count; False if a better one already does."""
        if self._source is not None and _SOURCES.index(source) > _SOURCES.index(self._source):
            return False
        if source != self._source:
            self._source = source
            self.count = 0
            self._last_ns = None
            self._recorder.write("worker", {"begun_mono_ns": self._begun_ns, **_worker_fields(source)})
        return True

    def step(self, source: str, **fields: Any) -> None:
        """One optimizer step has ended; `fields` of the source override those of meters.

        A step that was only captured in a CUDA graph does not count: nothing was trained, and meters that query events
        would end the capture. `samples` is the number of a full step; the last step of an epoch may have fewer.
        """
        if is_capturing() or not self.begin(source):
            return
        now = time.monotonic_ns()
        self.count += 1
        number = fields.setdefault("step", self.count)
        elapsed_us = (now - self._last_ns) / 1000 if self._last_ns is not None else None
        record: Dict[str, Any] = {"time_s": time.time(), "mono_ns": now, "step_time_us": elapsed_us}
        for meter in list(self.meters):
            self._ask(meter, number, record)
        if fields.get("samples") is not None:
            fields["samples"] = self._had(fields["samples"], record.get("samples"))
        record.update({name: value for name, value in fields.items() if value is not None})
        self._last_ns = now
        self._recorder.write("step", record)

    def note(self, kind: str, **fields: Any) -> None:
        """Write a record of another kind."""
        self._recorder.write(kind, fields)

    def restart(self) -> None:
        """Measure the next step from now on; phases before it belong to no step."""
        self._last_ns = time.monotonic_ns()
        self.phases.take_us()
        self.phases.take_core_wait_us()

    def _had(self, whole: int, rows: Optional[int]) -> int:
        """Samples of a step by the rows of its batches, None if unknown; a sample may have several rows."""
        if not rows or not whole:
            return whole
        ratio = rows / whole
        if len(self._rows_per_sample) < _MOST_RATIOS or ratio in self._rows_per_sample:
            self._rows_per_sample[ratio] += 1
        ((usual, times),) = self._rows_per_sample.most_common(1)
        return max(1, round(whole * ratio / usual)) if times > 1 and ratio < usual else whole

    def _phases_us(self, _step: int) -> Dict[str, Any]:
        phases_us, core_wait_us = self.phases.take_us(), self.phases.take_core_wait_us()
        return {"phases_us": phases_us, **({} if core_wait_us is None else {"core_wait_us": core_wait_us})}

    def _ask(self, meter: Meter, number: int, record: Dict[str, Any]) -> None:
        try:
            record.update(meter(number))
        except Exception as error:  # noqa: BLE001 - a training never stops because it is being watched
            self.meters.remove(meter)
            self._guard.tell(getattr(meter, "__qualname__", "a meter"), error)


def memory_meter(interval_s: float = _MEMORY_INTERVAL_S) -> Meter:
    """The meter of `peak_memory_bytes`: peak allocated memory of the worker's GPU, or its peak resident memory.

    On a GPU it adds `peak_reserved_bytes`, which torch's allocator took from the driver, and which runs out.

    It returns fields at most once a second, since torch takes a while to add up its statistics.
    """
    due_s = 0.0

    def peak_memory(_step: int) -> Dict[str, Any]:
        nonlocal due_s
        now_s = time.monotonic()
        if now_s < due_s:
            return {}
        due_s = now_s + interval_s
        return _peak_bytes()

    return peak_memory


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured; querying an event would end the capture."""
    cuda = sys.modules.get("torch.cuda")
    return cuda is not None and cuda.is_initialized() and cuda.is_current_stream_capturing()


def _worker_fields(source: str) -> Dict[str, Any]:
    versions = {}
    for name in ("torch", "transformers", "deepspeed", "accelerate"):
        module = sys.modules.get(name)
        if module is not None:
            versions[name] = str(getattr(module, "__version__", ""))
    return {
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "time_s": time.time(),
        "source": source,
        "versions": versions,
        "network": _network(),
        "nccl_proto": os.environ.get("NCCL_PROTO"),
    }


def _network() -> Optional[str]:
    try:
        return "%s/%d" % (boot_id(), os.stat("/proc/self/ns/net").st_ino)
    except OSError:
        return None


def _peak_bytes() -> Dict[str, Any]:
    cuda = sys.modules.get("torch.cuda")
    if cuda is not None and cuda.is_initialized():
        allocated, reserved = cuda.max_memory_allocated(), cuda.max_memory_reserved()
        return {"peak_memory_bytes": int(allocated), "peak_reserved_bytes": int(reserved)}
    return {"peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES}
