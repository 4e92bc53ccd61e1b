"""status.json: what a run's state is. Its writers are the supervisor, the sentinel and whoever finds both dead."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from typing import Optional

from ..channel import Record
from ..processes import Family, is_running
from ..rundir import RunDir
from .machine import is_locked, may_have_been, shows_processes_of

WATCHERS_STDERR = "agent.err"
"""Where sentinel and supervisor print, and what they hold locked while one of them lives."""

_FILE = "status.json"
_WATCHERS = "supervisor.json"
# Between the directory's creation and supervisor.json lie two forks; a directory without one for longer has no watcher.
_START_S = 15.0


def new_status() -> Record:
    """The status of a run that is being started now."""
    return {
        "schema": 1,
        "state": "starting",
        "exit_code": None,
        "signal": None,
        "cause": None,
        "message": None,
        "started_s": time.time(),
        "ended_s": None,
        "processes_left": 0,
        "job_pid": None,
        "oom_kills": None,
        "disk_free_bytes": None,
        "log_gone_bytes": 0,
        "stopped_by": None,
    }


def read_status(run: RunDir) -> Optional[Record]:
    """The status; None when it cannot be read right now."""
    return run.read(_FILE)


def write_status(run: RunDir, status: Record) -> None:
    """Write the status."""
    run.write(_FILE, status)


def note_exit(status: Record, wait_status: int) -> None:
    """Put how the job ended, as waitpid(2) tells it, into the status."""
    if os.WIFSIGNALED(wait_status):
        status["signal"] = signal_name(os.WTERMSIG(wait_status))
    else:
        status["exit_code"] = os.WEXITSTATUS(wait_status)


def describe_exit(status: Record) -> str:
    """How the job ended, in words."""
    return f"was ended by {status['signal']}" if status["signal"] else f"ended with exit code {status['exit_code']}"


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; realtime signals have no name of their own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def has_ended(status: Optional[Record]) -> bool:
    """Whether the run is over."""
    return status is not None and status.get("state") == "ended"


def is_watched(run: RunDir) -> bool:
    """Whether its supervisor or its sentinel lives.

    Where nobody here can say that none does, one may: of a run of another machine, and where the file system does not
    answer.
    """
    try:
        watcher = _read_watcher(run)
    except OSError:
        return True
    if watcher is None:
        return time.time() - run.created_s() < _START_S
    if not shows_processes_of(watcher):
        return _is_elsewhere(run, watcher)
    if watcher.get("pid") is None:
        # A clock that no correction moves, and which is that of the same boot.
        created_s = watcher.get("created_boot_s")
        return isinstance(created_s, float) and time.clock_gettime(time.CLOCK_BOOTTIME) - created_s < _START_S
    return any(_lives(watcher.get(f"{which}pid"), watcher.get(f"{which}start_ticks")) for which in ("", "sentinel_"))


def other_machine(run: RunDir) -> Optional[str]:
    """The host name of the machine whose run it is; None of a run of this one."""
    watcher = run.read(_WATCHERS)
    if watcher is None or shows_processes_of(watcher) or not _is_elsewhere(run, watcher):
        return None
    return str(watcher.get("hostname", "unknown"))


def is_lost(run: RunDir) -> bool:
    """Whether the run has not ended and nobody is left to end it.

    Where somebody has taken supervisor.json away, or all of the directory, this is told of it by its processes alone.
    """
    # In this order: a supervisor writes its last word before it leaves.
    if is_watched(run) or has_ended(read_status(run)):
        return False
    return os.path.exists(os.path.join(run.path, _WATCHERS)) or not Family(run.run_id).find()


def _read_watcher(run: RunDir) -> Optional[Record]:
    """supervisor.json; None where there is none, or it holds something else."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):
        with open(os.path.join(run.path, _WATCHERS), "rb") as file:
            found = json.loads(file.read())
        return found if isinstance(found, dict) else None
    return None


def _is_elsewhere(run: RunDir, watcher: Record) -> bool:
    return not may_have_been(watcher) or is_locked(os.path.join(run.path, WATCHERS_STDERR))


def _lives(pid: object, start_ticks: object) -> bool:
    # A file of another release, or one that somebody wrote, may say anything.
    return isinstance(pid, int) and isinstance(start_ticks, int) and is_running(pid, start_ticks)
