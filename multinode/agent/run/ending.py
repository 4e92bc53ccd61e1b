"""Ending a run's processes: TERM, a time of grace, KILL until none is left. One look a step, so nobody blocks on it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from .processes import Process

__all__ = ["STEP_S", "Ending"]

STEP_S = 0.05
"""How long to wait between two steps."""

_KILL_S = 10.0
# Two looks in a row, because a child that is born during one look can be missed by it.
_QUIET_LOOKS = 2


class Ending:
    """One stop of a run. Call `step` until it returns True.

    Args:
        find: the living processes of the run, at each call.
        grace_s: time from TERM to KILL.

    Attributes:
        left: how many processes the last look found.
    """

    def __init__(self, find: Callable[[], list[Process]], grace_s: float) -> None:
        self.left = 0
        self._find = find
        self._kill_at = time.monotonic() + grace_s
        self._asked: set[tuple[int, int]] = set()
        self._quiet_looks = 0

    def shorten(self, grace_s: float) -> None:
        """KILL in `grace_s` seconds from now, if that is earlier than planned."""
        self._kill_at = min(self._kill_at, time.monotonic() + grace_s)

    def step(self) -> bool:
        """Look once and signal whom it finds; True when all are gone, or KILL has not helped for 10 s."""
        found = self._find()
        self.left = len(found)
        self._quiet_looks = 0 if found else self._quiet_looks + 1
        for process in found:
            self._ask(process)
        now = time.monotonic()
        if now >= self._kill_at:
            for process in found:
                process.send(signal.SIGKILL)
        return self._quiet_looks >= _QUIET_LOOKS or now >= self._kill_at + _KILL_S

    def _ask(self, process: Process) -> None:
        identity = (process.pid, process.start_ticks)
        if identity not in self._asked:
            self._asked.add(identity)
            process.send(signal.SIGTERM)
            # A process that is suspended takes TERM only once it goes on.
            process.send(signal.SIGCONT)
