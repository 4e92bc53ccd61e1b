"""PhaseClock: host time of a step by what it was spent on. Nested phases count to the innermost alone.

Only the thread that trains is timed: what other threads do, it does not wait for.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Callable, Dict, List, Tuple

import multinode_guard

__all__ = ["PhaseClock"]


class PhaseClock:
    """Adds up the time between `enter` and `leave`, by phase.

    Args:
        guard: keeps what fails in here.

    Attributes:
        depth: how many phases are open.
    """

    def __init__(self, guard: multinode_guard.Guard) -> None:
        self._guard = guard
        self._totals_ns: Dict[str, int] = {}
        self._stack: List[str] = []
        self._since_ns = 0
        # That which runs the user's script. Backward passes on a GPU run in threads of autograd's own.
        self._thread = threading.get_ident()

    @property
    def depth(self) -> int:
        """How many phases are open."""
        return len(self._stack)

    def enter(self, phase: str) -> bool:
        """A phase begins; False where this thread is not timed, and then there is nothing to leave."""
        if threading.get_ident() != self._thread:
            return False
        self._charge()
        self._stack.append(phase)
        return True

    def leave(self) -> None:
        """The innermost phase ends."""
        self.unwind(len(self._stack) - 1)

    def unwind(self, depth: int) -> None:
        """All phases but the outermost `depth` end: some of them may have missed theirs."""
        self._charge()
        del self._stack[max(depth, 0) :]

    def within(self, *phases: str) -> bool:
        """Whether this is inside one of these phases; of a thread that is not timed nobody knows: True."""
        return threading.get_ident() != self._thread or any(phase in self._stack for phase in phases)

    def timed(self, phase: str, function: Callable[..., Any], unless: Tuple[str, ...] = ()) -> Callable[..., Any]:
        """The function, timed as a phase; left as it is inside the phases `unless`."""

        def enter(*_: Any, **__: Any) -> bool:
            return not (unless and self.within(*unless)) and self.enter(phase)

        return self._guard.around(function, enter, self.leave)

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
