"""PhaseClock: host time of a step by what it was spent on. Nested phases count to the innermost alone.

Only the thread that trains is timed: what other threads do, it does not wait for.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import Any, Callable, Dict, List

__all__ = ["PhaseClock"]


class PhaseClock:
    """Adds up the time between `enter` and `leave`, by phase."""

    def __init__(self) -> None:
        self._totals_ns: Dict[str, int] = {}
        self._stack: List[str] = []
        self._since_ns = 0
        # Backward passes on a GPU run in a thread of autograd; the first thread that steps or waits is the training's.
        self._thread = threading.get_ident()

    def enter(self, phase: str) -> bool:
        """A phase begins; False where this thread is not timed, and then there is nothing to leave."""
        if threading.get_ident() != self._thread:
            return False
        self._charge()
        self._stack.append(phase)
        return True

    def leave(self) -> None:
        """The innermost phase ends."""
        self._charge()
        self._stack.pop()

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed as a phase."""

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not self.enter(phase):
                return function(*args, **kwargs)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return wrapped

    def take_us(self) -> Dict[str, float]:
        """Microseconds by phase since the last call; what is open goes on in the next."""
        self._charge()
        taken = {phase: total / 1000 for phase, total in self._totals_ns.items()}
        self._totals_ns = {}
        return taken

    def _charge(self) -> None:
        now = time.monotonic_ns()
        if self._stack:
            phase = self._stack[-1]
            self._totals_ns[phase] = self._totals_ns.get(phase, 0) + now - self._since_ns
        self._since_ns = now
