"""The verb `supervise`: checks the request, makes the run directory, starts the watchers, and then follows the run.

The sentinel, the supervisor's parent, does nothing but wait, and ends the run should the supervisor be killed. The
kernel gives the orphans of a dead process to the nearest ancestor that asked for them (prctl(2),
PR_SET_CHILD_SUBREAPER): first the supervisor, and after its death the sentinel.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time

from ..channel import AgentError, Channel, Record
from ..processes import Family, adopt_orphans, fork_child, reap_children
from ..rundir import RunDir
from .follow import Follower, say_hello
from .job import Job, prepare_job
from .job_log import INDEX, LogIndex
from .status import (
    WATCHERS_STDERR,
    grant_lease,
    has_ended,
    hold_lock,
    new_status,
    read_status,
    signal_name,
    this_machine,
    write_status,
)
from .stop import STEP_S, Recovery
from .supervisor import keep_step, start_supervisor

_START_S = 30.0
_HANDED_ON = frozenset({"argv", "env", "prelude", "files"})


def run(request: Record, channel: Channel) -> None:
    """Start the job under a supervisor; then follow it on the same channel, or leave it alone (`detach`).

    Raises:
        AgentError: the run exists, the job cannot be run here, or the run directory cannot be written.
    """
    run_dir = RunDir(request["run_id"])
    if run_dir.exists():
        raise _exists(run_dir)
    job = prepare_job(request, run_dir, channel.umask)
    _make_run_dir(run_dir, request)
    keep_step(run_dir)
    trouble = _start_watchers(run_dir, request, job)
    if not request.get("detach"):
        # A job that did not start is told as a status: who follows has to know of the run's end in one way only.
        Follower(run_dir, request, channel).follow()
        return
    if trouble:
        raise AgentError(trouble)
    say_hello(run_dir, channel)


def _exists(run_dir: RunDir) -> AgentError:
    return AgentError(
        f"run {run_dir.run_id} already exists on this node",
        hint=f"{run_dir.path} exists; nodes that share a home directory need distinct run ids",
    )


def _make_run_dir(run_dir: RunDir, request: Record) -> None:
    try:
        os.makedirs(os.path.dirname(run_dir.path), mode=0o700, exist_ok=True)
        os.mkdir(run_dir.path, 0o700)
    except FileExistsError as error:
        raise _exists(run_dir) from error
    except OSError as error:
        raise AgentError(f"the run directory cannot be created: {error}") from error
    try:
        _fill(run_dir, request)
    except (OSError, AgentError) as error:
        # Nothing runs yet, so nothing is lost with it.
        shutil.rmtree(run_dir.path, ignore_errors=True)
        if isinstance(error, AgentError):
            raise
        raise AgentError(f"the run directory cannot be written: {error}", hint="df -h ~; df -i ~") from error


def _fill(run_dir: RunDir, request: Record) -> None:
    for name in ("samples", "tmp"):
        os.mkdir(os.path.join(run_dir.path, name), 0o700)
    os.close(os.open(run_dir.log, os.O_WRONLY | os.O_CREAT, 0o600))
    # Values, arguments and texts may be secrets, and nobody reads them here: the job has them.
    kept = {name: value for name, value in request.items() if name not in _HANDED_ON}
    archive = os.path.basename(sys.argv[0])
    run_dir.write("request.json", {**kept, "env": dict.fromkeys(request["env"]), "archive": archive})
    # Whose run it is has to be known before anybody watches it.
    created_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    run_dir.write("supervisor.json", {"schema": 1, **this_machine(), "created_boot_s": created_boot_s})
    grant_lease(run_dir, request.get("lease_s"))
    write_status(run_dir, new_status())
    # On a disk that is full by then it could not be made any more.
    run_dir.write(INDEX, LogIndex().record())
    for file in request.get("files", []):
        if not file.get("in_memory"):
            run_dir.add_file(file["path"], file["text"])


def _start_watchers(run_dir: RunDir, request: Record, job: Job) -> str:
    """Start sentinel, supervisor and job; returns why the job did not start, empty if it did."""
    reader, writer = os.pipe()
    start_sentinel(run_dir, request, job, writer)
    os.close(writer)
    ready, _, _ = select.select([reader], [], [], _START_S)
    trouble = os.read(reader, select.PIPE_BUF) if ready else b"the supervisor did not answer in time"
    os.close(reader)
    return trouble.decode(errors="replace")


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
