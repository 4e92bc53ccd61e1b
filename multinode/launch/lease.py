"""The lease of a run on the controller: when to renew it, and when it has certainly expired."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

LEASE_S = 120.0
"""How long a node keeps running without contact to the controller, by default."""

# A lease is renewed after this part of it: three renewals may be lost before it expires.
_RENEWED_AFTER = 1 / 4
# A run without a lease continues without us; how long we try to reach it before it counts as lost.
_DETACHED_S = 300.0
# After a suspension there is no time to lose.
_LOOK_S = 1.0


class LeaseRenewal:
    """When the next renewal of one node is due. Time is CLOCK_BOOTTIME, as on the node: it includes suspension.

    Args:
        lease_s: the lease; None is unlimited, and needs no renewal.
    """

    def __init__(self, lease_s: float | None, clock: Callable[[], float] | None = None) -> None:
        self._lease_s = lease_s
        self._clock = clock or _boot_s
        self._renewed = self._clock()

    def take_order(self, *, now: bool = False) -> dict[str, Any] | None:
        """The order that renews it, if due or `now`; otherwise None."""
        if self._lease_s is None or not (now or self._clock() - self._renewed >= self._lease_s * _RENEWED_AFTER):
            return None
        self._renewed = self._clock()
        return {"op": "lease", "lease_s": self._lease_s}

    @property
    def look_s(self) -> float:
        """Time until the next look."""
        return _LOOK_S if self._lease_s is None else min(_LOOK_S, self._lease_s * _RENEWED_AFTER / 2)

    @property
    def over_s(self) -> float:
        """Time after the last message when the lease has certainly expired; without one, how long to seek the node."""
        return 2.0 * (self._lease_s or _DETACHED_S)


class LeaseKeeper:
    """Renews the lease of one node in its own thread, so that nothing else delays it.

    Args:
        name: of the node.
        renew: sends the order if due.
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
        """Stop sending."""
        self._over.set()

    def _keep(self) -> None:
        while not self._over.wait(self._look_s):
            self._renew()


def _boot_s() -> float:
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
