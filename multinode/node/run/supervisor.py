"""The supervisor: starts the job, watches it, its lease and its orders, and ends all that belongs to it.

A single loop without threads. Needs no controller, no SSH connection and no terminal.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import time
from types import FrameType
from typing import Optional

from ..channel import AgentError, Record
from ..facts.memory import MemoryKills
from ..nccl_files import read_nccl_warnings
from ..processes import Family, adopt_orphans, find_process, fork_child, reap_children
from ..rundir import RunDir
from ..sample.gpu_sampler import start_gpu_sampler
from ..sample.sampler import NodeSampler
from .job import Job, hold_files, prelude_trouble, start_job
from .job_log import LogLimit
from .status import (
    Lease,
    describe_exit,
    has_ended,
    is_lost,
    new_status,
    note_exit,
    read_status,
    this_machine,
    write_status,
)
from .stop import STEP_S, Ending, StopOrders, order_stop, recover

# What is left is for KILL, and for seeing that nothing is left.
_GRACE_SHARE = 0.5
_LOOK_S = 0.2
_STOPPED_BY_TERM = 128 + signal.SIGTERM

# Of this process, and of the supervisors that it forks: its runs, and the most grace that a SIGTERM leaves them.
_runs: list[RunDir] = []
_most_grace_s = math.inf


def term_grace_s(grace_s: float) -> float:
    """The grace of a stop that a SIGTERM has begun: what was asked for, and in a step no more than fits."""
    return min(grace_s, _most_grace_s)


def take_signals(kill_wait: str) -> None:
    """From now on SIGTERM stops our runs in order, and what a terminal sends means nothing.

    `kill_wait` is the number of seconds after which Slurm's SIGKILL follows it.
    """
    global _most_grace_s  # noqa: PLW0603 - it is the process that is in a step
    with contextlib.suppress(ValueError):
        _most_grace_s = float(kill_wait) * _GRACE_SHARE
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop_runs)


def keep_step(run: RunDir) -> None:
    """Our step is that of this run, too: `stay_in_step` waits for its end."""
    _runs.append(run)


def stay_in_step() -> None:
    """Wait until our runs have ended; each has a lease, or a channel that keeps it."""
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
# Waited for instead of handled: a handler would run at any point of the loop.
_AWAITED = {signal.SIGCHLD, signal.SIGTERM}
_LAST_WORD_S = 600.0
_RETRY_S = 1.0


def start_supervisor(run: RunDir, request: Record, job: Job, started: int) -> int:
    """Fork the supervisor and return its pid; `started` is as start_sentinel has it."""
    sentinel_pid = os.getpid()

    def supervise() -> None:
        os.setsid()
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        # A disposition of "ignore", inherited, would have the kernel reap the job before we can ask how it ended.
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
    """Watches one run. `start`, then `watch` until all is over.

    Args:
        sentinel_pid: our parent, which ends the run should we be killed.
    """

    def __init__(self, run: RunDir, request: Record, sentinel_pid: int) -> None:
        self._run = run
        self._request = request
        self._grace_s = float(request["grace_s"])
        self._gpus: Optional[list[int]] = request.get("sample_gpus")
        self._interval_s = float(request.get("sample_interval_s", 1.0))
        self._lease = Lease(run)
        self._orders = StopOrders(run)
        self._sentinel_pid = sentinel_pid
        self._family = Family(run.run_id, root=os.getpid(), spare={sentinel_pid})
        ifnames = request.get("sample_ifnames", [])
        self._sampler = NodeSampler(run, ifnames, self._interval_s, self._family.spared)
        self._gpu_sampler_pid: Optional[int] = None
        self._status = new_status()
        self._unsaved = False
        self._ending: Optional[Ending] = None
        self._has_job = False
        self._memory_kills = MemoryKills()
        self._log = LogLimit(run, request.get("log_limit_bytes"))

    def start(self, job: Job) -> None:
        """Sign in and start the job.

        Raises:
            AgentError: it could not be started.
        """
        subreaper = adopt_orphans()
        try:
            self._sign_in(subreaper=subreaper)
            hold_files(self._run, self._request.get("files", []))
        except OSError as error:
            # Without it nobody could find us again, so nothing may run.
            raise AgentError(f"the run directory cannot be written: {error}") from error
        self._sampler.tick()
        self._memory_kills.look()
        pid = start_job(job)
        self._has_job = True
        self._sampler.job_pid = pid
        self._change(state="running", job_pid=pid)

    def watch(self) -> None:
        """Until the job has ended and nothing of it is left."""
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
        self._note_nccl_warnings()
        self.finish(processes_left=self._ending.left)

    def finish(self, **changes: object) -> None:
        """Say the last word; while the disk is full, keep trying for ten minutes."""
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
                # Its pid may soon belong to another orphan of ours.
                self._has_job = False
                note_exit(self._status, wait_status)
                self._note_surroundings()
                self._end_by_itself()

    def _end_by_itself(self) -> None:
        trouble = prelude_trouble(self._request, self._run, describe_exit(self._status))
        cause = "exited" if trouble is None else "not_started"
        self._end(cause, trouble, min(self._grace_s, _LEFTOVER_GRACE_S))

    def _note_surroundings(self) -> None:
        """What the job itself could not tell: on a full disk, and where it was killed, its last words are lost."""
        with contextlib.suppress(OSError):
            stat = os.statvfs(self._run.path)
            self._status["disk_free_bytes"] = stat.f_bavail * stat.f_frsize
        self._memory_kills.look()
        self._status["oom_kills"] = self._memory_kills.count

    def _note_nccl_warnings(self) -> None:
        """Of a job that did not end well: nobody fetches NCCL's own logs."""
        if self._status.get("exit_code") == 0:
            return
        now = time.time()
        records = [
            {"kind": "nccl_warning", "time_s": now, "message": line} for line in read_nccl_warnings(self._run.path)
        ]
        if records:
            with contextlib.suppress(OSError), open(os.path.join(self._run.samples, "nccl.jsonl"), "w") as file:
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
        """Begin the end, unless it has begun: the first cause is the one that counts."""
        if self._ending is None:
            self._ending = Ending(self._family.find, grace_s)
            self._change(state="stopping", cause=cause, message=message, stopped_by=order)

    def _change(self, **changes: object) -> None:
        self._status.update(changes)
        self._unsaved = True
        self._save()

    def _save(self) -> None:
        if self._unsaved:
            # A full disk is tried again at every turn; watching and stopping do not depend on it.
            with contextlib.suppress(OSError):
                write_status(self._run, self._status)
                self._unsaved = False


def _start_ticks(pid: int) -> Optional[int]:
    process = find_process(pid)
    return None if process is None else process.start_ticks
