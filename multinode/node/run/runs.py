"""The runs of this node: the verbs `runs`, `clean` and `fetch`; finds processes of runs by their environment."""

from __future__ import annotations

import binascii
import itertools
import os
import stat
import time
from collections.abc import Iterator
from typing import NamedTuple, Optional

from ..channel import AgentError, Channel, Record
from ..processes import Family, command_of, environ_of, find_process, list_pids
from ..rundir import RunDir, is_run_id
from .status import has_ended, is_watched, other_machine, read_lease_s, read_status

_MOST_RUNS = 1000
_MOST_FILES = 100_000
_MOST_PROCESSES = 256


class _RunMark(NamedTuple):
    """The run's id and directory in the environment of a process."""

    run_id: str
    run_dir: Optional[str]


def run(request: Record, channel: Channel) -> None:
    """The verb `runs`: emits one record `runs` with all runs, newest first, and the ids of runs with living processes.

    With `run_id`, only that run, and its plan.
    """
    wanted: Optional[str] = request.get("run_id")
    descriptions = [_describe(run) for run in list_runs() if wanted in (None, run.run_id)]
    plan = RunDir(wanted).read("plan.json") if wanted is not None else None
    living = sorted({process["run_id"] for process in find_run_processes()}) if wanted is None else []
    channel.emit({"kind": "runs", "runs": descriptions, "plan": plan, "living": living})


def clean(request: Record, channel: Channel) -> None:
    """The verb `clean`: emits one record `cleaned` with the runs and code that were removed, and those that were kept.

    A run that is not over is kept.
    """
    # Imported here: other users of this module need not wait for it.
    import shutil

    from .code import clean_code

    wanted: Optional[list[str]] = request.get("run_ids")
    before_s = time.time() - float(request.get("older_s", 0.0))
    removed: list[Record] = []
    kept: list[Record] = []
    for run in list_runs():
        if wanted is not None and run.run_id not in wanted:
            continue
        record = {**_describe(run), "size_bytes": _size_bytes(run.path)}
        if wanted is None and record["created_s"] > before_s:
            continue
        if _is_over(run):
            shutil.rmtree(run.path, ignore_errors=True)
        (kept if run.exists() else removed).append(record)
    code = clean_code(None if wanted is None else request.get("code", []), before_s)
    channel.emit({"kind": "cleaned", "removed": removed, "kept": kept, **code})


def find_run_processes() -> list[Record]:
    """One record per process of any run; this process and its ancestors do not count."""
    marked = ((pid, _read_mark(pid)) for pid in sorted(list_pids() - _lineage()))
    marks = dict(itertools.islice(((pid, mark) for pid, mark in marked if mark is not None), _MOST_PROCESSES))
    supervised = {mark: _is_supervised(mark) for mark in set(marks.values())}
    return [
        {"pid": pid, "run_id": mark.run_id, "command": command_of(pid), "supervised": supervised[mark]}
        for pid, mark in marks.items()
    ]


def list_runs() -> list[RunDir]:
    """The runs that have a directory on this node, newest first."""
    folder = os.path.dirname(RunDir("x").path)
    try:
        names = sorted(os.listdir(folder), reverse=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    # Other names there are not runs, such as a file server's own directories.
    ours = (name for name in names if is_run_id(name) and os.path.isdir(os.path.join(folder, name)))
    return [RunDir(name) for name in itertools.islice(ours, _MOST_RUNS)]


def _describe(run: RunDir) -> Record:
    status = read_status(run) or {}
    return {
        "run_id": run.run_id,
        "state": status.get("state"),
        "cause": status.get("cause"),
        "exit_code": status.get("exit_code"),
        "watched": is_watched(run),
        "machine": other_machine(run),
        "created_s": run.created_s(),
        "lease_s": read_lease_s(run),
    }


def _is_over(run: RunDir) -> bool:
    """Whether the run has ended, or has no watcher, and none of its processes lives here.

    A run of another machine counts as watched, so only its status tells.
    """
    if is_watched(run) and not has_ended(read_status(run)):
        return False
    return not Family(run.run_id).find()


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


def _lineage() -> set[int]:
    """Pids of this process and its ancestors in this pid namespace."""
    pids: set[int] = set()
    pid = os.getpid()
    while pid and pid not in pids:
        pids.add(pid)
        process = find_process(pid)
        pid = process.ppid if process is not None else 0
    return pids


def _read_mark(pid: int) -> Optional[_RunMark]:
    env = dict(entry.split(b"=", 1) for entry in environ_of(pid).split(b"\0") if b"=" in entry)
    run_id, run_dir = env.get(b"MULTINODE_RUN_ID"), env.get(b"MULTINODE_RUN_DIR")
    if run_id is None:
        return None
    return _RunMark(run_id.decode(errors="replace"), None if run_dir is None else os.fsdecode(run_dir))


def _is_supervised(mark: _RunMark) -> bool:
    if not is_run_id(mark.run_id):
        return False
    run = RunDir(mark.run_id)
    # The run may be in another home directory, for example if several nodes are one machine.
    run.path = mark.run_dir or run.path
    return is_watched(run)


_CHUNK_BYTES = 1 << 18


def fetch(request: Record, channel: Channel) -> None:
    """The verb `fetch`: emits `files` with names and sizes, `data` with a file's number and base64, then `fetched`.

    Raises:
        AgentError: a path does not exist, raised after the others were sent; or there are too many files.
    """
    cwd = os.path.expanduser(request.get("cwd") or "~")
    starts = {path: os.path.normpath(os.path.join(cwd, os.path.expanduser(path))) for path in request["paths"]}
    missing = [path for path, start in starts.items() if not os.path.isfile(start) and not os.path.isdir(start)]
    files = [file for path, start in starts.items() if path not in missing for file in _find(start)]
    if len(files) > _MOST_FILES:
        raise AgentError(f"more than {_MOST_FILES} files were requested", hint="name the directory that matters")
    listed: list[Record] = [{"name": name, "size_bytes": os.stat(path).st_size} for name, path in files]
    channel.emit({"kind": "files", "files": listed})
    for number, (_, path) in enumerate(files):
        # If a file grows meanwhile, only the bytes that were listed are sent.
        for data in _read(path, listed[number]["size_bytes"]):
            text = binascii.b2a_base64(data, newline=False).decode()
            channel.emit({"kind": "data", "file": number, "data": text})
    if missing:
        others = "; everything else was fetched" if len(missing) < len(starts) else ""
        raise AgentError(
            f"{', '.join(missing)} {'does' if len(missing) == 1 else 'do'} not exist{others}",
            hint=f"looked for {', '.join(starts[path] for path in missing)}",
        )
    channel.emit({"kind": "fetched"})


def _find(start: str) -> list[tuple[str, str]]:
    """Name and absolute path of each regular file; names begin with the last part of the requested path."""
    base = os.path.dirname(start)
    if os.path.isfile(start):
        return [(os.path.relpath(start, base), start)]
    files = []
    for folder, _, names in os.walk(start):
        for name in sorted(names):
            path = os.path.join(folder, name)
            if stat.S_ISREG(os.lstat(path).st_mode):
                files.append((os.path.relpath(path, base), path))
    return files


def _read(path: str, size_bytes: int) -> Iterator[bytes]:
    with open(path, "rb", buffering=0) as file:
        while data := file.read(min(_CHUNK_BYTES, size_bytes)):
            size_bytes -= len(data)
            yield data
