"""Frames of a copy, both ways, over a connection: TLS between two agents, or an agent's channel."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator
from typing import Protocol, Union

# The longest time that a peer may be silent, and that data may stay unacknowledged.
IDLE_S = 60.0
# Seconds between pings of a peer that has nothing else to send.
PING_S = 5.0
_PIECE_BYTES = 1 << 17
_HEAD = struct.Struct(">BQ")

Data = Union[bytes, bytearray, memoryview]

MANIFEST, DIGESTS, HAVE, BLOCK, DONE, COPIED, _PING = range(1, 8)
"""Kinds of frames: the list of files; digests of blocks; blocks that a receiver has; one block; no more blocks; all
files have been verified and put in place; a ping without content."""


class PeerError(Exception):
    """A peer cannot be reached, is gone, or sent something unexpected."""


class Connection(Protocol):
    """What a wire needs of a socket."""

    def sendall(self, data: Data) -> None:
        """Send all of it."""

    def recv_into(self, view: memoryview) -> int:
        """Receive at least a byte; returns how many, 0 at the end."""

    def close(self) -> None:
        """End it."""


class Pipe:
    """An agent's channel as a connection: bytes go in pieces, each a line of base64.

    Args:
        send: sends a piece.
        receive: waits for the next piece; an empty one is the end.
    """

    def __init__(self, send: Callable[[memoryview], None], receive: Callable[[], bytes]) -> None:
        self._send = send
        self._receive = receive
        self._rest = memoryview(b"")

    def sendall(self, data: Data) -> None:
        """Send all of it."""
        view = memoryview(data)
        for start in range(0, len(view), _PIECE_BYTES):
            self._send(view[start : start + _PIECE_BYTES])

    def recv_into(self, view: memoryview) -> int:
        """Receive at least a byte; returns how many, 0 at the end."""
        self._rest = self._rest or memoryview(self._receive())
        count = min(len(view), len(self._rest))
        view[:count], self._rest = self._rest[:count], self._rest[count:]
        return count

    def close(self) -> None:
        """Leave the channel to what comes next."""


class Wire:
    """Frames over one connection. Only one thread uses it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, kind: int, *parts: Data) -> None:
        """Send one frame."""
        with as_peer_error():
            *first, last = parts or (b"",)
            head = b"".join([_HEAD.pack(kind, sum(map(len, parts))), *first])
            if len(last) < _PIECE_BYTES:
                self._connection.sendall(head + last)
            else:
                self._connection.sendall(head)
                self._connection.sendall(last)

    def ping(self) -> None:
        """Send a ping, which keeps the connection from timing out."""
        self.send(_PING)

    def receive(self, *kinds: int, most_bytes: int) -> tuple[int, int]:
        """Kind and size of the next frame, which must be of one of these kinds; `read_into` reads its content.

        Raises:
            PeerError: the peer is gone, or sent another kind of frame or a larger one.
        """
        kind = _PING
        head = bytearray(_HEAD.size)
        while kind == _PING:
            self.read_into(memoryview(head))
            kind, size_bytes = _HEAD.unpack(head)
        if kind not in kinds or size_bytes > most_bytes:
            raise PeerError("it sent something other than what was requested")
        return kind, size_bytes

    def read(self, kind: int, *, most_bytes: int) -> bytes:
        """Content of the next frame, which must be of this kind."""
        _, size_bytes = self.receive(kind, most_bytes=most_bytes)
        data = bytearray(size_bytes)
        self.read_into(memoryview(data))
        return bytes(data)

    def await_frame(self) -> None:
        """Wait for a frame of a slow peer, and send pings meanwhile, without which a connection times out."""

    def read_into(self, view: memoryview) -> None:
        """Read until the view is full."""
        with as_peer_error():
            self.fill(view, 0)

    def fill(self, view: memoryview, until: int) -> memoryview:
        """Read until at most `until` bytes of the view are left; returns the part that is left."""
        while len(view) > until:
            count = self._connection.recv_into(view)
            if not count:
                raise EOFError
            view = view[count:]
        return view

    def close(self) -> None:
        """End the connection."""
        self._connection.close()


@contextlib.contextmanager
def as_peer_error() -> Iterator[None]:
    """Raise a connection's errors as those of a peer."""
    try:
        yield
    except EOFError:
        raise PeerError("it closed the connection") from None
    except (OSError, ValueError) as error:
        import socket

        if isinstance(error, socket.timeout):
            raise PeerError(f"it was silent for {IDLE_S:.0f} s") from None
        reason = error.strerror if isinstance(error, OSError) else None
        raise PeerError(reason or str(error)) from error
