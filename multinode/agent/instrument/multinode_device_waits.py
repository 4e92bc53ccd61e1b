"""Device waits: how long a GPU's computing stream stood still in collectives, by pairs of CUDA events.

Nothing is synchronised: events are asked at later steps whether they have come to pass. What waits elsewhere is not
seen: DDP's reducer waits in C++, and FSDP has streams of its own that computing waits for by events.
"""

from __future__ import annotations

import collections
import functools
import sys
import threading
from typing import Any, Callable, Deque, Dict, List, NamedTuple, Optional, Tuple

from multinode_steps import Steps

__all__ = ["CudaStream", "DeviceWaits"]

_MOST_PAIRS = 512
# The host is never so far ahead of the device; were a device stuck, nothing would pile up.
_MOST_PENDING = 64

_Pair = Tuple[Any, Any]


class CudaStream:
    """The stream that torch computes on unless told otherwise, of the current GPU."""

    def in_use(self) -> bool:
        """Whether this worker uses a GPU at all; asking starts nothing."""
        torch = sys.modules["torch"]
        return bool(torch.cuda.is_initialized())

    def is_current(self) -> bool:
        """Whether what is called now goes to it; never while a CUDA graph is captured, which needs another stream."""
        torch = sys.modules["torch"]
        return bool(torch.cuda.current_stream().cuda_stream == 0)

    def event(self) -> Any:
        """A new event that keeps the time."""
        torch = sys.modules["torch"]
        return torch.cuda.Event(enable_timing=True)


class _StepWaits(NamedTuple):
    step: int
    pairs: List[_Pair]
    of_calls: int


class DeviceWaits:
    """Records an event before and one after each wait, and adds up the time between them.

    The sum is of stretches that the stream passed waiting: from the last computation before the call to the end of the
    collective. It holds what was transferred as well as what was waited for a slower peer.

    Args:
        steps: closes a step, and takes the records.
        stream: the computing stream.
    """

    def __init__(self, steps: Steps, stream: Any) -> None:
        self._steps = steps
        self._stream = stream
        self._lock = threading.Lock()
        self._pairs: List[_Pair] = []
        self._of_calls = 0
        self._unused: List[_Pair] = []
        self._pending: Deque[_StepWaits] = collections.deque(maxlen=_MOST_PENDING)
        steps.meters.append(self.close)

    def begin(self) -> Optional[Callable[[], None]]:
        """A wait begins; returns what ends it, or None where it is not timed.

        On another stream than the computing one it delays no computation, and is counted but not timed.
        """
        if not self._stream.in_use():
            return None
        current = self._stream.is_current()
        with self._lock:
            self._of_calls += 1
            if not current or len(self._pairs) >= _MOST_PAIRS:
                return None
            pair = self._unused.pop() if self._unused else None
        start, end = pair or (self._stream.event(), self._stream.event())
        start.record()
        return functools.partial(self._end, start, end)

    def close(self, step: int) -> Dict[str, Any]:
        """A step ends: those before it whose waits are over by now are recorded."""
        with self._lock:
            ended = _StepWaits(step, self._pairs, self._of_calls)
            self._pairs, self._of_calls = [], 0
        # Of a step whose calls were not timed, that is told as well: it is not the same as no calls.
        if ended.of_calls:
            self._pending.append(ended)
        while self._pending and _are_over(self._pending[0]):
            self._record(self._pending.popleft())
        return {}

    def _end(self, start: Any, end: Any) -> None:
        end.record()
        with self._lock:
            self._pairs.append((start, end))

    def _record(self, waits: _StepWaits) -> None:
        wait_ms = sum(start.elapsed_time(end) for start, end in waits.pairs)
        calls = len(waits.pairs)
        self._steps.note("device_wait", step=waits.step, wait_us=wait_ms * 1000, calls=calls, of_calls=waits.of_calls)
        with self._lock:
            self._unused.extend(waits.pairs)


def _are_over(waits: _StepWaits) -> bool:
    # The last one first: as long as it is not over, the others need not be asked.
    return all(end.query() for _start, end in reversed(waits.pairs))
