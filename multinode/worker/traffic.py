"""Traffic: bytes and calls of torch.distributed's collectives, by optimizer step.

A collective counts for the step in which it is called, even before the first step and in an evaluation. Calls outside
Python are not seen: compiled graphs, backward passes of functional collectives, and DDP's reducer, which `ddp` adds.
"""

from __future__ import annotations

import collections
import sys
import threading
import weakref
from typing import Any, Callable, Dict, FrozenSet, Optional, Set, Tuple

from .collectives import CollectiveHooks, CudaStream, DeviceWaits
from .guard import Guard, Hooks
from .last_calls import LastCalls
from .steps import Steps

# Rows of one record; a step with more sizes is recorded by mean sizes.
_MOST_ROWS = 64
_MOST_SIZES = 1024
# Different sets of calls that are remembered; a training with ever new sizes must not fill the memory.
_MOST_REMEMBERED = 256

_Row = Tuple[str, str, float, str]
_Counts = Dict[_Row, int]


class Traffic:
    """Counts the collectives of this worker.

    Args:
        device: times waits on a GPU; by default with CUDA events.
        last_calls: each call is written there before it is made.
    """

    def __init__(
        self,
        steps: Steps,
        guard: Guard,
        device: Optional[DeviceWaits] = None,
        last_calls: Optional[LastCalls] = None,
    ) -> None:
        self._steps = steps
        self._guard = guard
        self._device = device or DeviceWaits(steps, CudaStream())
        self._last_calls = last_calls
        self._lock = threading.Lock()
        self._counts: _Counts = {}
        self._groups: Set[str] = set()
        # Caches the name of the last group: reading it creates a string each time.
        self._last_group: Callable[[], Any] = lambda: None
        self._last_name = ""
        self._numbers: "collections.OrderedDict[FrozenSet[Tuple[_Row, int]], int]" = collections.OrderedDict()
        self._next_number = 0
        steps.meters.append(self.close)

    def hooks(self) -> Hooks:
        """Hooks that count the calls of torch.distributed."""
        return CollectiveHooks(self._steps, self._guard, self.add, self._device, self._last_calls).hooks()

    def add(self, op: str, group: Any, size_bytes: float, count: int = 1, source: str = "call") -> None:
        """Count calls, from any thread; `size_bytes` is S of one call, and other fields are those of CallCount.

        The group None is the default one. If this worker is not in the group, nothing is counted.
        """
        c10d = sys.modules["torch.distributed.distributed_c10d"]
        if group is None:
            group = c10d.GroupMember.WORLD
        # A group without this worker is represented by a number.
        if not isinstance(group, c10d.ProcessGroup):
            return
        if group is not self._last_group():
            self._last_group, self._last_name = weakref.ref(group), group.group_name
        name = self._last_name
        if name not in self._groups:
            self._groups.add(name)
            self._meet(name, group, c10d)
        row = (op, name, size_bytes, source)
        with self._lock:
            self._counts[row] = self._counts.get(row, 0) + count
            if len(self._counts) > _MOST_SIZES:
                self._counts = _means(self._counts)

    def close(self, _step: int) -> Dict[str, Any]:
        """A meter: the number of the step's set of calls, which is recorded when it is new."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return {"traffic": self._number(counts if len(counts) <= _MOST_ROWS else _means(counts))}

    def _number(self, counts: _Counts) -> int:
        key = frozenset(counts.items())
        if key in self._numbers:
            self._numbers.move_to_end(key)
            return self._numbers[key]
        number = self._numbers[key] = self._next_number
        self._next_number += 1
        if len(self._numbers) > _MOST_REMEMBERED:
            self._numbers.popitem(last=False)
        rows = [
            {"op": op, "group": group, "size_bytes": size_bytes, "count": count, "source": source}
            for (op, group, size_bytes, source), count in sorted(counts.items())
        ]
        self._steps.note("traffic", traffic=number, calls=rows)
        return number

    def _meet(self, name: str, group: Any, c10d: Any) -> None:
        ranks = list(c10d.get_process_group_ranks(group))
        # `gloo`, or by device if they differ: `cpu:gloo,cuda:nccl`.
        config = str(c10d.get_backend_config(group))
        backends = {part.rpartition(":")[2] for part in config.split(",")}
        self._steps.note("group", group=name, ranks=ranks, backend=backends.pop() if len(backends) == 1 else config)


def _means(counts: _Counts) -> _Counts:
    """Merge all sizes of a collective in a group into one row with the mean size."""
    totals: Dict[Tuple[str, str, str], Tuple[float, int]] = {}
    for (op, group, size_bytes, source), count in counts.items():
        bytes_before, count_before = totals.get((op, group, source), (0.0, 0))
        totals[op, group, source] = (bytes_before + size_bytes * count, count_before + count)
    return {
        (op, group, total / count, source): count for (op, group, source), (total, count) in totals.items() if count
    }
