"""Run the system's programs (ip, tc, ssh-keygen), and see the processes of the lab as /proc shows them.

Programs are run by argv with a deadline, and their failures become our errors.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from multinode.errors import MultinodeError, printable_line
from multinode.lab.state import LabNode, ProcessRef
from multinode.secret_values import redact_words
from multinode.units import format_duration

_MARKER = "MULTINODE_LAB_OF"
_RUN_MARKER = b"MULTINODE_RUN_ID="

_PROC = Path("/proc")
_POLL_S = 0.01
_SHOWN = 80
_PROGRAM_DEADLINE_S = 60.0

NamespaceId = tuple[int, int]


def run_program(argv: Sequence[str], *, stdin: str = "") -> str:
    """Run a program to its end and return its standard output.

    Raises:
        MultinodeError: it failed, or did not end within a minute.
    """
    return run_all([argv], stdin=stdin)[0]


def run_batch(argv: Sequence[str], lines: Sequence[str]) -> None:
    """Run `ip` or `tc` once for many commands, one a line.

    Raises:
        MultinodeError: one of the lines failed; those before it were carried out.
    """
    run_program([*argv, "-batch", "-"], stdin="".join(f"{line}\n" for line in lines))


def run_all(commands: Sequence[Sequence[str]], *, stdin: str = "") -> list[str]:
    """Run several programs at the same time and return their standard outputs, in order.

    Raises:
        MultinodeError: the first that failed, after all have ended.
    """
    started: list[subprocess.Popen[str]] = []
    failures: list[MultinodeError] = []
    outputs: list[str] = []
    try:
        for argv in commands:
            started.append(_start(argv))  # noqa: PERF401 - those before one that fails must be known to `finally`
        for argv, process in zip(commands, started, strict=True):
            stdout, stderr = process.communicate(stdin, timeout=_PROGRAM_DEADLINE_S)
            outputs.append(stdout)
            if process.returncode != 0:
                failures.append(_failure(argv, stderr, f"ended with {process.returncode}"))
    except subprocess.TimeoutExpired as error:
        raise _failure(error.cmd, "", f"did not end within {_PROGRAM_DEADLINE_S:.0f} s") from error
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait(timeout=_PROGRAM_DEADLINE_S)
    if failures:
        raise failures[0]
    return outputs


def init_environment() -> dict[str, str]:
    """What marks a node's first process, and no other process, as ours: finds it when all records are lost.

    It names the controller's network namespace: a lab inside a container is none of the machine's around it.
    """
    return {_MARKER: str((_PROC / "self/ns/net").readlink())}


def namespace_id(path: Path) -> NamespaceId | None:
    """What tells one namespace from another; None where the file names none (any more)."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def process_ref(pid: int) -> ProcessRef | None:
    """This process and when it started; None when it is gone or has ended."""
    found = _read_stat(pid)
    return None if found is None or found.state in "ZX" else ProcessRef(pid=pid, start_ticks=found.start_ticks)


def is_alive(process: ProcessRef) -> bool:
    """Whether the very process is still there."""
    return process_ref(process.pid) == process


def children_of(parents: set[int], name: str) -> dict[int, ProcessRef]:
    """For each of these processes that has one, a child of this name."""
    found = {}
    for pid in _pids():
        stat, child = _read_stat(pid), process_ref(pid)
        if stat is not None and child is not None and stat.name == name and stat.parent in parents:
            found[stat.parent] = child
    return found


def processes_of_lab(network_namespaces: set[NamespaceId]) -> list[int]:
    """Every process in one of these network namespaces, and every first process of a lab node, wherever it is."""
    own = namespace_id(_PROC / "self/ns/pid")
    marker = b"".join(f"{name}={value}".encode() for name, value in init_environment().items())
    return [
        pid
        for pid in _pids()
        if namespace_id(_PROC / str(pid) / "ns/net") in network_namespaces
        or (namespace_id(_PROC / str(pid) / "ns/pid") not in {None, own} and has_environment(pid, marker))
    ]


def processes_in(kind: Literal["net", "pid"], namespace: NamespaceId | None) -> list[int]:
    """Every process in this network or PID namespace; those that have ended and wait to be collected do not count."""
    if namespace is None:
        return []
    return [
        pid
        for pid in _pids()
        if namespace_id(_PROC / str(pid) / "ns" / kind) == namespace and process_ref(pid) is not None
    ]


def node_processes(node: LabNode) -> list[int]:
    """Every process of a node; one whose first process has ended has none."""
    return processes_in("pid", namespace_id(_PROC / str(node.init.pid) / "ns/pid"))


def runs_of(node: LabNode) -> dict[str, str]:
    """Ids of the runs that have processes on a node, whoever started them: when the oldest began, and what it is."""
    oldest: dict[str, tuple[int, int]] = {}
    for pid in node_processes(node):
        found = _read_stat(pid)
        for entry in _environment(pid) if found is not None else ():
            if entry.startswith(_RUN_MARKER) and found is not None:
                # On a node a run is called with its node rank behind a dot.
                run = entry.removeprefix(_RUN_MARKER).decode(errors="replace").rpartition(".")[0]
                oldest[run] = min(oldest.get(run, (found.start_ticks, pid)), (found.start_ticks, pid))
    return {run: _describe(pid, start_ticks) for run, (start_ticks, pid) in oldest.items()}


def _describe(pid: int, start_ticks: int) -> str:
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        words = []
    # What it is given may be a secret.
    return f"for {format_duration(max(0.0, age_s))}: {printable_line(' '.join(redact_words(words)))[:_SHOWN].strip()}"


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, or gone."""
    found = _read_stat(pid)
    return found is None or found.state in "TZX"


def has_environment(pid: int, entry: bytes) -> bool:
    """Whether a process was started with this `NAME=value`."""
    return entry in _environment(pid)


def _environment(pid: int) -> list[bytes]:
    """`NAME=value` of each variable that a process was started with; none of one that is gone."""
    try:
        return (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def signal_all(pids: list[int], number: signal.Signals) -> None:
    """A signal to each; those that have gone meanwhile are passed over."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def poll(seconds: float) -> Iterator[None]:
    """Yield again and again, with a pause, until so many seconds have passed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield
        time.sleep(_POLL_S)


class _Stat(NamedTuple):
    """Of /proc/PID/stat."""

    name: str
    state: str
    parent: int
    start_ticks: int


def _read_stat(pid: int) -> _Stat | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The second field, the name, may hold anything; the fields after it are counted from its closing parenthesis.
    before, _, after = text.rpartition(")")
    fields = after.split()
    return _Stat(before.partition("(")[2], fields[0], int(fields[1]), int(fields[19]))


def _pids() -> list[int]:
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]


def _start(argv: Sequence[str]) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
        )
    except OSError as error:
        raise _failure(argv, "", f"cannot be started: {error.strerror}") from error


def _failure(argv: Sequence[str], stderr: str, otherwise: str) -> MultinodeError:
    lines = stderr.strip().splitlines()
    said = lines[-1] if lines else otherwise
    return MultinodeError(f"{argv[0]}: {said}", ran=shlex.join(argv), detail=stderr)
