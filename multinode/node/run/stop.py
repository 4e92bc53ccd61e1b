"""Stopping a run: the order to the supervisor, the verb `stop` that gives it and waits, and how processes are ended.

Processes get TERM, and after a grace period KILL until none is left. If the supervisor is dead, the sentinel ends the
run; if both are dead, whoever follows or stops the run does.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable
from typing import Optional

from ..channel import AgentError, Channel, Record
from ..processes import Family, Process, find_process
from ..rundir import RunDir
from .status import has_ended, is_lost, new_status, note_exit, other_machine, read_status, write_status

STEP_S = 0.05
"""Seconds between two steps of an `Ending`."""

_FILE = "stop.json"
_PATIENCE_S = 15.0
_WAIT_S = 0.1
_KILL_S = 10.0
# Two looks in a row: one look can miss a process that starts during it.
_QUIET_LOOKS = 2
_LOST_GRACE_S = 10.0
# Prefixes of the fields of supervisor and sentinel in supervisor.json.
_WATCHERS = ("", "sentinel_")


def run(request: Record, channel: Channel) -> None:
    """The verb `stop`: emits one record `stopped` with the final status and the number of processes left."""
    run_dir = RunDir(request["run_id"])
    grace_s = float(request["grace_s"])
    status = _stop_known(run_dir, grace_s) if run_dir.exists() else _unknown()
    # The status counts the processes that were left at its end; those that are left now are ended here.
    status["processes_left"] = _sweep(run_dir.run_id, grace_s)
    channel.emit({**status, "kind": "stopped", "run_id": run_dir.run_id})


def order_stop(run_dir: RunDir, grace_s: float, order: Optional[str] = None) -> None:
    """Tell the supervisor to stop the run: TERM, and KILL after `grace_s` seconds.

    `order` says who ordered it; the status of the run records it.
    """
    watchers = _find_watchers(run_dir)
    try:
        run_dir.write(_FILE, {"schema": 1, "grace_s": grace_s, "order": order or "stop", "time_s": time.time()})
    except OSError:
        # On a full disk, TERM stops the run, too, with the grace period of the request.
        for process in watchers:
            # The sentinel ignores TERM.
            process.send(signal.SIGTERM)
    for process in watchers:
        # A suspended process reads no orders.
        process.send(signal.SIGCONT)


def _find_watchers(run_dir: RunDir) -> list[Process]:
    """Supervisor and sentinel, if they live on this machine."""
    watcher = run_dir.read("supervisor.json") or {}
    if other_machine(run_dir) is not None:
        return []
    watchers = [
        (find_process(watcher.get(f"{which}pid") or -1), watcher.get(f"{which}start_ticks")) for which in _WATCHERS
    ]
    return [process for process, start_ticks in watchers if process is not None and process.start_ticks == start_ticks]


class StopOrders:
    """Reads stop orders for the supervisor."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run = run_dir
        self._path = os.path.join(run_dir.path, _FILE)
        self._seen: Optional[tuple[int, int]] = None

    def latest(self) -> Optional[tuple[float, str]]:
        """Grace period in seconds and name of an order that came since the last call; None if there is none."""
        with contextlib.suppress(OSError):
            stat = os.stat(self._path)
            order = self._run.read(_FILE)
            if order is not None and (stat.st_ino, stat.st_mtime_ns) != self._seen:
                self._seen = (stat.st_ino, stat.st_mtime_ns)
                return float(order["grace_s"]), str(order.get("order"))
        return None


