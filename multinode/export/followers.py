"""Followers: exports of a running run, each in a process of its own, so that none can disturb the run.

Each reads the run's directory and ends when nobody writes there any more. A failure is reported once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from multinode.errors import printable
from multinode.export.target import Target
from multinode.records.files import open_private

_LOOK_S = 0.05
_NICENESS = 10
_LONGEST_LINE = 500


class _Follower(NamedTuple):
    target: Target
    log: Path
    process: subprocess.Popen[bytes]


class Followers:
    """The exports of one launch, including every attempt of a run with restarts.

    Args:
        targets: destinations.
        runs: the directory of runs.
        say: is called with failures.
        end_s: how long an export may take after the end of its run before it is killed.
    """

    def __init__(
        self, targets: Sequence[Target], runs: Path, say: Callable[[str], None], *, end_s: float = 60.0
    ) -> None:
        self._targets = targets
        self._end_s = end_s
        self._runs = runs
        self._say = say
        self._begun: set[str] = set()
        self._followers: list[_Follower] = []

    def follow(self, run_id: str) -> None:
        """Start to export a run, unless started, and report failures since the last call."""
        if run_id not in self._begun:
            self._begun.add(run_id)
            for number, target in enumerate(self._targets, start=1):
                self._start(run_id, target, self._runs / run_id / f"export-{number}-{target.kind}.log")
        self._tell_ended()

    def close(self) -> None:
        """Wait until everything is written, within limits."""
        deadline = time.monotonic() + self._end_s
        while self._followers and time.monotonic() < deadline:
            self._tell_ended()
            time.sleep(_LOOK_S)
        for follower in self._followers:
            # Its own session: child processes end with it.
            with contextlib.suppress(OSError):
                os.killpg(follower.process.pid, signal.SIGKILL)
            follower.process.wait(1.0)
            self._say(
                f"warning: the export to {follower.target} was killed {self._end_s:.0f} s after the end of the run"
            )
        self._followers.clear()

    def _start(self, run_id: str, target: Target, log: Path) -> None:
        # With -P, nothing in the working directory shadows a library.
        command = [sys.executable, "-P", "-m", "multinode", "export", run_id, str(target), "--follow"]
        try:
            with open(log, "ab", opener=open_private) as output:
                process = subprocess.Popen(
                    command,
                    env={**os.environ, "MULTINODE_RUNS": str(self._runs.absolute())},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except (OSError, ValueError) as error:
            self._say(f"warning: the export to {target} did not start: {error}")
            return
        # Other processes on this machine have priority: the launch, and in the lab the training.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, _NICENESS)
        self._followers.append(_Follower(target, log, process))

    def _tell_ended(self) -> None:
        for follower in [follower for follower in self._followers if follower.process.poll() is not None]:
            self._followers.remove(follower)
            if follower.process.returncode:
                self._say(
                    f"warning: the export to {follower.target} failed: {_last_line(follower.log)} ({follower.log})"
                )


def _last_line(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        return printable((errors or lines or ["no output"])[-1])[:_LONGEST_LINE]
    return "its log is missing"
