"""StopRequest: how the outside asks a run to stop. Set by a signal handler, read by the loop that follows the run."""

from __future__ import annotations

__all__ = ["StopRequest"]


class StopRequest:
    """Counts how often a stop was asked for: once is TERM and a grace period, twice is KILL.

    An int is all there is, because a signal handler may only do what cannot block.
    """

    def __init__(self) -> None:
        self.count = 0
        self.reason = ""

    def ask(self, reason: str) -> None:
        """Ask once more."""
        self.count += 1
        self.reason = self.reason or reason
