"""The verbs `runs` and `clean`: what runs this node has, and removing the directories of those that have ended."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from typing import Optional

from ..channel import Channel, Record
from ..rundir import RunDir, is_run_id
from .processes import Family
from .status import has_ended, is_watched, read_status

__all__ = ["clean", "run"]

_MOST_RUNS = 1000
_MOST_FILES = 100_000


def run(request: Record, channel: Channel) -> None:
    """One record `runs`: every run, newest first; with `run_id` that one alone, and its plan."""
    wanted: Optional[str] = request.get("run_id")
    found = [_describe(one) for one in _list_runs() if wanted in (None, one.run_id)]
    plan = RunDir(wanted).read("plan.json") if wanted is not None else None
    channel.emit({"kind": "runs", "runs": found, "plan": plan})


def clean(request: Record, channel: Channel) -> None:
    """One record `cleaned`: which runs were removed, and which are not over and so were not."""
    wanted: Optional[list[str]] = request.get("run_ids")
    before_s = time.time() - float(request.get("older_s", 0.0))
    removed: list[Record] = []
    kept: list[Record] = []
    for one in _list_runs():
        if wanted is not None and one.run_id not in wanted:
            continue
        record = _describe(one)
        if wanted is None and record["created_s"] > before_s:
            continue
        if _is_over(one):
            shutil.rmtree(one.path, ignore_errors=True)
        (kept if one.exists() else removed).append(record)
    channel.emit({"kind": "cleaned", "removed": removed, "kept": kept})


def _list_runs() -> list[RunDir]:
    folder = os.path.dirname(RunDir("x").path)
    try:
        names = sorted(os.listdir(folder), reverse=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    # What else lies there, such as a file server's own directories, is none of ours.
    ours = (name for name in names if is_run_id(name) and os.path.isdir(os.path.join(folder, name)))
    return [RunDir(name) for name in itertools.islice(ours, _MOST_RUNS)]


def _describe(one: RunDir) -> Record:
    status = read_status(one) or {}
    return {
        "run_id": one.run_id,
        "state": status.get("state"),
        "cause": status.get("cause"),
        "exit_code": status.get("exit_code"),
        "watched": is_watched(one),
        "created_s": _created_s(one),
        "size_bytes": _size_bytes(one.path),
    }


def _is_over(one: RunDir) -> bool:
    """Whether it has ended, or nobody watches it and nothing of it lives: the directory is then all there is."""
    if is_watched(one) and not has_ended(read_status(one)):
        return False
    return not Family(one.run_id, root=None, spare=()).find()


def _created_s(one: RunDir) -> float:
    try:
        return os.stat(os.path.join(one.path, "request.json")).st_mtime
    except OSError:
        return 0.0


def _size_bytes(path: str) -> int:
    total = count = 0
    for folder, _, names in os.walk(path):
        for name in names:
            count += 1
            if count > _MOST_FILES:
                return total
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    return total
