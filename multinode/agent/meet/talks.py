"""Talks: connections that go on side by side in one thread. Each is a generator that yields what it waits for."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from typing import Optional, Union

__all__ = ["READ", "WRITE", "Talk", "Talks", "read_line", "write_all"]

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE
_MAX_LINE_BYTES = 200


class Talk(ABC):
    """One connection.

    Args:
        connection: its socket; it becomes non-blocking, and is closed when the talk is over.
        deadline: when it must be over, on the monotonic clock.
    """

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        connection.settimeout(0)
        self.socket = connection
        self.deadline = deadline
        self.awaited = 0
        self.turns = self.steps()

    @abstractmethod
    def steps(self) -> Iterator[int]:
        """What happens, yielding READ or WRITE where the socket has to be ready first. Raises OSError, EOFError."""

    @abstractmethod
    def over(self, error: Optional[Exception]) -> None:
        """Told once at the end: None is a good one; TimeoutError says that the deadline has passed."""


class Talks:
    """All talks of a verb, and what else it waits for."""

    def __init__(self) -> None:
        self._selector = selectors.PollSelector()
        self._open: list[Talk] = []

    def watch(self, source: Union[int, socket.socket], ready: Callable[[], None]) -> None:
        """Call `ready` whenever there is something to read."""
        self._selector.register(source, READ, ready)

    def begin(self, talk: Talk) -> None:
        """Let a talk begin."""
        self._open.append(talk)
        self._advance(talk)

    def turn(self, timeout_s: float) -> None:
        """Wait at most that long for something to happen, and let it go on; end what has passed its deadline."""
        for key, _ in self._selector.select(timeout_s):
            if not isinstance(key.data, Talk):
                key.data()
            elif key.data in self._open:
                self._advance(key.data)
        now = time.monotonic()
        for talk in [talk for talk in self._open if now > talk.deadline]:
            self._end(talk, TimeoutError())

    def close(self) -> None:
        """End all talks."""
        for talk in list(self._open):
            self._end(talk, TimeoutError())
        self._selector.close()

    def _advance(self, talk: Talk) -> None:
        try:
            awaited = next(talk.turns)
        except StopIteration:
            self._end(talk, None)
        except (OSError, EOFError) as error:
            self._end(talk, error)
        else:
            self._await(talk, awaited)

    def _await(self, talk: Talk, awaited: int) -> None:
        if talk.awaited == 0:
            self._selector.register(talk.socket, awaited, talk)
        elif talk.awaited != awaited:
            self._selector.modify(talk.socket, awaited, talk)
        talk.awaited = awaited

    def _end(self, talk: Talk, error: Optional[Exception]) -> None:
        self._open.remove(talk)
        if talk.awaited:
            self._selector.unregister(talk.socket)
        talk.over(error)
        with contextlib.suppress(OSError):
            talk.socket.close()


def read_line(connection: socket.socket) -> Generator[int, None, bytes]:
    """Read one line, byte by byte so that nothing after it is taken; the generator's value is the line.

    Raises:
        EOFError: the peer closed, or its line is longer than any of ours.
    """
    line = b""
    while not line.endswith(b"\n"):
        yield READ
        with contextlib.suppress(BlockingIOError):
            # The lines are short, and come once a talk.
            while not line.endswith(b"\n"):
                byte = connection.recv(1)
                line += byte
                if not byte or len(line) > _MAX_LINE_BYTES:
                    raise EOFError
    return line


def write_all(connection: socket.socket, data: bytes) -> Iterator[int]:
    """Write all of it; nothing is waited for as long as the kernel takes it."""
    rest = memoryview(data)
    while rest:
        with contextlib.suppress(BlockingIOError):
            rest = rest[connection.send(rest) :]
        if rest:
            yield WRITE
