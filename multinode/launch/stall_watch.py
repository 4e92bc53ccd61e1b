"""StallWatch: notices that a run hangs, has all nodes diagnosed beside the following of it, and says what is behind."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

from multinode.analyse.hang.stall import explain_stall
from multinode.core.run.stall import NodeDiagnosis, Stall, StallRecord
from multinode.decoding import convert
from multinode.launch.session import Event
from multinode.launch.stall_clock import StallClock
from multinode.store.run_directory import RunDirectory

__all__ = ["StallWatch"]

_FILE = "stall.json"
_MOST_KEPT = 20
_LEAVE_S = 25.0


class StallWatch:
    """Watches one run; its methods are called from the loop that follows the run and do not block.

    Args:
        stall_s: how long no node may get on; None watches nothing.
        node_count: nodes of the run.
        diagnose: asks all nodes; takes seconds, and is called in a thread.
        directory: where `stall.json` goes.

    Attributes:
        stalls: all so far, those of an earlier controller too.
        current: the one that lasts; None while the run gets on.
    """

    def __init__(
        self,
        *,
        stall_s: float | None,
        node_count: int,
        diagnose: Callable[[], Sequence[NodeDiagnosis]],
        directory: RunDirectory,
    ) -> None:
        self._stall_s = stall_s
        self._clock = StallClock(node_count)
        self._diagnose = diagnose
        self._directory = directory
        before = directory.read(_FILE, StallRecord)
        self.stalls: tuple[Stall, ...] = before.stalls if before is not None else ()
        self.current: Stall | None = None
        # The progress after which the nodes were last asked: once is enough for each standstill.
        self._asked: int | None = None
        self._answers: queue.Queue[Sequence[NodeDiagnosis] | Exception] = queue.Queue()
        self._thread: threading.Thread | None = None

    def take(self, event: Event) -> None:
        """Note what a node said."""
        before = self._clock.generation
        self._clock.take(event, time.monotonic())
        if self._clock.generation != before:
            self.current = None

    def look(self) -> bool:
        """Have the nodes asked when the time has come, and fold what they answered; whether that is a new stall."""
        if self._stall_s is None:
            return False
        found = not self._answers.empty() and self._fold(self._answers.get())
        generation = self._clock.generation
        idle = self._thread is None or not self._thread.is_alive()
        if idle and self._asked != generation and self._clock.silent_s(time.monotonic()) >= self._stall_s:
            self._asked = generation
            self._thread = threading.Thread(target=self._ask, name="diagnose", daemon=True)
            self._thread.start()
        return found

    def close(self) -> None:
        """Wait for a diagnosis that is under way: nothing of ours stays on a node."""
        if self._thread is not None:
            self._thread.join(_LEAVE_S)

    def _ask(self) -> None:
        try:
            self._answers.put(self._diagnose())
        except Exception as error:  # noqa: BLE001 - a defect; raised in the loop, where it is not lost
            self._answers.put(error)

    def _fold(self, answer: Sequence[NodeDiagnosis] | Exception) -> bool:
        if isinstance(answer, Exception):
            raise answer
        if self._asked != self._clock.generation:
            # The run went on meanwhile.
            return False
        self.current = self._make(answer)
        self.stalls = (*self.stalls, self.current)[-_MOST_KEPT:]
        self._directory.write(_FILE, StallRecord(stalls=self.stalls, nodes=tuple(answer)))
        return True

    def _make(self, nodes: Sequence[NodeDiagnosis]) -> Stall:
        found = explain_stall(nodes)
        fields = {name: getattr(found, name) for name in found.__struct_fields__}
        silent_s = self._clock.silent_s(time.monotonic())
        return convert({"time_s": time.time(), "silent_s": silent_s, **fields}, Stall)
