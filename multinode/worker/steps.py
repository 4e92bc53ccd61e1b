"""Steps: counts the optimizer steps of this worker and records them, with what the meters have to say of each.

Who sees the steps is `hooks`' business. The meter of memory is here; others are with what they measure.
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
"""Called with its number at the end of each step; returns fields of the step's record (records/samples.py)."""


class Steps:
    """Listens to the best source that has spoken."""

    def __init__(self, recorder: Recorder, guard: Guard) -> None:
        self.phases = PhaseClock(guard)  # the clock whose phases are recorded with each step
        self.meters: List[Meter] = [self._phases_us]  # asked at each step; one that raises is told and dropped
        self.count = 0
        self._recorder = recorder
        self._guard = guard
        self._source: Optional[str] = None
        self._last_ns: Optional[int] = None
        # how often the batches of a step had so many rows for each of its samples
        self._rows_per_sample: Counter[float] = Counter()
        # Recorded with the first step: a thread that writes shall not run before the user's code does.
        self._begun_ns = time.monotonic_ns()

    def begin(self, source: str) -> bool:
        """A source starts to count; False where a better one does already."""
        if self._source is not None and _SOURCES.index(source) > _SOURCES.index(self._source):
            return False
        if source != self._source:
            self._source = source
            self.count = 0
            self._last_ns = None
            self._recorder.write("worker", {"begun_mono_ns": self._begun_ns, **_worker_fields(source)})
        return True

    def step(self, source: str, **fields: Any) -> None:
        """One optimizer step has ended; `fields` of its record that the source knows go before those of meters.

        A step that was only captured in a CUDA graph is not counted: nothing was trained, and meters that ask events
        would end the capture. `samples` are those of a whole step; an epoch's last, which is smaller, gets fewer.
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
        """Record something beside the steps."""
        self._recorder.write(kind, fields)

    def restart(self) -> None:
        """The next step is measured from now; what was metered before belongs to none."""
        self._last_ns = time.monotonic_ns()
        self.phases.take_us()
        self.phases.take_core_wait_us()

    def _had(self, whole: int, rows: Optional[int]) -> int:
        """The samples of a step whose batches had so many rows, None if unknown; a sample may consist of several."""
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
    """The meter of `peak_memory_bytes`: the most that this worker's GPU had allocated, or that the worker had resident.

    On a GPU `peak_reserved_bytes` too: what torch's allocator took from the driver, which is what runs out.

    It answers once a second at most: torch takes a while to add up its statistics.
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
    """Whether what is called now goes into a CUDA graph; asking an event would end that."""
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
