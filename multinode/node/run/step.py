"""A run in a Slurm step: Slurm kills what a step leaves behind when its first process ends, which is the verb's.

So that one stays until its run has ended, whoever listens, and makes of Slurm's SIGTERM (scancel, time limit,
preemption) an orderly stop that is over before its SIGKILL.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from types import FrameType
from typing import Optional

from ..rundir import RunDir
from .status import has_ended, is_lost, read_status
from .stop import order_stop, recover

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
