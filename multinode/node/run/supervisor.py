"""The supervisor: starts the job, watches the job, its lease and its orders, and ends all of the job's processes.

A single loop without threads. It needs no controller, no SSH connection and no terminal.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import shutil
import signal
import sys
import time
from types import FrameType
from typing import Optional

from ..channel import AgentError, Channel, Record
from ..facts.cgroups import MemoryKills
from ..flight import read_watchdog_dumps
from ..hang.diagnose import list_flight_records
from ..last_calls import read_last_calls
from ..nccl_files import read_nccl_warnings
from ..processes import Family, adopt_orphans, find_process, fork_child, reap_children
from ..rundir import RunDir
from ..sample.sampler import NodeSampler, start_gpu_sampler
from .follow import Follower, say_hello
from .job import Job, data_nics, hold_files, hold_last_calls, prelude_trouble, prepare_job, start_job
from .job_log import INDEX, LogIndex, LogLimit
from .status import (
    WATCHERS_STDERR,
    Lease,
    describe_exit,
    grant_lease,
    has_ended,
    hold_lock,
    is_lost,
    new_status,
    note_exit,
    read_status,
    signal_name,
    this_machine,
    write_status,
)
from .stop import STEP_S, Ending, Recovery, StopOrders, order_stop, recover

# The rest of Slurm's time is for KILL, and for checking that no process is left.
_GRACE_SHARE = 0.5
_LOOK_S = 0.2
_STOPPED_BY_TERM = 128 + signal.SIGTERM

# State of this process, which its supervisors inherit: its runs, and the longest grace period after a SIGTERM.
_runs: list[RunDir] = []
_most_grace_s = math.inf


def term_grace_s(grace_s: float) -> float:
    """Grace period of a stop by SIGTERM: as requested, but in a Slurm step no longer than Slurm allows."""
    return min(grace_s, _most_grace_s)


def take_signals(kill_wait: str) -> None:
    """Handle SIGTERM by stopping our runs, and ignore signals of a terminal.

    `kill_wait` is the number of seconds from Slurm's SIGTERM to its SIGKILL.
    """
    global _most_grace_s  # noqa: PLW0603 - it is the process that is in a step
    with contextlib.suppress(ValueError):
        _most_grace_s = float(kill_wait) * _GRACE_SHARE
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop_runs)


def keep_step(run: RunDir) -> None:
    """Add a run for whose end `stay_in_step` waits."""
    _runs.append(run)


def stay_in_step() -> None:
    """Wait until our runs have ended: Slurm ends the step, and all of its processes, when we exit."""
    for run in _runs:
        while not has_ended(read_status(run)):
            if is_lost(run):
                recover(run, "supervisor and sentinel are both dead")
                break
            time.sleep(_LOOK_S)


def _stop_runs(_number: int, _frame: Optional[FrameType]) -> None:
    if not _runs:
        os._exit(_STOPPED_BY_TERM)
    for run in _runs:
        if not has_ended(read_status(run)):
            request = run.read("request.json") or {}
            order_stop(run, term_grace_s(float(request.get("grace_s", 0.0))))


_POLL_S = 0.2
_LEFTOVER_GRACE_S = 2.0
# The loop waits for these signals: a handler could run at any point of it.
_AWAITED = {signal.SIGCHLD, signal.SIGTERM}
_LAST_WORD_S = 600.0
_RETRY_S = 1.0


def start_supervisor(run: RunDir, request: Record, job: Job, started: int) -> int:
    """Fork the supervisor and return its pid; `started` is the pipe of `start_sentinel`."""
    sentinel_pid = os.getpid()

    def supervise() -> None:
        os.setsid()
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        # If SIGCHLD were ignored, as inherited, the kernel would reap the job before we learn how it ended.
        for number in _AWAITED:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, _AWAITED)
        supervisor = Supervisor(run, request, sentinel_pid)
        try:
            supervisor.start(job)
        except AgentError as error:
            os.write(started, error.message.encode()[: select.PIPE_BUF])
            os.close(started)
            supervisor.finish(cause="not_started", message=error.message)
        else:
            os.close(started)
            supervisor.watch()

    return fork_child(supervise)


class Supervisor:
    """Watches one run. Call `start`, then `watch`, which returns when the run is over.

    Args:
        sentinel_pid: our parent, which ends the run if we are killed.
    """

    def __init__(self, run: RunDir, request: Record, sentinel_pid: int) -> None:
        self._run = run
        self._request = request
        self._grace_s = float(request["grace_s"])
        self._gpus: Optional[list[int]] = request["gpus"]
        self._interval_s = float(request["observation"]["sample_interval_s"])
        self._lease = Lease(run)
        self._orders = StopOrders(run)
        self._sentinel_pid = sentinel_pid
        self._family = Family(run.run_id, root=os.getpid(), spare={sentinel_pid})
        self._sampler = NodeSampler(run, data_nics(request), self._interval_s, self._family.spared)
        self._sampler.serves = request.get("serves")
        self._gpu_sampler_pid: Optional[int] = None
        self._status = new_status()
        self._unsaved = False
        self._ending: Optional[Ending] = None
        self._has_job = False
        self._memory_kills = MemoryKills()
        self._environ: dict[str, str] = {}
        self._last_calls: Optional[int] = None  # descriptor
        self._log = LogLimit(run, request.get("log_limit_bytes"))

    def start(self, job: Job) -> None:
        """Write supervisor.json and start the job.

        Raises:
            AgentError: the job could not be started.
        """
        subreaper = adopt_orphans()
        try:
            self._sign_in(subreaper=subreaper)
            hold_files(self._run, self._request.get("files", []))
            self._last_calls = hold_last_calls(self._run, self._request)
        except OSError as error:
            # Without supervisor.json nobody could find this run again, so the job must not start.
            raise AgentError(f"the run directory cannot be written: {error}") from error
        self._environ = job.env
        self._sampler.tick()
        self._memory_kills.look()
        pid = start_job(job)
        self._has_job = True
        self._sampler.job_pid = pid
        self._change(state="running", job_pid=pid)

    def watch(self) -> None:
        """Watch until the job has ended and none of its processes is left."""
        self._watch_gpus()
        while True:
            pause_s = STEP_S if self._ending else _POLL_S
            signals = signal.sigtimedwait(_AWAITED, min(pause_s, self._sampler.due_in_s()))
            self._reap()
            self._sampler.tick()
            if self._has_job:
                self._memory_kills.watch(self._status["job_pid"])
            if self._log.look():
                self._change(log_gone_bytes=self._log.gone_bytes)
            self._look_for_orders(told_to_stop=signals is not None and signals.si_signo == signal.SIGTERM)
            self._save()
            if self._ending is not None and self._ending.step():
                break
        self._sampler.sample_last()
        self._note_failure()
        self.finish(processes_left=self._ending.left)

    def finish(self, **changes: object) -> None:
        """Write the final status; while the disk is full, keep trying for ten minutes."""
        if self._gpu_sampler_pid is not None:
            os.kill(self._gpu_sampler_pid, signal.SIGKILL)
        self._change(state="ended", ended_s=time.time(), **changes)
        deadline = time.monotonic() + _LAST_WORD_S
        while self._unsaved and self._run.exists() and time.monotonic() < deadline:
            time.sleep(_RETRY_S)
            self._save()

    def _sign_in(self, *, subreaper: bool) -> None:
        self._run.write(
            "supervisor.json",
            {
                "schema": 1,
                "run_id": self._run.run_id,
                "pid": os.getpid(),
                "start_ticks": _start_ticks(os.getpid()),
                "pgid": os.getpgrp(),
                **this_machine(),
                "sentinel_pid": self._sentinel_pid,
                "sentinel_start_ticks": _start_ticks(self._sentinel_pid),
                "subreaper": subreaper,
                "created_s": time.time(),
            },
        )

    def _watch_gpus(self) -> None:
        if self._gpus is not None:
            self._gpu_sampler_pid = start_gpu_sampler(self._run, self._gpus, self._interval_s)
            self._family.spared.add(self._gpu_sampler_pid)

    def _reap(self) -> None:
        for pid, wait_status in reap_children():
            if pid == self._gpu_sampler_pid:
                self._gpu_sampler_pid = None
                self._family.spared.discard(pid)
            elif pid == self._status["job_pid"] and self._has_job:
                # The kernel may reuse its pid for another orphan that we adopt.
                self._has_job = False
                note_exit(self._status, wait_status)
                self._note_surroundings()
                self._end_by_itself()

    def _end_by_itself(self) -> None:
        trouble = prelude_trouble(self._request, self._run, describe_exit(self._status))
        cause = "exited" if trouble is None else "not_started"
        self._end(cause, trouble, min(self._grace_s, _LEFTOVER_GRACE_S))

    def _note_surroundings(self) -> None:
        """Record free disk space and OOM kills: on a full disk, or if it was killed, the job cannot report them."""
        with contextlib.suppress(OSError):
            stat = os.statvfs(self._run.path)
            self._status["disk_free_bytes"] = stat.f_bavail * stat.f_frsize
        self._memory_kills.look()
        self._status["oom_kills"] = self._memory_kills.count

    def _note_failure(self) -> None:
        """Add what only the node can read to the samples of a failed job: NCCL's warnings, and collectives."""
        if self._status.get("exit_code") == 0:
            return
        now = time.time()
        warnings = [
            {"kind": "nccl_warning", "time_s": now, "message": line} for line in read_nccl_warnings(self._run.path)
        ]
        self._add_samples("nccl.jsonl", warnings)
        if self._last_calls is not None:
            self._add_samples("last-calls.jsonl", list(read_last_calls(self._last_calls)))
        since_s = self._run.created_s()
        dumps = list_flight_records(self._run.path, [self._environ], since_s=since_s)
        self._add_samples("watchdog.jsonl", list(read_watchdog_dumps(dump["path"] for dump in dumps)))

    def _add_samples(self, name: str, records: list[Record]) -> None:
        if records:
            with contextlib.suppress(OSError), open(os.path.join(self._run.samples, name), "w") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)

    def _look_for_orders(self, *, told_to_stop: bool) -> None:
        order = self._orders.latest()
        if order is not None:
            self._stop("stopped on request", *order)
        elif told_to_stop:
            self._stop("stopped by SIGTERM", term_grace_s(self._grace_s))
        elif self._ending is None and self._lease.expired():
            self._end("lease_expired", "the lease expired: nothing was heard from the controller", self._grace_s)

    def _stop(self, message: str, grace_s: float, order: Optional[str] = None) -> None:
        if self._ending is not None:
            self._ending.shorten(grace_s)
        self._end("stopped", message, grace_s, order)

    def _end(self, cause: str, message: Optional[str], grace_s: float, order: Optional[str] = None) -> None:
        """Begin to end the run, unless that has begun: the first cause counts."""
        if self._ending is None:
            self._ending = Ending(self._family.find, grace_s)
            self._change(state="stopping", cause=cause, message=message, stopped_by=order)

    def _change(self, **changes: object) -> None:
        self._status.update(changes)
        self._unsaved = True
        self._save()

    def _save(self) -> None:
        if self._unsaved:
            # On a full disk, every turn of the loop tries again; watching and stopping do not depend on it.
            with contextlib.suppress(OSError):
                write_status(self._run, self._status)
                self._unsaved = False


