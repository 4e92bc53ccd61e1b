"""Data for a diagnosis of a hang in the run directory: this worker's Python stacks, and its number of collectives.

A real-time signal makes faulthandler write the stacks of all threads, which works even if a worker hangs in a C call,
as when it waits for a peer. On a GPU the host runs ahead of its collectives, so a stack does not tell which collective
hangs; a thread records the sequence numbers of the process groups. Only groups of all workers count, since the numbers
of other groups differ between ranks. When a diagnosis asks, the same thread writes what torch's flight recorder holds.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import signal
import sys
import threading
from typing import Callable, Iterable, Optional

from ..node.files import replace_file, try_read
from ..node.processes import find_process
from . import flight

# SIGUSR1 and SIGUSR2 belong to the user's code, which may claim them at any time: job schedulers announce a preemption
# by them. The C library uses the first two real-time signals; hardly any program uses others.
_OFFSET = 12


def register(run_dir: str, rank: int) -> None:
    """Register the signal, and write a mark, which `diagnose` reads before it sends the signal.

    If the signal is already in use, nothing is registered.
    """
    number = _free_signal()
    if number is None:
        return
    folder = os.path.join(run_dir, "stacks")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    name = "rank-%d" % rank
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    # The file stays open as long as the worker lives: a signal handler cannot open files.
    descriptor = os.open(os.path.join(folder, name + ".txt"), flags, 0o600)
    faulthandler.register(number, file=descriptor, all_threads=True, chain=False)
    ourselves = find_process(os.getpid())
    start_ticks = ourselves.start_ticks if ourselves is not None else None
    mark = {"rank": rank, "pid": os.getpid(), "start_ticks": start_ticks, "signal": int(number)}
    replace_file(os.path.join(folder, name + ".json"), json.dumps(mark).encode())


def _free_signal() -> Optional[int]:
    if not hasattr(signal, "SIGRTMIN"):
        return None
    number = signal.SIGRTMIN + _OFFSET
    return number if signal.getsignal(number) == signal.SIG_DFL else None


_INTERVAL_S = 1.0
_JOIN_DEADLINE_S = 5.0
_LONGEST_QUESTION = 64


def start_counting(run_dir: str, rank: int) -> None:
    """Start the thread; it writes `<pid> <count>` into stacks/rank-N.sequence when the count has changed.

    When the text of stacks/asked has changed, it writes that text, and then `flight.dump`, into stacks/rank-N.flight.
    """
    folder = os.path.join(run_dir, "stacks")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    descriptor = os.open(os.path.join(folder, "rank-%d.sequence" % rank), flags, 0o600)
    stop = threading.Event()
    looks = (_counter(descriptor), _answerer(folder, rank))
    thread = threading.Thread(target=_look, args=(looks, stop), name="multinode-sequence", daemon=True)
    thread.start()

    def end() -> None:
        # The thread must end first: torch takes the GIL in a C++ destructor, which aborts while Python is finalized.
        stop.set()
        thread.join(_JOIN_DEADLINE_S)

    atexit.register(end)


def _look(looks: Iterable[Callable[[], None]], stop: threading.Event) -> None:
    working = list(looks)
    while working and not stop.wait(_INTERVAL_S):
        # If the disk is full, or torch lacks it, it is missing.
        working = [look for look in working if _works(look)]


def _works(look: Callable[[], None]) -> bool:
    try:
        look()
    except Exception:  # noqa: BLE001 - a training never stops because it is being watched
        return False
    return True


def _counter(descriptor: int) -> Callable[[], None]:
    last: Optional[int] = None

    def write_count() -> None:
        nonlocal last
        count = _count()
        if count is not None and count != last:
            # All lines have one length, so a reader never sees the rest of an older number.
            os.pwrite(descriptor, b"%10d %20d\n" % (os.getpid(), count), 0)
            last = count

    return write_count


def _answerer(folder: str, rank: int) -> Callable[[], None]:
    question = os.path.join(folder, "asked")
    last = try_read(question, _LONGEST_QUESTION)

    def answer() -> None:
        nonlocal last
        asked = try_read(question, _LONGEST_QUESTION)
        if asked is not None and asked != last:
            last = asked
            answer = asked.encode() + b"\n" + (flight.dump(rank) or b"")
            replace_file(os.path.join(folder, "rank-%d.flight" % rank), answer)

    return answer


def _count() -> Optional[int]:
    """Number of collectives of all groups that contain all workers; None before there is a group."""
    # Only look at a module that the training has imported: importing it here would change when that happens.
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not getattr(c10d, "is_initialized", bool)():
        return None
    world = c10d.get_world_size()
    groups = [group for group in list(c10d._world.pg_map) if group.size() == world]  # noqa: SLF001 - no public list
    return sum(int(group._get_sequence_number_for_group()) for group in groups)  # noqa: SLF001 - torch has no other name
