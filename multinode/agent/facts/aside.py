"""Aside: reads in a forked child what may never answer, such as a network file system whose server is gone.

A thread would do as well, but for the supervisor: it is forked from this process, which must have no threads by then.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any

from ..run.processes import fork_child

__all__ = ["READ_S", "Aside"]

READ_S = 5.0
"""How long a file system may take to answer."""

_READ_BYTES = 1 << 16
_STANDARD = (0, 1, 2)


class Aside:
    """A reading that goes on beside everything else, from its making on.

    Args:
        read: says values that JSON can hold, one after the other; its errors are the reading's.
        deadline_s: from now, for all of it.
    """

    def __init__(self, read: Callable[[], Iterable[Any]], deadline_s: float = READ_S) -> None:
        self._deadline_s = deadline_s
        self._deadline = time.monotonic() + deadline_s
        self._pipe, writes = os.pipe()
        self._pid = fork_child(lambda: _say(read, writes, self._pipe, deadline_s))
        os.close(writes)
        self.is_late = False
        """Whether it was given up."""

    def values(self) -> list[Any]:
        """What it said in time.

        Raises:
            ValueError: it failed, with the reason.
        """
        data = b""
        while not self.is_late:
            if not select.select([self._pipe], [], [], max(0.0, self._deadline - time.monotonic()))[0]:
                self.is_late = True
            elif part := os.read(self._pipe, _READ_BYTES):
                data += part
            else:
                break
        os.close(self._pipe)
        # One that hangs in the kernel dies when that lets it go.
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, os.WNOHANG if self.is_late else 0)
        said = [json.loads(line) for line in data.split(b"\n")[:-1]]
        if said and "error" in said[-1]:
            raise ValueError(said[-1]["error"])
        return [record["value"] for record in said]

    def value(self) -> Any:
        """The only one.

        Raises:
            ValueError: it failed, or did not come in time.
        """
        values = self.values()
        if not values:
            raise ValueError(f"not read within {self._deadline_s:g} s")
        return values[0]


def _say(read: Callable[[], Iterable[Any]], writes: int, reads: int, deadline_s: float) -> None:
    """In the child: without the controller's channel, which would not end before us."""
    signal.alarm(int(deadline_s) + 1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in _STANDARD:
        os.dup2(nothing, descriptor)
    os.close(reads)
    with open(writes, "w", encoding="utf-8", errors="replace") as pipe:
        try:
            for value in read():
                pipe.write(json.dumps({"value": value}) + "\n")
                pipe.flush()
        except (OSError, ValueError, LookupError) as error:
            pipe.write(json.dumps({"error": str(error)}) + "\n")
