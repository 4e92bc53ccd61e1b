"""The door: ports that are open for a moment, and what is said to callers who know the token."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from typing import Optional, Union

from ..facts.network import read_port_range
from ..facts.sockets import find_port_users
from .talks import READ, Talk, Talks, read_line, write_all

__all__ = ["ANSWER", "PING_BYTES", "STREAM_SKIP_S", "WHOLE_BYTES", "Door"]

ANSWER = b"multinode\n"
"""What is said to who knows the token."""
WHOLE_BYTES = 1 << 16
"""What the caller sends after the word `whole`: more than fits into one packet of any network card."""
PING_BYTES = 8
"""What goes to and fro after the word `ping`."""
STREAM_SKIP_S = 0.1
"""The beginning of a stream is not measured: slow start, and buffers that are still empty."""

_TOKEN_S = 2.0
_CALL_S = 30.0
_BACKLOG = 128
_CHUNK_BYTES = 1 << 18
_TRIES = 20
# Linger for 0 s: a connection that the caller has not closed is reset, and leaves nothing behind on the port.
_RESET = struct.pack("ii", 1, 0)


class Door:
    """Listens on ports of one address.

    Args:
        talks: where its callers are served.
        token: what they must know.
        addr: IPv4 address.
    """

    def __init__(self, talks: Talks, token: str, addr: str) -> None:
        self._talks = talks
        self._token = token.encode()
        self._addr = addr
        self._listeners: list[socket.socket] = []

    def open(self, port: int) -> Optional[str]:
        """Open one port; the reason where it cannot be."""
        opened = _listen(self._addr, port)
        if isinstance(opened, str):
            return opened
        self._listeners.append(opened)
        self._talks.watch(opened, lambda: self._accept(opened))
        return None

    def open_ephemeral(self, count: int) -> list[int]:
        """Open free ports, spread over the range from which the kernel takes those of outgoing connections."""
        first, last = read_port_range()
        size = (last - first + 1) // max(1, count)
        opened = []
        for part in range(count):
            for _ in range(_TRIES):
                port = first + part * size + int.from_bytes(os.urandom(4), "big") % max(1, size)
                if self.open(port) is None:
                    opened.append(port)
                    break
        return opened

    def close(self) -> None:
        """Close all ports."""
        for listener in self._listeners:
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        # It may have been closed again before we got to it.
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            self._talks.begin(_Caller(connection, self._token))


class _Caller(Talk):
    """Hears `TOKEN WORD`, answers, and does what the word says. Who does not know the token hears nothing."""

    def __init__(self, connection: socket.socket, token: bytes) -> None:
        self._token = token
        super().__init__(connection, time.monotonic() + _TOKEN_S)

    def steps(self) -> Iterator[int]:
        greeting = yield from read_line(self.socket)
        token, _, word = greeting.rstrip(b"\n").partition(b" ")
        if token != self._token:
            return
        self.deadline = time.monotonic() + _CALL_S
        yield from write_all(self.socket, ANSWER)
        if word == b"whole":
            yield from self._hear_whole()
        elif word == b"stream":
            yield from self._hear_stream()
        elif word == b"ping":
            yield from self._hear_pings()
        # Who was answered closes first: the port that waits out the connection (TIME_WAIT) is then not ours.
        while True:
            yield READ
            if not self.socket.recv(1):
                return

    def over(self, error: Optional[Exception]) -> None:  # noqa: ARG002 - whatever it was, the caller is sent away
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    def _hear_whole(self) -> Iterator[int]:
        left = WHOLE_BYTES
        while left:
            yield READ
            data = self.socket.recv(min(left, _CHUNK_BYTES))
            if not data:
                raise EOFError
            left -= len(data)
        yield from write_all(self.socket, ANSWER)

    def _hear_pings(self) -> Iterator[int]:
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            yield READ
            data = self.socket.recv(PING_BYTES)
            if not data:
                return
            yield from write_all(self.socket, data)

    def _hear_stream(self) -> Iterator[int]:
        buffer = bytearray(_CHUNK_BYTES)
        size_bytes, began, first, last = 0, 0.0, 0.0, 0.0
        while True:
            yield READ
            count = self.socket.recv_into(buffer)
            if not count:
                break
            last = time.monotonic()
            began = began or last
            if first:
                size_bytes += count
            elif last - began >= STREAM_SKIP_S:
                # What this reading brought had arrived before it: it only sets the time.
                first = last
        answer = json.dumps({"size_bytes": size_bytes, "time_s": last - first if first else 0.0}).encode() + b"\n"
        yield from write_all(self.socket, answer)


def _listen(addr: str, port: int) -> Union[socket.socket, str]:
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
