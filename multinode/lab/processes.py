"""Processes of the lab as /proc shows them to the controller: who lives in which namespace, and who is still who."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from multinode.lab.spec import ProcessRef

__all__ = [
    "NamespaceId",
    "children_of",
    "has_environment",
    "init_environment",
    "is_alive",
    "is_stopped",
    "kill_all",
    "kill_process",
    "namespace_id",
    "poll",
    "process_ref",
    "processes_in",
    "processes_of_lab",
    "signal_all",
]

_MARKER = "MULTINODE_LAB_OF"

_PROC = Path("/proc")
_POLL_S = 0.01

NamespaceId = tuple[int, int]


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
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The second field, the name, may hold anything; the fields after it are counted from its closing parenthesis.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else ProcessRef(pid=pid, start_ticks=int(fields[19]))


def is_alive(process: ProcessRef) -> bool:
    """Whether the very process is still there."""
    return process_ref(process.pid) == process


def children_of(parents: set[int], name: str) -> dict[int, ProcessRef]:
    """For each of these processes that has one, a child of this name."""
    found = {}
    for pid in _pids():
        try:
            text = (_PROC / str(pid) / "stat").read_text()
        except OSError:
            continue
        parent = int(text.rpartition(")")[2].split()[1])
        child = process_ref(pid)
        if parent in parents and f"({name})" in text and child is not None:
            found[parent] = child
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


def processes_in(kind: Literal["net", "pid"], namespace: NamespaceId) -> list[int]:
    """Every process in this network or PID namespace; those that have ended and wait to be collected do not count."""
    return [
        pid
        for pid in _pids()
        if namespace_id(_PROC / str(pid) / "ns" / kind) == namespace and process_ref(pid) is not None
    ]


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, or gone."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return True
    return text.rpartition(")")[2].split()[0] in "TZX"


def has_environment(pid: int, entry: bytes) -> bool:
    """Whether a process was started with this `NAME=value`."""
    try:
        return entry in (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return False


def kill_process(process: ProcessRef) -> bool:
    """SIGKILL to the very process; returns whether it was still there."""
    if not is_alive(process):
        return False
    kill_all([process.pid])
    return True


def kill_all(pids: list[int]) -> None:
    """SIGKILL to each; those that have gone meanwhile are passed over."""
    signal_all(pids, signal.SIGKILL)


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


def _pids() -> list[int]:
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]
