"""Makes this worker able to show its Python stacks: on one real-time signal, all threads, into the run directory.

Without it a worker that hangs in a C call, as those that wait for a peer do, could not be asked where it stands.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
from typing import Optional

# SIGUSR1 and SIGUSR2 belong to the user's code (job schedulers announce a preemption by them), which may claim them at
# any later time; of the real-time signals the C library takes the first two, and hardly anybody takes one.
_OFFSET = 12


def register(run_dir: str, rank: int) -> None:
    """Register the signal, and leave a mark that says so; whoever signals reads the mark first.

    Nothing is done where the signal is taken already.

    Raises:
        OSError: the run directory cannot be written.
    """
    number = _free_signal()
    if number is None:
        return
    folder = os.path.join(run_dir, "stacks")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    name = "rank-%d" % rank
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    # Kept open for as long as the worker lives: a handler may not open files.
    descriptor = os.open(os.path.join(folder, name + ".txt"), flags, 0o600)
    faulthandler.register(number, file=descriptor, all_threads=True, chain=False)
    mark = {"rank": rank, "pid": os.getpid(), "start_ticks": _start_ticks(), "signal": int(number)}
    partial = os.path.join(folder, ".%s.%d" % (name, os.getpid()))
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii") as file:
        json.dump(mark, file)
    os.replace(partial, os.path.join(folder, name + ".json"))


def _free_signal() -> Optional[int]:
    if not hasattr(signal, "SIGRTMIN"):
        return None
    number = signal.SIGRTMIN + _OFFSET
    return number if signal.getsignal(number) == signal.SIG_DFL else None


def _start_ticks() -> int:
    with open("/proc/self/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])
