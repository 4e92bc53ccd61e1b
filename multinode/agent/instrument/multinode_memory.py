"""Meter of memory: the most that this worker's GPU had allocated, or that the worker itself had resident.

The meter is asked at each step and answers once a second at most: torch takes a while to add up its statistics.
"""

from __future__ import annotations

import resource
import sys
import time
from typing import Any, Callable, Dict

__all__ = ["meter"]

_INTERVAL_S = 1.0
# Linux counts ru_maxrss in KiB.
_MAXRSS_BYTES = 1024


def meter(interval_s: float = _INTERVAL_S) -> Callable[[int], Dict[str, Any]]:
    """The meter of `peak_memory_bytes`, to be added to the meters of Steps."""
    due_s = 0.0

    def peak_memory(_step: int) -> Dict[str, Any]:
        nonlocal due_s
        now_s = time.monotonic()
        if now_s < due_s:
            return {}
        due_s = now_s + interval_s
        return {"peak_memory_bytes": _peak_bytes()}

    return peak_memory


def _peak_bytes() -> int:
    cuda = sys.modules.get("torch.cuda")
    if cuda is not None and cuda.is_initialized():
        return int(cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES
