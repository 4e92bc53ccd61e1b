"""Stopping a run: the order that a supervisor obeys, and the verb that gives it and waits for the end.

Where nobody is left to obey, the verb ends the run's processes itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Optional

from ..channel import AgentError, Channel, Record
from ..rundir import RunDir
from .ending import STEP_S, Ending
from .processes import Family, find_process
from .recovery import Recovery
from .status import has_ended, is_lost, read_status

__all__ = ["StopOrders", "order_stop", "run"]

_FILE = "stop.json"
_PATIENCE_S = 15.0
_WAIT_S = 0.1


def run(request: Record, channel: Channel) -> None:
    """The verb `stop`: one record `stopped` with the final status, and how many processes are left."""
    run_dir = RunDir(request["run_id"])
    grace_s = float(request["grace_s"])
    if run_dir.exists():
        status = _stop_known(run_dir, grace_s)
    else:
        status = {"schema": 1, "state": "ended", "cause": "unknown", "message": "no such run on this node"}
    # The status tells what was left then; what is left now is seen, and ended, here.
    status["processes_left"] = _sweep(run_dir.run_id, grace_s)
    channel.emit({**status, "kind": "stopped", "run_id": run_dir.run_id})


def order_stop(run_dir: RunDir, grace_s: float) -> None:
    """Tell the supervisor to stop the run; TERM after which `grace_s` seconds pass until KILL."""
    try:
        run_dir.write(_FILE, {"schema": 1, "grace_s": grace_s, "time_s": time.time()})
    except OSError:
        # A full disk: TERM says the same, with the grace of the request.
        watcher = run_dir.read("supervisor.json") or {}
        process = find_process(watcher.get("pid", -1))
        if process is not None and process.start_ticks == watcher["start_ticks"]:
            process.send(signal.SIGTERM)


class StopOrders:
    """The supervisor's view of the orders."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run = run_dir
        self._path = os.path.join(run_dir.path, _FILE)
        self._seen: Optional[tuple[int, int]] = None

    def latest_grace_s(self) -> Optional[float]:
        """The grace of an order that has come since the last call; None when there is none."""
        with contextlib.suppress(OSError):
            stat = os.stat(self._path)
            order = self._run.read(_FILE)
            if order is not None and (stat.st_ino, stat.st_mtime_ns) != self._seen:
                self._seen = (stat.st_ino, stat.st_mtime_ns)
                return float(order["grace_s"])
        return None


def _stop_known(run_dir: RunDir, grace_s: float) -> Record:
    deadline = time.monotonic() + grace_s + _PATIENCE_S
    status = read_status(run_dir)
    if not has_ended(status):
        order_stop(run_dir, grace_s)
    while status is None or not has_ended(status):
        if is_lost(run_dir):
            return _recover(run_dir, grace_s)
        if time.monotonic() > deadline:
            pid = (run_dir.read("supervisor.json") or {}).get("pid")
            raise AgentError(
                f"the supervisor (pid {pid}) has not ended run {run_dir.run_id} within {grace_s + _PATIENCE_S:.0f} s",
                hint=f"kill -9 {pid} on the node: the sentinel then ends the run",
            )
        time.sleep(_WAIT_S)
        status = read_status(run_dir)
    return status


def _recover(run_dir: RunDir, grace_s: float) -> Record:
    family = Family(run_dir.run_id, root=None, spare=())
    recovery = Recovery(run_dir, family, "neither supervisor nor sentinel was alive when the run was stopped")
    recovery.shorten(grace_s)
    while not recovery.step():
        time.sleep(STEP_S)
    return recovery.status


def _sweep(run_id: str, grace_s: float) -> int:
    ending = Ending(Family(run_id, root=None, spare=()).find, grace_s)
    while not ending.step():
        time.sleep(STEP_S)
    return ending.left
