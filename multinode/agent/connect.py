"""The verb `connect`: tries TCP connections to our listeners on other nodes, all at once, and tells how each went."""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from typing import NamedTuple, Optional

from .channel import Channel, Record

__all__ = ["ANSWER", "run"]

ANSWER = b"multinode\n"
"""What a listener of ours says to who knows its token."""

_ERRORS = {
    errno.ECONNREFUSED: "refused",
    errno.ETIMEDOUT: "timed out",
    errno.EHOSTUNREACH: "no route",
    errno.ENETUNREACH: "no route",
}
_WRONG = "wrong answer"


def run(request: Record, channel: Channel) -> None:
    """One record `connected` with a result for each target, in the order of the request."""
    attempts = [Attempt(target["addr"], target["port"], request["token"]) for target in request["targets"]]
    deadline = time.monotonic() + float(request["timeout_s"])
    while True:
        open_attempts = [attempt for attempt in attempts if attempt.result is None]
        left_s = deadline - time.monotonic()
        if not open_attempts or left_s <= 0:
            break
        poll = select.poll()
        for attempt in open_attempts:
            poll.register(attempt.socket, attempt.awaited)
        ready = {fd for fd, _ in poll.poll(left_s * 1000)}
        for attempt in open_attempts:
            if attempt.socket.fileno() in ready:
                attempt.advance()
    channel.emit({"kind": "connected", "results": [attempt.give_up() for attempt in attempts]})


class Result(NamedTuple):
    """How an attempt went; no error is success. `ms` is the time to the connection or to the failure."""

    error: Optional[str]
    ms: float


class Attempt:
    """One connection: connect, say the token, compare the answer.

    Args:
        addr: IPv4 address of the listener.
        port: its port.
        token: what it wants to hear.

    Attributes:
        result: None while it goes on.
        socket: to be polled.
        awaited: for these events.
    """

    def __init__(self, addr: str, port: int, token: str) -> None:
        self.result: Optional[Result] = None
        self.awaited = select.POLLOUT
        self._target: Record = {"addr": addr, "port": port}
        self._token = token.encode() + b"\n"
        self._answer = b""
        self._started = time.monotonic()
        self._connected_ms: Optional[float] = None
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.socket.settimeout(0)
        try:
            number = self.socket.connect_ex((addr, port))
        except (OSError, OverflowError) as error:
            self._end(str(error))
            return
        if number not in (0, errno.EINPROGRESS):
            self._end(_explain(number))

    def advance(self) -> None:
        """Go on, after one of the awaited events."""
        try:
            if self._connected_ms is None:
                self._say_token()
            else:
                self._hear_answer()
        except OSError as error:
            # Who resets a connection that was made is somebody else.
            self._end(_WRONG if self._connected_ms is not None else _explain(error.errno))

    def give_up(self) -> Record:
        """The result, as a record; an attempt that still goes on has timed out."""
        if self.result is None:
            self._end("timed out" if self._connected_ms is None else _WRONG)
        result = self.result or Result("timed out", 0.0)
        return {**self._target, "ok": result.error is None, "error": result.error, "ms": round(result.ms, 3)}

    def _say_token(self) -> None:
        number = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            self._end(_explain(number))
            return
        self._connected_ms = self._elapsed_ms()
        # A fresh connection has room for a line.
        self.socket.send(self._token)
        self.awaited = select.POLLIN

    def _hear_answer(self) -> None:
        data = self.socket.recv(len(ANSWER))
        self._answer += data
        if self._answer == ANSWER:
            self._end(None)
        elif not data or not ANSWER.startswith(self._answer):
            self._end(_WRONG)

    def _end(self, error: Optional[str]) -> None:
        self.socket.close()
        self.result = Result(error, self._connected_ms or self._elapsed_ms())

    def _elapsed_ms(self) -> float:
        return (time.monotonic() - self._started) * 1000


def _explain(number: Optional[int]) -> str:
    if number is None:
        return "unknown error"
    return _ERRORS.get(number, os.strerror(number))
