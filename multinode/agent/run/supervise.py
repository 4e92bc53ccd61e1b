"""The verb `supervise`: checks the request, makes the run directory, starts the watchers, and then follows the run."""

from __future__ import annotations

import os
import select
import shutil
import sys
import time

from ..channel import AgentError, Channel, Record
from ..rundir import RunDir
from .follow import Follower, say_hello
from .job import Job, prepare_job
from .kept_log import INDEX, LogIndex
from .lease import grant_lease
from .machine import this_machine
from .sentinel import start_sentinel
from .status import new_status, write_status
from .step import keep_step

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
