"""The lease of a run, as the controller keeps it: how often it is renewed, and when it has surely run out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

LEASE_S = 120.0
"""How long a node keeps running without contact to the controller, unless something else is asked for."""

# A lease is renewed when this part of it has passed: three renewals may be lost before it runs out.
_RENEWED_AFTER = 1 / 4
# A run without a lease goes on without us; so long we seek it before we say that it is lost.
_DETACHED_S = 300.0
# A machine that wakes up has no time to lose.
_LOOK_S = 1.0


class LeaseRenewal:
    """When the next word to one node is due. Time is CLOCK_BOOTTIME, as on the node: it counts suspension.

    Args:
        lease_s: the lease; None is without end, and needs no word.
    """

    def __init__(self, lease_s: float | None, clock: Callable[[], float] | None = None) -> None:
        self._lease_s = lease_s
        self._clock = clock or _boot_s
        self._renewed = self._clock()

    def take_order(self, *, now: bool = False) -> dict[str, Any] | None:
        """The order that renews it, when that is due or `now`; None otherwise."""
        if self._lease_s is None or not (now or self._clock() - self._renewed >= self._lease_s * _RENEWED_AFTER):
            return None
        self._renewed = self._clock()
        return {"op": "lease", "lease_s": self._lease_s}

    @property
    def look_s(self) -> float:
        """How long to wait until the next look at what is due."""
        return _LOOK_S if self._lease_s is None else min(_LOOK_S, self._lease_s * _RENEWED_AFTER / 2)

    @property
    def over_s(self) -> float:
        """So long after the last word it has surely run out; without end, so long the node is sought."""
        return 2.0 * (self._lease_s or _DETACHED_S)


class LeaseKeeper:
    """Renews the lease of one node in a thread of its own: nothing else that takes time here or there delays it.

    Args:
        name: of the node.
        renew: sends the order where it is due.
    """

    def __init__(self, name: str, renewal: LeaseRenewal, renew: Callable[[], None]) -> None:
        self._look_s = renewal.look_s
        self._renew = renew
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"lease-{name}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Send no more."""
        self._over.set()

    def _keep(self) -> None:
        while not self._over.wait(self._look_s):
            self._renew()


def _boot_s() -> float:
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
