"""Processes of this node, from /proc: which belong to a run, how to signal them safely, and how to fork one.

A process is identified by its pid and its start time, since the kernel reuses pids.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple, Optional

from .files import try_read

_PR_SET_CHILD_SUBREAPER = 36


class Process(NamedTuple):
    """One process."""

    pid: int
    ppid: int
    start_ticks: int  # when it started, in clock ticks since boot
    alive: bool  # False for a zombie

    def send(self, number: int) -> None:
        """Signal the process; nothing happens if it is gone or belongs to another user."""
        with contextlib.suppress(OSError):
            # A pidfd makes sure that the process that is checked is the one that is signalled. Some builds of Python
            # and kernels before 5.3 lack it: there the pid could be reused between the check and the signal.
            fd = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else None
            try:
                if not self._is_there():
                    return
                if fd is None or not hasattr(signal, "pidfd_send_signal"):
                    os.kill(self.pid, number)
                else:
                    signal.pidfd_send_signal(fd, number)
            finally:
                if fd is not None:
                    os.close(fd)

    def _is_there(self) -> bool:
        now = find_process(self.pid)
        return now is not None and now.start_ticks == self.start_ticks


class Family:
    """The processes of one run: descendants of a root, and processes with the run's id in their environment.

    Args:
        run_id: the value of MULTINODE_RUN_ID.
        root: pid whose descendants count; None counts by the environment alone.
        spare: pids that do not count, besides our own.
    """

    def __init__(self, run_id: str, *, root: Optional[int] = None, spare: Collection[int] = ()) -> None:
        self._marker = b"\0MULTINODE_RUN_ID=" + os.fsencode(run_id) + b"\0"
        self._root = root
        self.spared = {os.getpid(), *spare}  # pids that do not count; the owner may change it

    def find(self) -> list[Process]:
        """Living processes of the run. A process that starts during the look may be missed: look again."""
        processes = list_processes()
        related = set() if self._root is None else _descendants(self._root, processes)
        return [
            process
            for process in processes
            if process.alive
            and process.pid not in self.spared
            and (process.pid in related or self._carries_id(process.pid))
        ]

    def _carries_id(self, pid: int) -> bool:
        return self._marker in b"\0" + environ_of(pid) + b"\0"


def list_pids() -> set[int]:
    """Pids that /proc shows."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def list_processes() -> list[Process]:
    """The processes that /proc shows; one that ends meanwhile is left out."""
    processes = map(find_process, sorted(list_pids()))
    return [process for process in processes if process is not None]


def find_process(pid: int) -> Optional[Process]:
    """The process that has this pid now; None if there is none."""
    fields = stat_fields(pid)
    return None if fields is None else parse_process(pid, fields)


def stat_fields(pid: int) -> Optional[list[bytes]]:
    """Fields of /proc/PID/stat (proc(5)) after the name, the state first; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return split_stat(file.read())
    except OSError:
        return None


def split_stat(data: bytes) -> list[bytes]:
    """Fields after the name in the text of /proc/PID/stat; the name may contain blanks and parentheses itself."""
    return data.rpartition(b")")[2].split()


def parse_process(pid: int, fields: list[bytes]) -> Process:
    """The process with the fields of `stat_fields`."""
    state, ppid, threads, start_ticks = fields[0], int(fields[1]), int(fields[17]), int(fields[19])
    # If the main thread has ended and others still run, the state is Z as well.
    alive = state not in (b"Z", b"X", b"x") or (state == b"Z" and threads > 1)
    return Process(pid, ppid, start_ticks, alive)


def environ_of(pid: int) -> bytes:
    """The environment that a process of our own user was started with, its entries separated by zero bytes.

    Empty if the process belongs to another user, is a zombie, or is gone.
    """
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.getuid():
            return b""
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read()
    except OSError:
        return b""


def command_of(pid: int) -> Optional[str]:
    """The short name of a process's program; None if the process is gone."""
    return try_read(f"/proc/{pid}/comm")


def boot_id() -> Optional[str]:
    """The kernel's id of this boot; start times of processes are only valid within one boot."""
    return try_read("/proc/sys/kernel/random/boot_id")


def is_running(pid: int, start_ticks: Optional[int]) -> bool:
    """Whether the process with this pid and start time lives."""
    process = find_process(pid)
    return process is not None and process.alive and process.start_ticks == start_ticks


def adopt_orphans() -> bool:
    """Become the parent of every descendant that loses its own (prctl(2)); False if that is not possible."""
    try:
        import ctypes
    except ImportError:
        return False
    zero = ctypes.c_ulong(0)
    return bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), zero, zero, zero) == 0)


def reap_children() -> Iterator[tuple[int, int]]:
    """Pid and wait status of each of our children that has ended."""
    with contextlib.suppress(ChildProcessError):
        while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
            yield reaped


def fork_child(body: Callable[[], None]) -> int:
    """Run `body` in a forked child and return the child's pid. The caller must have no threads.

    If `body` raises, the child prints the exception to its stderr and exits with 1.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        except BaseException:  # noqa: BLE001 - whatever it is, it must not unwind into the parent's frames
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
        finally:
            os._exit(code)
    return pid


def _descendants(root: int, processes: list[Process]) -> set[int]:
    children: dict[int, list[int]] = {}
    for process in processes:
        children.setdefault(process.ppid, []).append(process.pid)
    descendants: set[int] = set()
    waiting = [root]
    while waiting:
        new = [pid for pid in children.get(waiting.pop(), []) if pid not in descendants]
        descendants.update(new)
        waiting.extend(new)
    return descendants
