"""Reads in a forked child what may never answer, such as a network file system whose server is gone.

It is not a thread, because the supervisor is forked from this process, which must have no threads then.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Optional

from ..processes import fork_child

READ_S = 5.0
"""Seconds that a file system may take to answer."""

# The most that a probe waits for all readings together, however many hang.
_MOST_S = 15.0
_READ_BYTES = 1 << 16
_STANDARD = (0, 1, 2)


class LateError(Exception):
    """A reading did not come in time."""


class Aside:
    """A reading in the background, which starts when this is created.

    Args:
        read: yields values that JSON can hold; it must not raise.
        most_s: seconds after which the child ends itself.
    """

    def __init__(self, read: Callable[[], Iterable[Any]], most_s: float = READ_S) -> None:
        self._reads, writes = os.pipe()
        self._pid = fork_child(lambda: _say(read, writes, self._reads, most_s))
        os.close(writes)
        self._data = b""
        self._ended = False

    def next(self, deadline: float) -> tuple[float, Any]:
        """The time at which the next value was read, and the value; waits until `deadline`. Times are monotonic.

        Raises:
            LateError: the value did not come in time.
            StopIteration: there are no more values.
        """
        while b"\n" not in self._data and not self._ended:
            if not select.select([self._reads], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise LateError
            part = os.read(self._reads, _READ_BYTES)
            self._ended = not part
            self._data += part
        line, newline, self._data = self._data.partition(b"\n")
        if not newline:
            raise StopIteration
        at, value = json.loads(line)
        return at, value

    def values(self, deadline: float) -> Iterator[Any]:
        """Yield the values that come in time, then close."""
        try:
            while True:
                yield self.next(deadline)[1]
        except (LateError, StopIteration):
            return
        finally:
            self.close()

    def close(self) -> None:
        """Kill the child. If it hangs in the kernel, it dies when the kernel returns."""
        if self._reads < 0:
            return
        os.close(self._reads)
        self._reads = -1
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0 if self._ended else os.WNOHANG)


class _Reading(NamedTuple):
    """One of several readings."""

    name: str
    read: Callable[[], Any]
    deadline_s: float = READ_S


class Readings:
    """Runs readings one after the other in one child; if one hangs, the rest continue in another child.

    A reading may use an object that earlier readings have changed: the object is the child's own copy.
    """

    def __init__(self) -> None:
        self._waiting: list[_Reading] = []
        self._outcomes: dict[str, Any] = {}
        self._aside: Optional[Aside] = None
        self._since = self._began = time.monotonic()

    def add(self, name: str, read: Callable[[], Any], deadline_s: float = READ_S) -> None:
        """Add a reading; they run in this order, from `start` or the first `take` on."""
        self._waiting.append(_Reading(name, read, deadline_s))

    def start(self) -> Aside:
        """Start a child for the readings that have no outcome yet."""
        self._since = time.monotonic()
        waiting = list(self._waiting)
        self._aside = Aside(lambda: map(_outcome, waiting), sum(task.deadline_s for task in waiting))
        return self._aside

    def take(self, name: str) -> Any:
        """Wait for the result of a reading.

        Raises:
            LateError: it did not come in time.
            ValueError: the reading failed, with the reason.
        """
        while name not in self._outcomes:
            self._step()
        outcome = self._outcomes[name]
        if outcome is None:
            raise LateError(name)
        if "error" in outcome:
            raise ValueError(outcome["error"])
        return outcome["value"]

    def close(self) -> None:
        """Give up the readings that have not been taken."""
        if self._aside is not None:
            self._aside.close()

    def _step(self) -> None:
        aside = self._aside or self.start()
        reading = self._waiting.pop(0)
        outcome: Optional[dict[str, Any]] = None
        try:
            self._since, outcome = aside.next(min(self._since + reading.deadline_s, self._began + _MOST_S))
        except (LateError, StopIteration):
            aside.close()
        self._outcomes[reading.name] = outcome
        if outcome is None and self._waiting:
            self.start()


def _outcome(reading: _Reading) -> dict[str, Any]:
    try:
        return {"value": reading.read()}
    except (OSError, ValueError, LookupError) as error:
        return {"error": str(error)}


def _say(read: Callable[[], Iterable[Any]], writes: int, reads: int, most_s: float) -> None:
    """Body of the child. It closes the controller's channel, which would otherwise stay open as long as the child."""
    signal.alarm(int(most_s) + 1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in _STANDARD:
        os.dup2(nothing, descriptor)
    os.close(reads)
    for value in read():
        line = json.dumps([time.monotonic(), value]).encode() + b"\n"
        while line:
            line = line[os.write(writes, line) :]
