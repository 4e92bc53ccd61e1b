"""The lease of a run, as the controller keeps it: how often it is renewed, and when it has surely run out."""

from __future__ import annotations

import time
from typing import Any

__all__ = ["LEASE_S", "LeaseRenewal"]

LEASE_S = 120.0
"""How long a node keeps running without contact to the controller, unless something else is asked for."""

# A lease is renewed when this part of it has passed: three renewals may be lost before it runs out.
_RENEWED_AFTER = 1 / 4
# A run without a lease goes on without us; so long we seek it before we say that it is lost.
_DETACHED_S = 300.0


class LeaseRenewal:
    """When the next word to one node is due.

    Args:
        lease_s: the lease; None is without end, and needs no word.
    """

    def __init__(self, lease_s: float | None) -> None:
        self._lease_s = lease_s
        self._renewed = time.monotonic()

    def take_order(self, *, now: bool = False) -> dict[str, Any] | None:
        """The order that renews it, when that is due or `now`; None otherwise."""
        if self._lease_s is None or not (now or time.monotonic() - self._renewed >= self._lease_s * _RENEWED_AFTER):
            return None
        self._renewed = time.monotonic()
        return {"op": "lease", "lease_s": self._lease_s}

    @property
    def over_s(self) -> float:
        """So long after the last word it has surely run out; without end, so long the node is sought."""
        return 2.0 * (self._lease_s or _DETACHED_S)
