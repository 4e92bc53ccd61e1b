"""status.json, the state of a run; the machine it is of; its lease: how long it survives without its controller."""

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
    """The fields by which supervisor.json names this machine."""
    return {
        "hostname": os.uname().nodename,
        "machine_id": try_read("/etc/machine-id") or None,
        "boot_id": boot_id(),
        "pid_namespace": _pid_namespace(),
    }


def shows_processes_of(watcher: Record) -> bool:
    """Whether our /proc is the one in which the pids of a supervisor.json are to be looked for."""
    here = this_machine()
    return all(watcher.get(name, here[name]) == here[name] for name in ("boot_id", "pid_namespace"))


def may_have_been(watcher: Record) -> bool:
    """Whether it is of this machine before it was booted, or of this container before it was started anew."""
    here = this_machine()
    if any(watcher.get(name) != here[name] for name in ("hostname", "machine_id")):
        return False
    # Containers on machines of their own may have one name, and no id at all.
    return here["machine_id"] is not None or watcher.get("boot_id") == here["boot_id"]


def hold_lock(fd: int) -> None:
    """Lock a file until the last process that has this descriptor from us is gone; nothing where there are no locks."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _WHOLE)


def is_locked(path: str) -> bool:
    """Whether somebody holds it; False where that cannot be seen."""
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
            status = json.loads(file.read())
        return status if isinstance(status, dict) else None
    return None


def _is_elsewhere(run: RunDir, watcher: Record) -> bool:
    return not may_have_been(watcher) or is_locked(os.path.join(run.path, WATCHERS_STDERR))


def _lives(pid: object, start_ticks: object) -> bool:
    # A file of another release, or one that somebody wrote, may say anything.
    return isinstance(pid, int) and isinstance(start_ticks, int) and is_running(pid, start_ticks)


_LEASE_FILE = "lease.json"


def grant_lease(run: RunDir, lease_s: Optional[float]) -> None:
    """Write the lease: `lease_s` seconds from now, or without end."""
    deadline = None if lease_s is None else time.clock_gettime(time.CLOCK_BOOTTIME) + lease_s
    run.write(_LEASE_FILE, {"schema": 1, "lease_s": lease_s, "deadline_boot_s": deadline})


def renew_lease(run: RunDir, lease_s: Optional[float]) -> None:
    """Grant the lease anew, unless it has no end: word from a controller never makes a detached run stop."""
    lease = run.read(_LEASE_FILE)
    if lease is None or lease.get("deadline_boot_s") is not None:
        grant_lease(run, lease_s)


def read_lease_s(run: RunDir) -> Optional[float]:
    """The length of the lease that was granted last; None is without end."""
    lease_s: Optional[float] = (run.read(_LEASE_FILE) or {}).get("lease_s")
    return lease_s


class Lease:
    """The supervisor's view of the lease."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._deadline_boot_s: Optional[float] = None

    def expired(self) -> bool:
        """Whether it has run out; a lease that cannot be read right now stays as it was."""
        lease = self._run.read(_LEASE_FILE)
        if lease is not None:
            self._deadline_boot_s = lease.get("deadline_boot_s")
        return self._deadline_boot_s is not None and time.clock_gettime(time.CLOCK_BOOTTIME) > self._deadline_boot_s
