"""Python stacks of processes: by the signal that an instrumented worker registered, else by py-spy where it is there.

A process that did not register is never signalled: what it does on a signal is its own affair.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple, Optional

from ..channel import Record
from ..kernel_files import list_names, try_read
from ..processes import Process, find_process
from ..programs import Query, QueryFailed, find_program
from ..rundir import RunDir

_FOLDER = "stacks"
_MOST_BYTES = 1 << 16
# The file is only ever appended to; beyond this it is begun anew.
_FILE_BYTES = 1 << 22
_QUIET_S = 0.15
_POLL_S = 0.02
_PY_SPY_S = 4.0
_HELD = {"T": "it is stopped", "t": "a debugger holds it", "Z": "it has ended", "X": "it has ended"}


class Mark(NamedTuple):
    """What an instrumented worker left when it registered."""

    rank: int
    pid: int
    start_ticks: int
    number: int  # the signal on which it shows its stacks


class StackReader:
    """Asks several processes at once, and reads the answers afterwards.

    Args:
        marks: those of the instrumented workers, by pid.
        path: where py-spy is looked for.
    """

    def __init__(self, run_dir: RunDir, marks: dict[int, Mark], path: str) -> None:
        self._folder = os.path.join(run_dir.path, _FOLDER)
        self._marks = marks
        self._path = path
        self._asked: dict[int, tuple[str, int]] = {}
        self._queries: dict[int, Query] = {}
        self._missing: dict[int, str] = {}

    def ask(self, process: Process, state: str) -> None:
        """Have the process show its stacks; one that cannot act is left in peace."""
        if state in _HELD:
            self._missing[process.pid] = f"{_HELD[state]}, so it returns none"
            return
        mark = self._marks.get(process.pid)
        if mark is not None and mark.start_ticks == process.start_ticks and _catches(process.pid, mark.number):
            self._signal(process, mark)
        else:
            self._start_py_spy(process.pid)

    def answers(self, deadline_s: float) -> dict[int, Record]:
        """`stack`, `stack_source` and `stack_missing` by pid, for all that were asked."""
        found = {pid: _stack(None, None, reason) for pid, reason in self._missing.items()}
        end = time.monotonic() + deadline_s
        for pid, (path, start) in self._asked.items():
            text = _read_grown(path, start, end)
            reason = None if text else "it did not answer: a C call blocks the signal, or the disk is full"
            found[pid] = _stack(text or None, "faulthandler", reason)
        for pid, query in self._queries.items():
            found[pid] = _py_spy_stack(query)
        return found

    def _signal(self, process: Process, mark: Mark) -> None:
        path = os.path.join(self._folder, f"rank-{mark.rank}.txt")
        try:
            size = os.stat(path).st_size
            if size > _FILE_BYTES:
                os.truncate(path, 0)
                size = 0
        except OSError as error:
            self._missing[process.pid] = f"their file is missing: {error.strerror}"
            return
        self._asked[process.pid] = (path, size)
        process.send(mark.number)

    def _start_py_spy(self, pid: int) -> None:
        program = find_program("py-spy", self._path)
        if program is None:
            self._missing[pid] = "it is not instrumented, and py-spy is not on PATH"
        else:
            self._queries[pid] = Query([program, "dump", "--pid", str(pid)], deadline_s=_PY_SPY_S)


def read_marks(run_dir: RunDir) -> dict[int, Mark]:
    """Marks of workers that are still the same processes, by pid; a zombie counts."""
    marks = {}
    for name in list_names(os.path.join(run_dir.path, _FOLDER)):
        record = run_dir.read(os.path.join(_FOLDER, name)) if name.endswith(".json") else None
        mark = _parse_mark(record or {})
        process = find_process(mark.pid) if mark is not None else None
        if mark is not None and process is not None and process.start_ticks == mark.start_ticks:
            marks[mark.pid] = mark
    return marks


def _parse_mark(record: Record) -> Optional[Mark]:
    try:
        return Mark(int(record["rank"]), int(record["pid"]), int(record["start_ticks"]), int(record["signal"]))
    except (KeyError, TypeError, ValueError):
        return None


def _catches(pid: int, number: int) -> bool:
    """Whether the process handles the signal now: a worker that has replaced itself by exec does so no more."""
    lines = (try_read(f"/proc/{pid}/status") or "").splitlines()
    masks = [line.split()[1] for line in lines if line.startswith("SigCgt:")]
    return bool(masks) and bool(int(masks[0], 16) >> (number - 1) & 1)


def _read_grown(path: str, start: int, end: float) -> str:
    """What was appended: once it has grown, and has then been quiet for a moment."""
    size, changed = start, time.monotonic()
    while time.monotonic() < end:
        try:
            now = os.stat(path).st_size
        except OSError:
            break
        if now != size:
            size, changed = now, time.monotonic()
        elif now > start and time.monotonic() - changed >= _QUIET_S:
            break
        time.sleep(_POLL_S)
    try:
        with open(path, "rb") as file:
            file.seek(max(start, size - _MOST_BYTES))
            return file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _py_spy_stack(query: Query) -> Record:
    try:
        return _stack(query.answer()[-_MOST_BYTES:], "py-spy", None)
    except QueryFailed as error:
        return _stack(None, None, str(error))


def _stack(text: Optional[str], source: Optional[str], missing: Optional[str]) -> Record:
    return {"stack": text, "stack_source": source if text else None, "stack_missing": missing}
