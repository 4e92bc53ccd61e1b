"""Processes of our runs on this node, found in one pass over /proc by the run's id in their environment.

Only those of our own user show their environment. Who they are is found here; ending them is not done here.
"""

from __future__ import annotations

import os
from typing import NamedTuple, Optional

from ..channel import AgentError, Record
from ..rundir import RunDir
from .processes import find_process
from .status import is_watched

__all__ = ["find_run_processes"]

_RUN_ID = b"MULTINODE_RUN_ID"
_RUN_DIR = b"MULTINODE_RUN_DIR"
_MAX_PROCESSES = 256


class _Mark(NamedTuple):
    """What a job's environment says of its run: its id, and where its directory is."""

    run_id: str
    run_dir: Optional[str]


def find_run_processes() -> list[Record]:
    """One record for each process; our own, and those that it descends from, do not count.

    Raises:
        OSError: /proc cannot be listed.
    """
    marks: dict[int, _Mark] = {}
    pids = {int(name) for name in os.listdir("/proc") if name.isdigit()} - _lineage()
    for pid in sorted(pids):
        mark = _read_mark(pid)
        if mark is not None and len(marks) < _MAX_PROCESSES:
            marks[pid] = mark
    supervised = {mark: _is_supervised(mark) for mark in set(marks.values())}
    return [
        {"pid": pid, "run_id": mark.run_id, "command": _command(pid), "supervised": supervised[mark]}
        for pid, mark in marks.items()
    ]


def _lineage() -> set[int]:
    """Ourselves and our ancestors, as far as this process namespace shows them."""
    found: set[int] = set()
    pid = os.getpid()
    while pid and pid not in found:
        found.add(pid)
        process = find_process(pid)
        pid = process.ppid if process is not None else 0
    return found


def _read_mark(pid: int) -> Optional[_Mark]:
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.getuid():
            return None
        with open(f"/proc/{pid}/environ", "rb") as file:
            data = file.read()
    except OSError:
        return None
    if _RUN_ID not in data:
        return None
    env = dict(entry.split(b"=", 1) for entry in data.split(b"\0") if b"=" in entry)
    if _RUN_ID not in env:
        return None
    run_dir = env.get(_RUN_DIR)
    return _Mark(env[_RUN_ID].decode(errors="replace"), None if run_dir is None else os.fsdecode(run_dir))


def _is_supervised(mark: _Mark) -> bool:
    try:
        run = RunDir(mark.run_id)
    except AgentError:
        return False
    # The run may belong to another home directory than ours, as where several nodes are one machine.
    run.path = mark.run_dir or run.path
    return is_watched(run)


def _command(pid: int) -> Optional[str]:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None