class Ending:
    """Ends the processes of a run without blocking. Call `step` until it returns True.

    Args:
        find: finds the living processes of the run.
        grace_s: seconds from TERM to KILL.
    """

    def __init__(self, find: Callable[[], list[Process]], grace_s: float) -> None:
        self.left = 0  # how many processes the last look found
        self._find = find
        self._kill_at = time.monotonic() + grace_s
        self._asked: set[tuple[int, int]] = set()
        self._quiet_looks = 0

    def shorten(self, grace_s: float) -> None:
        """KILL in `grace_s` seconds from now, if that is earlier than planned."""
        self._kill_at = min(self._kill_at, time.monotonic() + grace_s)

    def step(self) -> bool:
        """Signal the processes that are found now; True if all are gone, or some survived KILL for 10 s."""
        processes = self._find()
        self.left = len(processes)
        self._quiet_looks = 0 if processes else self._quiet_looks + 1
        for process in processes:
            self._ask(process)
        now = time.monotonic()
        if now >= self._kill_at:
            for process in processes:
                process.send(signal.SIGKILL)
        return self._quiet_looks >= _QUIET_LOOKS or now >= self._kill_at + _KILL_S

    def _ask(self, process: Process) -> None:
        identity = (process.pid, process.start_ticks)
        if identity not in self._asked:
            self._asked.add(identity)
            process.send(signal.SIGTERM)
            # A suspended process handles TERM only after it continues.
            process.send(signal.SIGCONT)


class Recovery:
    """Ends a run whose supervisor is dead. Call `step` until it returns True.

    Args:
        family: processes of the run.
        message: what happened to the supervisor.
    """

    def __init__(self, run: RunDir, family: Family, message: str) -> None:
        self._run = run
        request = run.read("request.json") or {}
        self._ending = Ending(family.find, request.get("grace_s", _LOST_GRACE_S))
        # the run's status; on a full disk, status.json may be older
        self.status: Record = read_status(run) or new_status()
        self._change(state="stopping", cause="supervisor_lost", message=message)

    def shorten(self, grace_s: float) -> None:
        """Send KILL in `grace_s` seconds at the latest."""
        self._ending.shorten(grace_s)

    def step(self, job_status: Optional[int] = None) -> bool:
        """Take one step of the ending; True if the run has ended.

        Args:
            job_status: the job's wait status, if the caller has just reaped it.
        """
        if job_status is not None:
            note_exit(self.status, job_status)
        if not self._ending.step():
            return False
        self._change(state="ended", ended_s=time.time(), processes_left=self._ending.left)
        return True

    def _change(self, **changes: object) -> None:
        self.status.update(changes)
        # Ending the processes matters more than the status: a full disk must not stop it.
        with contextlib.suppress(OSError):
            write_status(self._run, self.status)


def _unknown() -> Record:
    return {"schema": 1, "state": "ended", "cause": "unknown", "message": "no such run on this node"}


def _stop_known(run_dir: RunDir, grace_s: float) -> Record:
    deadline = time.monotonic() + grace_s + _PATIENCE_S
    status = read_status(run_dir)
    if not has_ended(status):
        order_stop(run_dir, grace_s)
    while status is None or not has_ended(status):
        if not os.path.exists(os.path.join(run_dir.path, "supervisor.json")):
            # Somebody has removed it, or the whole directory: `_sweep` ends the processes.
            return _unknown()
        if is_lost(run_dir):
            return recover(run_dir, "neither supervisor nor sentinel was running when the run was stopped", grace_s)
        if time.monotonic() > deadline:
            pid, machine = (run_dir.read("supervisor.json") or {}).get("pid"), other_machine(run_dir)
            where = f"pid {pid}" if machine is None else f"pid {pid} on the machine {machine}"
            raise AgentError(
                f"the supervisor ({where}) has not ended run {run_dir.run_id} within {grace_s + _PATIENCE_S:.0f} s",
                hint=f"kill -9 {pid} on {'the node' if machine is None else machine}: the sentinel then ends the run",
            )
        time.sleep(_WAIT_S)
        status = read_status(run_dir)
    return status


def recover(run_dir: RunDir, message: str, grace_s: float = math.inf) -> Record:
    """End a run without watchers within the shorter of its own grace period and `grace_s`; returns its status."""
    recovery = Recovery(run_dir, Family(run_dir.run_id), message)
    recovery.shorten(grace_s)
    while not recovery.step():
        time.sleep(STEP_S)
    return recovery.status


def _sweep(run_id: str, grace_s: float) -> int:
    ending = Ending(Family(run_id).find, grace_s)
    while not ending.step():
        time.sleep(STEP_S)
    return ending.left
