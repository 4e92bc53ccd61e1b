"""The sentinel: the supervisor's parent. Does nothing but wait, and ends the run should the supervisor be killed.

The kernel gives the orphans of a dead process to the nearest ancestor that asked for them (prctl(2),
PR_SET_CHILD_SUBREAPER): first the supervisor, and after its death the sentinel.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

from ..channel import Record
from ..rundir import RunDir
from .job import Job
from .machine import hold_lock
from .processes import Family, adopt_orphans, fork_child, reap_children
from .status import WATCHERS_STDERR, has_ended, read_status, signal_name
from .stop import STEP_S, Recovery
from .supervisor import start_supervisor


def start_sentinel(run: RunDir, request: Record, job: Job, started: int) -> int:
    """Fork the sentinel and through it the supervisor, which starts the job; returns the sentinel's pid.

    `started` is the write end of a pipe; it is closed once the job runs, or gets the reason why it does not.
    """

    def watch() -> None:
        _leave_connection(run, keep=started)
        adopt_orphans()
        supervisor_pid = start_supervisor(run, request, job, started)
        os.close(started)
        wait_status = _wait_for(supervisor_pid)
        if not has_ended(read_status(run)):
            _recover(run, wait_status)

    return fork_child(watch)


def _leave_connection(run: RunDir, keep: int) -> None:
    """Hold nothing of the SSH connection: no terminal, no descriptor, no directory, no signal that its end sends."""
    os.setsid()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    errors = os.open(os.path.join(run.path, WATCHERS_STDERR), os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    hold_lock(errors)
    for target, source in ((0, null), (1, null), (2, errors)):
        os.dup2(source, target)
    for name in os.listdir("/proc/self/fd"):
        # The descriptor that listed the directory is gone by now.
        with contextlib.suppress(OSError):
            if int(name) > 2 and int(name) != keep:  # noqa: PLR2004 - the three standard descriptors
                os.close(int(name))


def _wait_for(supervisor_pid: int) -> int:
    while True:
        pid, wait_status = os.wait()
        if pid == supervisor_pid:
            return wait_status


def _recover(run: RunDir, wait_status: int) -> None:
    job_pid: int = (read_status(run) or {}).get("job_pid") or 0
    family = Family(run.run_id, root=os.getpid())
    recovery = Recovery(run, family, f"the supervisor {_how_it_ended(wait_status)}")
    while not recovery.step(dict(reap_children()).get(job_pid)):
        time.sleep(STEP_S)


def _how_it_ended(wait_status: int) -> str:
    if os.WIFSIGNALED(wait_status):
        return f"was killed by {signal_name(os.WTERMSIG(wait_status))}"
    return (
        f"ended with code {os.WEXITSTATUS(wait_status)} before the job did; see {WATCHERS_STDERR} in the run directory"
    )
