"""The verb `diagnose`: state, stacks and connections of each worker of a hanging run, and what NCCL reports.

It asks NCCL's RAS service, and lists dumps of PyTorch's flight recorder. It only reads, except for the signal by which
an instrumented worker shows its stacks. A node cannot tell which rank is behind: that needs the answers of all nodes.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import socket
import time
from collections.abc import Collection, Iterable
from typing import NamedTuple, Optional, Union

from ..channel import Channel, Record
from ..facts.gpus import uses_gpu
from ..facts.network import describe_connections
from ..facts.unknown import Unknown, found
from ..files import list_names, read_end, replace_file, try_read
from ..nccl_files import read_nccl_warnings
from ..processes import Family, Process, environ_of, find_process, stat_fields
from ..programs import Query, find_program
from ..rundir import RunDir, open_run

_FOLDER = "stacks"
_MOST_BYTES = 1 << 16
# Workers append to their file; beyond this size it is truncated.
_FILE_BYTES = 1 << 22
_QUIET_S = 0.15
_POLL_S = 0.02
_PY_SPY_S = 4.0
# Workers look once a second whether they are asked.
_FLIGHT_S = 3.0
_MOST_FLIGHT_BYTES = (1 << 18) + 64
_HELD = {"T": "it is stopped", "t": "a debugger holds it", "Z": "it has ended", "X": "it has ended"}


class Mark(NamedTuple):
    """The file that an instrumented worker writes when it registers its signal."""

    rank: int
    pid: int
    start_ticks: int
    number: int  # the signal on which it shows its stacks


class StackReader:
    """Asks several processes for their stacks at once, and reads the answers afterwards.

    Args:
        marks: marks of the instrumented workers, by pid.
        path: PATH on which to look for py-spy.
    """

    def __init__(self, run_dir: RunDir, marks: dict[int, Mark], path: str) -> None:
        self._folder = os.path.join(run_dir.path, _FOLDER)
        self._marks = marks
        self._path = path
        self._asked: dict[int, tuple[str, int]] = {}
        self._queries: dict[int, Query] = {}
        self._missing: dict[int, str] = {}

    def ask(self, process: Process, state: str) -> None:
        """Ask a process for its stacks, unless it is stopped or has ended."""
        if state in _HELD:
            self._missing[process.pid] = f"{_HELD[state]}, so it returns no stacks"
            return
        mark = self._marks.get(process.pid)
        if mark is not None and mark.start_ticks == process.start_ticks and _catches(process.pid, mark.number):
            self._signal(process, mark)
        else:
            self._start_py_spy(process.pid)

    def answers(self, deadline_s: float) -> dict[int, Record]:
        """`stack` and `stack_source` by pid, for all processes of `ask`."""
        stacks: dict[int, Record] = {pid: {"stack": Unknown(reason)} for pid, reason in self._missing.items()}
        end = time.monotonic() + deadline_s
        for pid, (path, start) in self._asked.items():
            text = _read_grown(path, start, end)
            silent = Unknown("it did not answer: a C call blocks the signal, or the disk is full")
            stacks[pid] = {"stack": text, "stack_source": "faulthandler"} if text else {"stack": silent}
        for pid, query in self._queries.items():
            stacks[pid] = _py_spy_stack(query)
        return stacks

    def _signal(self, process: Process, mark: Mark) -> None:
        path = os.path.join(self._folder, f"rank-{mark.rank}.txt")
        try:
            size = os.stat(path).st_size
            if size > _FILE_BYTES:
                os.truncate(path, 0)
                size = 0
        except OSError as error:
            self._missing[process.pid] = f"the file for its stacks is missing: {error.strerror}"
            return
        self._asked[process.pid] = (path, size)
        process.send(mark.number)

    def _start_py_spy(self, pid: int) -> None:
        program = find_program("py-spy", self._path)
        if program is None:
            self._missing[pid] = "it is not instrumented, and py-spy is not on PATH"
        else:
            self._queries[pid] = Query([program, "dump", "--pid", str(pid)], deadline_s=_PY_SPY_S)


class FlightReader:
    """Asks instrumented workers at once for what torch's flight recorder holds, and reads the answers afterwards.

    Args:
        marks: marks of the instrumented workers, by pid.
    """

    def __init__(self, run_dir: RunDir, marks: dict[int, Mark]) -> None:
        self._folder = os.path.join(run_dir.path, _FOLDER)
        self._marks = marks
        self._question = f"{os.getpid()} {time.time_ns()}"
        self._asked = time.monotonic()
        if marks:
            with contextlib.suppress(OSError):
                replace_file(os.path.join(self._folder, "asked"), self._question.encode())

    def answers(self, pids: Collection[int]) -> dict[int, str]:
        """The answers of these processes by pid, without those that have none in time."""
        waiting, found = {pid: self._marks[pid].rank for pid in pids if pid in self._marks}, {}
        while waiting:
            in_time = time.monotonic() - self._asked < _FLIGHT_S
            for pid, rank in list(waiting.items()):
                data = try_read(os.path.join(self._folder, f"rank-{rank}.flight"), _MOST_FLIGHT_BYTES) or ""
                question, _, text = data.partition("\n")
                if question == self._question:
                    del waiting[pid]
                    if text:
                        found[pid] = text
            if not in_time:
                break
            time.sleep(_POLL_S)
        return found


def read_marks(run_dir: RunDir) -> dict[int, Mark]:
    """Marks of workers whose processes still exist, by pid; a zombie counts."""
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
    """Whether the process handles the signal now: after an exec it does not."""
    lines = (try_read(f"/proc/{pid}/status") or "").splitlines()
    masks = [line.split()[1] for line in lines if line.startswith("SigCgt:")]
    return bool(masks) and bool(int(masks[0], 16) >> (number - 1) & 1)


def _read_grown(path: str, start: int, end: float) -> str:
    """Text that was appended to a file; waits until it has grown and then stopped growing, or for `end`."""
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
    text = found(query.answer)
    return {"stack": text} if isinstance(text, Unknown) else {"stack": text[-_MOST_BYTES:], "stack_source": "py-spy"}


_LOOK_S = 0.3
_STACKS_S = 2.0
# RAS asks its peers in two legs, and waits this long in each (ras_internal.h: 5 s by default).
_RAS_LEG_S = 2
_RAS_S = 2 * _RAS_LEG_S + 1.0
_MOST_PROCESSES = 64
_MOST_LAUNCHERS = 4
# Default port of NCCL 2.24 and later, which NCCL_RAS_ADDR changes (NCCL documentation, "RAS").
_RAS_PORT = 28028
_RAS_CONNECT_S = 1.0
_MOST_RAS_BYTES = 1 << 16
_FLIGHT_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_FLIGHT_NAME = "nccl_trace_rank_"
_MOST_FLIGHT_RECORDS = 64
_SHORT_CHARACTERS = 4096
_TAIL_BYTES = 1 << 16
_VARIABLES = frozenset({"LOCAL_RANK", "RANK", "NCCL_RAS_ADDR", "PATH", *_FLIGHT_VARIABLES})
_WORDS = {
    "R": "running",
    "S": "sleeping",
    "D": "uninterruptible sleep",
    "I": "idle",
    "T": "stopped",
    "t": "held by a debugger",
    "Z": "zombie",
    "X": "dead",
}


class _Member(NamedTuple):
    """A worker or launcher of the run."""

    process: Process
    environ: dict[str, str]  # some of the variables it was started with; empty for a zombie
    rank: Optional[int]  # global rank; None for a launcher, which is any other process of the run
    local_rank: Optional[int]


def ras_target(addr: Optional[str]) -> tuple[str, int]:
    """Host and port of the workers' RAS service, by their NCCL_RAS_ADDR.

    Only the port is taken from it: NCCL listens on the first address of `localhost`, often ::1, and no other node is
    asked.
    """
    port = (addr or "").rpartition(":")[2]
    return "localhost", int(port) if port.isdecimal() and int(port) < 1 << 16 else _RAS_PORT


class _RasQuestion:
    """The RAS request `verbose status`. It is sent early and read late, since the service may wait for stuck peers.

    Args:
        addr: NCCL_RAS_ADDR of the workers.
    """

    def __init__(self, addr: Optional[str]) -> None:
        self._missing: Optional[str] = None
        self._socket: Optional[socket.socket] = None
        target = ras_target(addr)
        try:
            self._socket = socket.create_connection(target, _RAS_CONNECT_S)
            self._socket.sendall(b"timeout %d\nverbose status\n" % _RAS_LEG_S)
        except OSError as error:
            self._missing = f"no NCCL RAS on port {target[1]}: {error.strerror or error}"
            self.close()

    def answer(self, deadline_s: float) -> Union[str, Unknown]:
        """The text, or why there is none; one that is incomplete at the deadline is kept."""
        data = b""
        end = time.monotonic() + deadline_s
        while self._socket is not None and len(data) < _MOST_RAS_BYTES and (left_s := end - time.monotonic()) > 0:
            self._socket.settimeout(left_s)
            try:
                piece = self._socket.recv(_MOST_RAS_BYTES - len(data))
            except OSError:
                break
            if not piece:
                break
            data += piece
        self.close()
        # The answer to `timeout`; releases that do not know it report an error, and answer the rest.
        text = re.sub(r"\A(OK|ERROR: Unknown command .*)\n", "", data.decode(errors="replace"))
        return text or Unknown(self._missing or "NCCL RAS gave no answer")

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class _ProcessLook(NamedTuple):
    """One look at a process: the letter of its state, and CPU seconds since its start."""

    state: str
    cpu_s: float


def run(request: Record, channel: Channel) -> None:
    """The verb `diagnose`: emits one record `diagnosis`."""
    run_dir = open_run(request["run_id"])
    marks = read_marks(run_dir)
    members = _find_members(run_dir, marks)
    flight = FlightReader(run_dir, marks)
    ras = _RasQuestion(_variable(members, "NCCL_RAS_ADDR"))
    first = {member.process.pid: _look(member.process.pid) for member in members}
    began = time.monotonic()
    time.sleep(_LOOK_S)
    second = {member.process.pid: _look(member.process.pid) for member in members}
    looked_s = time.monotonic() - began
    stacks = _read_stacks(run_dir, marks, members, second)
    able = [pid for pid, look in second.items() if look is not None and look.state not in _HELD]
    flights = flight.answers(able)
    channel.emit(
        {
            "kind": "diagnosis",
            "schema": 1,
            "run_id": run_dir.run_id,
            "time_s": time.time(),
            "processes": [
                {
                    **_describe(member, first[member.process.pid], second[member.process.pid]),
                    "collectives": _read_sequence(run_dir, member),
                    "flight": flights.get(member.process.pid),
                    "looked_s": looked_s,
                    **stacks.get(member.process.pid, {}),
                }
                for member in members
            ],
            "last_steps": _last_steps(run_dir),
            "flight_records": list_flight_records(run_dir.path, [member.environ for member in members]),
            "nccl_warnings": read_nccl_warnings(run_dir.path),
            "ras": ras.answer(_RAS_S),
        }
    )


def _find_members(run_dir: RunDir, marks: dict[int, Mark]) -> list[_Member]:
    """Find the workers and their launchers.

    A worker's data loaders inherit its variables. Among processes of one rank, the worker is the one that registered,
    or else the one whose parent has no LOCAL_RANK.
    """
    family = Family(run_dir.run_id).find()
    environs = {process.pid: _read_environ(process.pid) for process in family}
    marked = {mark.rank for mark in marks.values()}
    members = []
    for process in family:
        environ = environs[process.pid]
        rank = _number(environ.get("RANK", environ.get("LOCAL_RANK")))
        if "LOCAL_RANK" not in environ:
            members.append(_Member(process, environ, None, None))
        elif process.pid in marks or (rank not in marked and "LOCAL_RANK" not in environs.get(process.ppid, {})):
            members.append(_Member(process, environ, rank, _number(environ["LOCAL_RANK"])))
    pids = {member.process.pid for member in members}
    # A zombie has no environment, but its mark tells its rank.
    gone = ((find_process(pid), mark) for pid, mark in marks.items() if pid not in pids)
    members += [_Member(process, {}, mark.rank, None) for process, mark in gone if process is not None]
    workers = sorted((member for member in members if member.rank is not None), key=lambda member: member.rank or 0)
    launchers = [member for member in members if member.rank is None]
    return launchers[:_MOST_LAUNCHERS] + workers[:_MOST_PROCESSES]


def _read_stacks(
    run_dir: RunDir, marks: dict[int, Mark], members: list[_Member], looks: dict[int, Optional[_ProcessLook]]
) -> dict[int, Record]:
    path = os.pathsep.join(filter(None, [os.environ.get("PATH"), _variable(members, "PATH")]))
    reader = StackReader(run_dir, marks, path)
    for member in members:
        look = looks[member.process.pid]
        if look is not None:
            reader.ask(member.process, look.state)
    return reader.answers(_STACKS_S)


def _describe(member: _Member, first: Optional[_ProcessLook], second: Optional[_ProcessLook]) -> Record:
    pid = member.process.pid
    state = second.state if second is not None else "X"
    return {
        "role": "launcher" if member.rank is None else "worker",
        "rank": member.rank,
        "local_rank": member.local_rank,
        "pid": pid,
        "command": _short(f"/proc/{pid}/comm"),
        "state": state,
        "state_words": _WORDS.get(state, "unknown"),
        "state_before": first.state if first is not None else state,
        "cpu_s": second.cpu_s - first.cpu_s if first is not None and second is not None else None,
        "wchan": _short(f"/proc/{pid}/wchan"),
        # Only root can read it.
        "kernel_stack": _short(f"/proc/{pid}/stack"),
        "sockets": _sockets(pid) if member.rank is not None else None,
        "gpu": member.rank is not None and uses_gpu(pid),
    }


def _look(pid: int) -> Optional[_ProcessLook]:
    fields = stat_fields(pid)
    if fields is None:
        return None
    return _ProcessLook(fields[0].decode(), sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK"))


def _sockets(pid: int) -> Optional[Record]:
    try:
        return describe_connections(pid)
    except (OSError, ValueError):
        return None


def _last_steps(run_dir: RunDir) -> list[Record]:
    """The last recorded step of each rank, whether its process lives or not."""
    records = []
    names = [name for name in list_names(run_dir.samples) if name.startswith("rank-")]
    for name in names[:_MOST_PROCESSES]:
        with contextlib.suppress(OSError):
            step = _last_step(os.path.join(run_dir.samples, name))
            if step is not None:
                records.append({"rank": step.get("rank"), "step": step.get("step"), "time_s": step.get("time_s")})
    return records


def _last_step(path: str) -> Optional[Record]:
    for line in reversed(read_end(path, _TAIL_BYTES).splitlines()):
        # The first line may be cut off, and the last one incomplete.
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and record.get("kind") == "step":
                return record
    return None


def _read_sequence(run_dir: RunDir, member: _Member) -> Optional[int]:
    """Number of collectives that the worker has launched, as counted by its instrumentation; None if unknown."""
    words = (try_read(os.path.join(run_dir.path, "stacks", f"rank-{member.rank}.sequence")) or "").split()
    if len(words) != 2 or words[0] != str(member.process.pid):  # noqa: PLR2004 - its pid and the number
        return None
    return _number(words[1])


def list_flight_records(run_dir: str, environs: Iterable[dict[str, str]], since_s: float = 0.0) -> list[Record]:
    """Path and size of each dump of the flight recorder, by the workers' variables or in the run directory.

    A dump that is older than `since_s` is another run's.
    """
    prefixes = {environ[name] for environ in environs for name in _FLIGHT_VARIABLES if environ.get(name)}
    prefixes = {prefix for prefix in prefixes if os.path.isabs(prefix)} | {os.path.join(run_dir, _FLIGHT_NAME)}
    states = []
    paths = sorted({path for prefix in prefixes for path in glob.glob(glob.escape(prefix) + "*")})
    for path in paths[:_MOST_FLIGHT_RECORDS]:
        with contextlib.suppress(OSError):
            stat = os.stat(path)
            if stat.st_mtime >= since_s:
                states.append({"path": path, "size_bytes": stat.st_size})
    return states


def _read_environ(pid: int) -> dict[str, str]:
    pairs = (os.fsdecode(entry).partition("=") for entry in environ_of(pid).split(b"\0"))
    return {name: value for name, _, value in pairs if name in _VARIABLES}


def _variable(members: list[_Member], name: str) -> Optional[str]:
    return next((member.environ[name] for member in members if name in member.environ), None)


def _short(path: str) -> Optional[str]:
    """The text of a file of /proc; None if it cannot be read, or is empty or `0`, by which the kernel means nothing."""
    text = (try_read(path) or "")[:_SHORT_CHARACTERS]
    return text if text not in {"", "0"} else None


def _number(text: Optional[str]) -> Optional[int]:
    return int(text) if text is not None and text.isdecimal() else None
