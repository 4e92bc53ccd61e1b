"""Calls at the doors of other nodes: do they open, do large packets get through; a short stream, and round trips."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Iterator
from typing import Optional

from ..channel import Record
from .door import ANSWER, PING_BYTES, STREAM_SKIP_S, WHOLE_BYTES
from .talks import READ, WRITE, Talk, read_line, write_all

__all__ = ["Attempt", "Call", "Ping", "Stream"]

_ERRORS = {
    errno.ECONNREFUSED: "refused",
    errno.ETIMEDOUT: "timed out",
    errno.EHOSTUNREACH: "no route",
    errno.ENETUNREACH: "no route",
}
_WRONG = "wrong answer"
_IP_MTU = 14  # linux/in.h
_TCP_NOTSENT_LOWAT = 25  # linux/tcp.h
_CHUNK = bytes(1 << 17)
_MAX_PINGS = 100
# Not timed: caches, and the congestion window of a new connection.
_WARM_PINGS = 5
_NS_PER_US = 1000


class Call(Talk):
    """One connection to a door; `result` is its record at the end.

    Args:
        target: where to: `addr`, an IPv4 address, and `port`.
        token: what the door wants to hear.
        timeout_s: how long it may take.
    """

    def __init__(self, target: Record, token: str, timeout_s: float) -> None:
        self.result: Optional[Record] = None
        self._target = target
        self._token = token.encode()
        self._began = time.monotonic()
        self._connected_ms: Optional[float] = None
        super().__init__(socket.socket(socket.AF_INET, socket.SOCK_STREAM), self._began + timeout_s)

    def over(self, error: Optional[Exception]) -> None:
        """Make the result."""
        ms = self._elapsed_ms() if self._connected_ms is None else self._connected_ms
        where = {"addr": self._target["addr"], "port": self._target["port"]}
        self.result = {**where, "error": self._explain(error), "ms": round(ms, 3), **self._found()}

    def _found(self) -> Record:
        return {}

    def _greet(self, word: bytes) -> Iterator[int]:
        try:
            number = self.socket.connect_ex((self._target["addr"], self._target["port"]))
        except OverflowError as error:
            raise OSError(str(error)) from error
        if number == errno.EINPROGRESS:
            yield WRITE
            number = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            raise OSError(number, os.strerror(number))
        self._connected_ms = self._elapsed_ms()
        yield from write_all(self.socket, self._token + b" " + word + b"\n")
        yield from self._expect(ANSWER)

    def _expect(self, answer: bytes) -> Iterator[int]:
        line = yield from read_line(self.socket)
        if line != answer:
            raise EOFError

    def _explain(self, error: Optional[Exception]) -> Optional[str]:
        if error is None:
            return None
        if self._connected_ms is not None:
            # The connection was made: who then resets it, closes it or keeps silent is somebody else.
            return _WRONG
        if isinstance(error, TimeoutError) and error.errno is None:
            return "timed out"
        number = error.errno if isinstance(error, OSError) else None
        return str(error) if number is None else _ERRORS.get(number, os.strerror(number))

    def _elapsed_ms(self) -> float:
        return (time.monotonic() - self._began) * 1000


class Attempt(Call):
    """Connects, says the token, compares the answer; where `whole` is asked for, sends more than a packet holds."""

    def __init__(self, target: Record, token: str, timeout_s: float) -> None:
        self._answered = False
        self._path_mtu: Optional[int] = None
        super().__init__(target, token, timeout_s)

    def steps(self) -> Iterator[int]:
        """Greet; send a payload and hear that it came."""
        whole = bool(self._target.get("whole"))
        yield from self._greet(b"whole" if whole else b"hello")
        self._answered = True
        if whole:
            yield from write_all(self.socket, bytes(WHOLE_BYTES))
            yield from self._expect(ANSWER)
        with contextlib.suppress(OSError):
            self._path_mtu = self.socket.getsockopt(socket.IPPROTO_IP, _IP_MTU)

    def _found(self) -> Record:
        return {"path_mtu": self._path_mtu}

    def _explain(self, error: Optional[Exception]) -> Optional[str]:
        if isinstance(error, TimeoutError) and self._answered:
            return "large packets lost"
        return super()._explain(error)


class Stream(Call):
    """Sends for a moment; the door tells what arrived after the beginning."""

    def __init__(self, target: Record, token: str, timeout_s: float) -> None:
        self._arrived: Record = {"size_bytes": None, "time_s": None}
        super().__init__(target, token, timeout_s)

    def steps(self) -> Iterator[int]:
        """Greet; send for the time that was asked for; hear how much arrived in which time."""
        yield from self._greet(b"stream")
        # Little is kept waiting in the kernel, so that the stream ends soon after its time.
        self.socket.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, len(_CHUNK))
        end = time.monotonic() + STREAM_SKIP_S + float(self._target["seconds"])
        while time.monotonic() < end:
            yield WRITE
            with contextlib.suppress(BlockingIOError):
                self.socket.send(_CHUNK)
        self.socket.shutdown(socket.SHUT_WR)
        line = yield from read_line(self.socket)
        answer = json.loads(line)
        self._arrived = {name: answer[name] for name in self._arrived}

    def _found(self) -> Record:
        return self._arrived


class Ping(Call):
    """Sends a small message to and fro, one after the other, and times each; what both agents take is part of it."""

    def __init__(self, target: Record, token: str, timeout_s: float) -> None:
        self._greeted = False
        self._times_us: list[float] = []
        super().__init__(target, token, timeout_s)

    def steps(self) -> Iterator[int]:
        """Greet; as many round trips as were asked for, at most 100."""
        yield from self._greet(b"ping")
        self._greeted = True
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        count = min(int(self._target["count"]), _MAX_PINGS)
        for number in range(-_WARM_PINGS, count):
            message = os.urandom(PING_BYTES)
            began_ns = time.perf_counter_ns()
            yield from write_all(self.socket, message)
            yield from self._hear(message)
            if number >= 0:
                self._times_us.append((time.perf_counter_ns() - began_ns) / _NS_PER_US)

    def _hear(self, message: bytes) -> Iterator[int]:
        heard = b""
        while len(heard) < len(message):
            yield READ
            data = self.socket.recv(len(message) - len(heard))
            if not data:
                raise ConnectionAbortedError
            heard += data
        if heard != message:
            raise EOFError

    def _found(self) -> Record:
        return {"times_us": self._times_us}

    def _explain(self, error: Optional[Exception]) -> Optional[str]:
        if self._greeted and isinstance(error, OSError):
            return "stopped answering"
        return super()._explain(error)
