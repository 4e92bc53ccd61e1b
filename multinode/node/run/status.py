"""The state of a run (status.json), the machine that it runs on, and its lease: how long it runs without controller."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import struct
import time
from typing import Optional

from ..channel import Record
from ..files import try_read
from ..processes import Family, boot_id, is_running
from ..rundir import RunDir

# struct flock of fcntl(2): type, whence, start, length, pid.
_FLOCK = struct.Struct("hhqqi4x")
_WHOLE = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


def this_machine() -> Record:
    """Fields that identify this machine in supervisor.json."""
    return {
        "hostname": os.uname().nodename,
        "machine_id": try_read("/etc/machine-id") or None,
        "boot_id": boot_id(),
        "pid_namespace": _pid_namespace(),
    }


def shows_processes_of(watcher: Record) -> bool:
    """Whether the pids of a supervisor.json are those of our /proc: same boot, same pid namespace."""
    here = this_machine()
    return all(watcher.get(name, here[name]) == here[name] for name in ("boot_id", "pid_namespace"))


def may_have_been(watcher: Record) -> bool:
    """Whether a supervisor.json may be of this machine or container before its last start."""
    here = this_machine()
    if any(watcher.get(name) != here[name] for name in ("hostname", "machine_id")):
        return False
    # Containers on different machines may share a host name and have no machine id: then the boot must be the same.
    return here["machine_id"] is not None or watcher.get("boot_id") == here["boot_id"]


def hold_lock(fd: int) -> None:
    """Lock a file until the last process that inherits this descriptor ends; without effect if locks do not work."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _WHOLE)


def is_locked(path: str) -> bool:
    """Whether somebody holds the lock of `hold_lock`; False if that is unknown."""
    try:
        fd = os.open(path, os.O_RDWR)
        try:
            held = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _WHOLE)
        finally:
            os.close(fd)
    except OSError:
        return False
    return bool(_FLOCK.unpack(held)[0] != fcntl.F_UNLCK)


def _pid_namespace() -> Optional[str]:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


WATCHERS_STDERR = "agent.err"
"""Stderr of sentinel and supervisor; it is locked while one of them lives."""

_FILE = "status.json"
_WATCHERS = "supervisor.json"
# Between the creation of the directory and the final supervisor.json are two forks. If it is still missing after this
# time, the run has no watcher.
_START_S = 15.0


def new_status() -> Record:
    """Status of a run that is starting."""
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
    """The status; None if it cannot be read right now."""
    return run.read(_FILE)


def write_status(run: RunDir, status: Record) -> None:
    """Write the status; raises OSError."""
    run.write(_FILE, status)


def note_exit(status: Record, wait_status: int) -> None:
    """Set exit code or signal of the status from a wait status (waitpid(2))."""
    if os.WIFSIGNALED(wait_status):
        status["signal"] = signal_name(os.WTERMSIG(wait_status))
    else:
        status["exit_code"] = os.WEXITSTATUS(wait_status)


def describe_exit(status: Record) -> str:
    """How the job ended, as the end of a sentence."""
    return f"was killed by {status['signal']}" if status["signal"] else f"exited with code {status['exit_code']}"


def signal_name(number: int) -> str:
    """`SIGKILL` for 9, `signal 40` for a realtime signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def has_ended(status: Optional[Record]) -> bool:
    """Whether the run is over."""
    return status is not None and status.get("state") == "ended"


def is_watched(run: RunDir) -> bool:
    """Whether the run's supervisor or its sentinel lives.

    True if that is unknown: the run is of another machine, or the file system does not answer.
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
        # CLOCK_BOOTTIME is not adjusted, and `shows_processes_of` has checked that the boot is the same.
        created_s = watcher.get("created_boot_s")
        return isinstance(created_s, float) and time.clock_gettime(time.CLOCK_BOOTTIME) - created_s < _START_S
    return any(_lives(watcher.get(f"{which}pid"), watcher.get(f"{which}start_ticks")) for which in ("", "sentinel_"))


def other_machine(run: RunDir) -> Optional[str]:
    """Host name of the other machine that the run is of; None for a run of this machine."""
    watcher = run.read(_WATCHERS)
    if watcher is None or shows_processes_of(watcher) or not _is_elsewhere(run, watcher):
        return None
    return str(watcher.get("hostname", "unknown"))


def is_lost(run: RunDir) -> bool:
    """Whether the run has not ended and nobody is left to end it.

    If somebody has removed supervisor.json, or the whole directory, the run is lost once none of its processes lives.
    """
    # The order matters: a supervisor writes the final status before it exits.
    if is_watched(run) or has_ended(read_status(run)):
        return False
    return os.path.exists(os.path.join(run.path, _WATCHERS)) or not Family(run.run_id).find()


def _read_watcher(run: RunDir) -> Optional[Record]:
    """Content of supervisor.json; None if there is none, or it holds something else; raises OSError."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):
        with open(os.path.join(run.path, _WATCHERS), "rb") as file:
            status = json.loads(file.read())
        return status if isinstance(status, dict) else None
    return None


def _is_elsewhere(run: RunDir, watcher: Record) -> bool:
    return not may_have_been(watcher) or is_locked(os.path.join(run.path, WATCHERS_STDERR))


def _lives(pid: object, start_ticks: object) -> bool:
    # The file may be of another release, or written by somebody else.
    return isinstance(pid, int) and isinstance(start_ticks, int) and is_running(pid, start_ticks)


_LEASE_FILE = "lease.json"


def grant_lease(run: RunDir, lease_s: Optional[float]) -> None:
    """Write the lease: `lease_s` seconds from now; None never expires."""
    deadline = None if lease_s is None else time.clock_gettime(time.CLOCK_BOOTTIME) + lease_s
    run.write(_LEASE_FILE, {"schema": 1, "lease_s": lease_s, "deadline_boot_s": deadline})


def renew_lease(run: RunDir, lease_s: Optional[float]) -> None:
    """Extend the lease. One that never expires stays, so that a visiting controller cannot end a detached run."""
    lease = run.read(_LEASE_FILE)
    if lease is None or lease.get("deadline_boot_s") is not None:
        grant_lease(run, lease_s)


def read_lease_s(run: RunDir) -> Optional[float]:
    """Length of the last lease in seconds; None if it never expires or is unknown."""
    lease_s: Optional[float] = (run.read(_LEASE_FILE) or {}).get("lease_s")
    return lease_s


class Lease:
    """The supervisor's view of the lease."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._deadline_boot_s: Optional[float] = None

    def expired(self) -> bool:
        """Whether the lease has expired; if it cannot be read right now, the last known deadline counts."""
        lease = self._run.read(_LEASE_FILE)
        if lease is not None:
            self._deadline_boot_s = lease.get("deadline_boot_s")
        return self._deadline_boot_s is not None and time.clock_gettime(time.CLOCK_BOOTTIME) > self._deadline_boot_s