def _start_ticks(pid: int) -> Optional[int]:
    process = find_process(pid)
    return None if process is None else process.start_ticks


_START_S = 30.0
_HANDED_ON = frozenset({"command", "files"})


def run(request: Record, channel: Channel) -> None:
    """The verb `supervise`: starts the job under a supervisor, then follows it on this channel unless `detach` is set.

    Raises:
        AgentError: the run exists, the job cannot run here, or the run directory cannot be written.
    """
    run_dir = RunDir(request["run_id"])
    if run_dir.exists():
        raise _exists(run_dir)
    job = prepare_job(request, run_dir, channel.umask)
    _make_run_dir(run_dir, request)
    keep_step(run_dir)
    trouble = _start_watchers(run_dir, request, job)
    if not request.get("detach"):
        # A job that failed to start is reported as a status, so followers see every end in the same way.
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
        # Nothing runs yet, so the directory can go.
        shutil.rmtree(run_dir.path, ignore_errors=True)
        if isinstance(error, AgentError):
            raise
        raise AgentError(f"the run directory cannot be written: {error}", hint="df -h ~; df -i ~") from error


def _fill(run_dir: RunDir, request: Record) -> None:
    for name in ("samples", "tmp"):
        os.mkdir(os.path.join(run_dir.path, name), 0o700)
    os.close(os.open(run_dir.log, os.O_WRONLY | os.O_CREAT, 0o600))
    # Values, arguments and texts may be secrets. The job has them, and nobody reads them from here.
    kept = {name: value for name, value in request.items() if name not in _HANDED_ON}
    archive = os.path.basename(sys.argv[0])
    run_dir.write("request.json", {**kept, "env": dict.fromkeys(request["command"]["env"]), "archive": archive})
    # This first version names the run's machine before the supervisor exists.
    created_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    run_dir.write("supervisor.json", {"schema": 1, **this_machine(), "created_boot_s": created_boot_s})
    grant_lease(run_dir, request.get("lease_s"))
    write_status(run_dir, new_status())
    # It must exist before the disk is full: then it can only be overwritten.
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
    """Fork the sentinel, which forks the supervisor, which starts the job; returns the sentinel's pid.

    `started` is the write end of a pipe. It gets the reason if the job does not start, and is closed.
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
    """Detach from the SSH connection: terminal, descriptors, working directory, and signals that its end sends."""
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
        # The listing contains its own descriptor, which is closed by now.
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
