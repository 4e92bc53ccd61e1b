"""The verb `listen`: opens ports for a moment, so that other nodes can prove that they reach them (verb `connect`)."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import struct
import time
from typing import Union

from .channel import Channel, Record
from .connect import ANSWER
from .ports import find_port_users

__all__ = ["run"]

_TOKEN_S = 2.0
_POLL_S = 0.2
_BACKLOG = 128
_STDIN = 0
# Linger for 0 s: a connection that the caller has not closed is reset, and leaves nothing behind on the port.
_RESET = struct.pack("ii", 1, 0)


def run(request: Record, channel: Channel) -> None:
    """One record `listening`, then answers until stdin ends or the deadline passes."""
    deadline = time.monotonic() + float(request["deadline_s"])
    listeners: list[socket.socket] = []
    failed: dict[int, str] = {}
    for port in request["ports"]:
        opened = _open(request["addr"], port)
        if isinstance(opened, str):
            failed[port] = opened
        else:
            listeners.append(opened)
    ports = [port for port in request["ports"] if port not in failed]
    channel.emit({"kind": "listening", "ports": ports, "failed": {str(port): why for port, why in failed.items()}})
    with selectors.PollSelector() as selector:
        for listener in listeners:
            selector.register(listener, selectors.EVENT_READ)
        _Door(selector, request["token"]).serve(channel, deadline)
    for listener in listeners:
        listener.close()


class _Caller:
    """A connection that has yet to say the token."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.said = b""
        self.answered = False
        self.deadline = time.monotonic() + _TOKEN_S


class _Door:
    """Accepts, hears the token, answers, closes."""

    def __init__(self, selector: selectors.BaseSelector, token: str) -> None:
        self._selector = selector
        self._password = token.encode() + b"\n"
        self._callers: dict[socket.socket, _Caller] = {}

    def serve(self, channel: Channel, deadline: float) -> None:
        """Until stdin ends or `deadline`, on the monotonic clock, has passed."""
        self._selector.register(_STDIN, selectors.EVENT_READ)
        while not channel.closed and time.monotonic() < deadline:
            for key, _ in self._selector.select(_POLL_S):
                self._advance(key.fileobj, channel)
            for caller in [caller for caller in self._callers.values() if time.monotonic() > caller.deadline]:
                self._hang_up(caller)
        for caller in list(self._callers.values()):
            self._hang_up(caller)

    def _advance(self, source: Union[int, object], channel: Channel) -> None:
        if not isinstance(source, socket.socket):
            channel.lines(0)
        elif source in self._callers:
            self._hear(self._callers[source])
        else:
            self._accept(source)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            # It was closed again before we got to it.
            return
        connection.settimeout(0)
        self._callers[connection] = _Caller(connection)
        self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, caller: _Caller) -> None:
        try:
            data = caller.connection.recv(len(self._password))
            caller.said += data
            if caller.said == self._password and not caller.answered:
                caller.answered = True
                caller.connection.send(ANSWER)
        except OSError:
            data = b""
        # Who was answered closes first: the port that waits out the connection (TIME_WAIT) is then not ours.
        if not data or (not caller.answered and len(caller.said) >= len(self._password)):
            self._hang_up(caller)

    def _hang_up(self, caller: _Caller) -> None:
        self._selector.unregister(caller.connection)
        del self._callers[caller.connection]
        caller.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        caller.connection.close()


def _open(addr: str, port: int) -> Union[socket.socket, str]:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.settimeout(0)
        listener.bind((addr, port))
        listener.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            return f"in use by {find_port_users([port])[port]}"
        return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    return listener
