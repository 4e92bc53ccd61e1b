"""Ending a run whose supervisor is dead. The sentinel does it, or else whoever follows or stops the run."""

from __future__ import annotations

import contextlib
import time
from typing import Optional

from ..channel import Record
from ..rundir import RunDir
from .ending import Ending
from .processes import Family
from .status import new_status, note_exit, read_status, write_status

__all__ = ["Recovery"]

_GRACE_S = 10.0


class Recovery:
    """One recovery. Call `step` until it returns True.

    Args:
        run: the run.
        family: its processes, as far as the caller can see them.
        message: what became of the supervisor.

    Attributes:
        status: the run's status as it should be on disk; a full disk may keep it from there.
    """

    def __init__(self, run: RunDir, family: Family, message: str) -> None:
        self._run = run
        request = run.read("request.json") or {}
        self._ending = Ending(family.find, request.get("grace_s", _GRACE_S))
        self.status: Record = read_status(run) or new_status()
        self._change(state="stopping", cause="supervisor_lost", message=message)

    def shorten(self, grace_s: float) -> None:
        """Someone is in a hurry: KILL in `grace_s` seconds at the latest."""
        self._ending.shorten(grace_s)

    def step(self, job_status: Optional[int] = None) -> bool:
        """Look once; True when the run has ended.

        Args:
            job_status: the job's wait status, where the caller has just reaped it.
        """
        if job_status is not None:
            note_exit(self.status, job_status)
        if not self._ending.step():
            return False
        self._change(state="ended", ended_s=time.time(), processes_left=self._ending.left)
        return True

    def _change(self, **changes: object) -> None:
        self.status.update(changes)
        # The processes come first; a status that cannot be written stops nothing.
        with contextlib.suppress(OSError):
            write_status(self._run, self.status)
