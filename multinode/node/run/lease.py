"""The lease: how long a run survives without its controller. Time is CLOCK_BOOTTIME: it counts suspension."""

from __future__ import annotations

import time
from typing import Optional

from ..rundir import RunDir

_FILE = "lease.json"


def grant_lease(run: RunDir, lease_s: Optional[float]) -> None:
    """Write the lease: `lease_s` seconds from now, or without end."""
    deadline = None if lease_s is None else time.clock_gettime(time.CLOCK_BOOTTIME) + lease_s
    run.write(_FILE, {"schema": 1, "lease_s": lease_s, "deadline_boot_s": deadline})


def renew_lease(run: RunDir, lease_s: Optional[float]) -> None:
    """Grant the lease anew, unless it has no end: word from a controller never makes a detached run stop."""
    lease = run.read(_FILE)
    if lease is None or lease.get("deadline_boot_s") is not None:
        grant_lease(run, lease_s)


def read_lease_s(run: RunDir) -> Optional[float]:
    """The length of the lease that was granted last; None is without end."""
    lease_s: Optional[float] = (run.read(_FILE) or {}).get("lease_s")
    return lease_s


class Lease:
    """The supervisor's view of the lease."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._deadline_boot_s: Optional[float] = None

    def expired(self) -> bool:
        """Whether it has run out; a lease that cannot be read right now stays as it was."""
        lease = self._run.read(_FILE)
        if lease is not None:
            self._deadline_boot_s = lease.get("deadline_boot_s")
        return self._deadline_boot_s is not None and time.clock_gettime(time.CLOCK_BOOTTIME) > self._deadline_boot_s
