"""StallClock: how long no node of a run has got on. Fed with events and times; knows no clock of its own."""

from __future__ import annotations

from multinode.launch.records import Chunk, Hello, Status
from multinode.launch.session import Event

__all__ = ["StallClock"]

_WORKER_SAMPLES = "samples/rank-"


class StallClock:
    """Counts from the last byte of log or record of a worker that came from any node.

    It begins when the job runs on every node, or with the first line of log. It stands still while a node is out of
    contact: what we do not hear is no sign of what the job does.

    Args:
        node_count: nodes of the run.

    Attributes:
        generation: grows with every sign of progress.
    """

    def __init__(self, node_count: int) -> None:
        self.generation = 0
        self._since: float | None = None
        self._running = [False] * node_count
        self._lost = [False] * node_count

    def take(self, event: Event, now: float) -> None:
        """Note what a node said; `now` in seconds of any steady clock."""
        message = event.message
        if event.error is not None:
            self._lost[event.node_rank] = True
        elif isinstance(message, Hello):
            if self._lost[event.node_rank]:
                self._lost[event.node_rank] = False
                self._restart(now)
        elif isinstance(message, Chunk):
            if message.file == "log" or message.file.startswith(_WORKER_SAMPLES):
                self.generation += 1
                self._since = now
        elif isinstance(message, Status):
            self._running[event.node_rank] = message.state == "running"
            if self._since is None and all(self._running):
                self._since = now

    def silent_s(self, now: float) -> float:
        """Seconds without progress; 0 before the job has begun and while a node is out of contact."""
        return now - self._since if self._since is not None and not any(self._lost) else 0.0

    def _restart(self, now: float) -> None:
        if self._since is not None:
            self._since = now
