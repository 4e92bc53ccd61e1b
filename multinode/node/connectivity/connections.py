"""The verb `connectivity`: opens ports for a moment, and connects to ports of other nodes.

A caller must know the token. It can then test large packets, a short stream, or round trips.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from typing import Optional, Union

from ..channel import Channel, Record
from ..facts.network import address_family, find_port_users, read_port_range

_READ = selectors.EVENT_READ
_WRITE = selectors.EVENT_WRITE
_MAX_LINE_BYTES = 200
# Answer to a caller that knows the token.
_ANSWER = b"multinode\n"
# Size of the payload after the word `whole`: more than fits into one packet of any NIC.
_WHOLE_BYTES = 1 << 16
# Size of a message after the word `ping`.
_PING_BYTES = 8
# The beginning of a stream is not measured: TCP starts slowly, and buffers are empty.
_STREAM_SKIP_S = 0.1

_TOKEN_S = 2.0
_CALL_S = 30.0
_BACKLOG = 128
_CHUNK_BYTES = 1 << 18
_TRIES = 20
# Linger for 0 s: a connection that the caller has not closed is reset, so the port has no TIME_WAIT.
_RESET = struct.pack("ii", 1, 0)
_ERRORS = {
    errno.ECONNREFUSED: "refused",
    errno.ETIMEDOUT: "timed out",
    errno.EHOSTUNREACH: "no route",
    errno.ENETUNREACH: "no route",
}
_WRONG = "wrong answer"
# IP_MTU (linux/in.h) and IPV6_MTU (linux/in6.h).
_PATH_MTU = {socket.AF_INET: (socket.IPPROTO_IP, 14), socket.AF_INET6: (socket.IPPROTO_IPV6, 24)}
_TCP_NOTSENT_LOWAT = 25  # linux/tcp.h
_CHUNK = bytes(1 << 17)
_MAX_PINGS = 100
# The first round trips are not timed: they warm up caches and the congestion window.
_WARM_PINGS = 5
_NS_PER_US = 1000


class PeerConnection(ABC):
    """One connection, served by a generator that yields the event it waits for.

    Args:
        sock: becomes non-blocking, and is closed at the end.
        deadline: latest end, on the monotonic clock.
    """

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        sock.settimeout(0)
        self.socket = sock
        self.deadline = deadline
        self.awaited = 0
        self.turns = self.steps()

    @abstractmethod
    def steps(self) -> Iterator[int]:
        """Serve the connection; yields _READ or _WRITE to wait for the socket. Raises OSError, EOFError."""

    @abstractmethod
    def over(self, error: Optional[Exception]) -> None:
        """Called once at the end. The error is None after success, and TimeoutError after the deadline."""


class Connections:
    """Serves all connections of a verb in one thread, and watches its other inputs."""

    def __init__(self) -> None:
        self._selector = selectors.PollSelector()
        self._open: list[PeerConnection] = []

    def watch(self, source: Union[int, socket.socket], ready: Callable[[], None]) -> None:
        """Call `ready` whenever `source` is readable."""
        self._selector.register(source, _READ, ready)

    def begin(self, connection: PeerConnection) -> None:
        """Serve one more connection."""
        self._open.append(connection)
        self._advance(connection)

    def turn(self, timeout_s: float) -> None:
        """Wait for events, at most `timeout_s`, and handle them; end connections that have passed their deadlines."""
        for key, _ in self._selector.select(timeout_s):
            if not isinstance(key.data, PeerConnection):
                key.data()
            elif key.data in self._open:
                self._advance(key.data)
        now = time.monotonic()
        for connection in [connection for connection in self._open if now > connection.deadline]:
            self._end(connection, TimeoutError())

    def close(self) -> None:
        """End all connections."""
        for connection in list(self._open):
            self._end(connection, TimeoutError())
        self._selector.close()

    def _advance(self, connection: PeerConnection) -> None:
        try:
            awaited = next(connection.turns)
        except StopIteration:
            self._end(connection, None)
        except (OSError, EOFError) as error:
            self._end(connection, error)
        else:
            self._await(connection, awaited)

    def _await(self, connection: PeerConnection, awaited: int) -> None:
        if connection.awaited == 0:
            self._selector.register(connection.socket, awaited, connection)
        elif connection.awaited != awaited:
            self._selector.modify(connection.socket, awaited, connection)
        connection.awaited = awaited

    def _end(self, connection: PeerConnection, error: Optional[Exception]) -> None:
        self._open.remove(connection)
        if connection.awaited:
            self._selector.unregister(connection.socket)
        connection.over(error)
        with contextlib.suppress(OSError):
            connection.socket.close()


class ClientConnection(PeerConnection):
    """One connection to a listener; `result` is its record at the end.

    Args:
        target: `addr`, an IP address, and `port`.
        token: the listener's token.
        timeout_s: seconds that the connection may take.
    """

    def __init__(self, target: Record, token: str, timeout_s: float) -> None:
        self.result: Optional[Record] = None
        self._found: Record = {}
        self._target = target
        self._token = token.encode()
        self._began = time.monotonic()
        self._connected_ms: Optional[float] = None
        super().__init__(socket.socket(address_family(target["addr"]), socket.SOCK_STREAM), self._began + timeout_s)

    def over(self, error: Optional[Exception]) -> None:
        """Make the result."""
        ms = self._elapsed_ms() if self._connected_ms is None else self._connected_ms
        where = {"addr": self._target["addr"], "port": self._target["port"]}
        self.result = {**where, "error": self._explain(error), "ms": round(ms, 3), **self._found}

    def _greet(self, word: bytes) -> Iterator[int]:
        try:
            number = self.socket.connect_ex((self._target["addr"], self._target["port"]))
        except OverflowError as error:
            raise OSError(str(error)) from error
        if number == errno.EINPROGRESS:
            yield _WRITE
            number = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            raise OSError(number, os.strerror(number))
        self._connected_ms = self._elapsed_ms()
        yield from _write_all(self.socket, self._token + b" " + word + b"\n")
        yield from self._expect(_ANSWER)

    def _expect(self, answer: bytes) -> Iterator[int]:
        line = yield from _read_line(self.socket)
        if line != answer:
            raise EOFError

    def _explain(self, error: Optional[Exception]) -> Optional[str]:
        if error is None:
            return None
        if self._connected_ms is not None:
            # The connection was accepted, but not by our listener, which would have answered.
            return _WRONG
        if isinstance(error, TimeoutError) and error.errno is None:
            return "timed out"
        number = error.errno if isinstance(error, OSError) else None
        return str(error) if number is None else _ERRORS.get(number, os.strerror(number))

    def _elapsed_ms(self) -> float:
        return (time.monotonic() - self._began) * 1000


class ConnectionAttempt(ClientConnection):
    """Connects, sends the token, and compares the answer; with `whole`, also sends more than one packet."""

    _answered = False

    def steps(self) -> Iterator[int]:
        """Greet; with `whole`, send a payload and wait until the listener confirms it."""
        self._found = {"path_mtu": None}
        whole = bool(self._target.get("whole"))
        yield from self._greet(b"whole" if whole else b"hello")
        self._answered = True
        if whole:
            yield from _write_all(self.socket, bytes(_WHOLE_BYTES))
            yield from self._expect(_ANSWER)
        with contextlib.suppress(OSError):
            self._found["path_mtu"] = self.socket.getsockopt(*_PATH_MTU[self.socket.family])

    def _explain(self, error: Optional[Exception]) -> Optional[str]:
        if isinstance(error, TimeoutError) and self._answered:
            return "large packets lost"
        return super()._explain(error)


class TimedStream(ClientConnection):
    """Sends for a moment; the listener reports the bytes that arrived after the beginning."""

    def steps(self) -> Iterator[int]:
        """Greet; send for the requested time; read how many bytes arrived in which time."""
        self._found = {"size_bytes": None, "time_s": None}
        yield from self._greet(b"stream")
        # Keep the kernel's send queue short, so that the stream ends in time.
        self.socket.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, len(_CHUNK))
        end = time.monotonic() + _STREAM_SKIP_S + float(self._target["seconds"])
        while time.monotonic() < end:
            yield _WRITE
            with contextlib.suppress(BlockingIOError):
                self.socket.send(_CHUNK)
        self.socket.shutdown(socket.SHUT_WR)
        line = yield from _read_line(self.socket)
        answer = json.loads(line)
        self._found = {name: answer[name] for name in self._found}


class Ping(ClientConnection):
    """Times round trips of small messages, one after the other; the time of both agents is included."""

    _greeted = False

    def steps(self) -> Iterator[int]:
        """Greet; make the requested number of round trips, at most 100."""
        times_us: list[float] = []
        self._found = {"times_us": times_us}
        yield from self._greet(b"ping")
        self._greeted = True
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        count = min(int(self._target["count"]), _MAX_PINGS)
        for number in range(-_WARM_PINGS, count):
            message = os.urandom(_PING_BYTES)
            began_ns = time.perf_counter_ns()
            yield from _write_all(self.socket, message)
            yield from self._hear(message)
            if number >= 0:
                times_us.append((time.perf_counter_ns() - began_ns) / _NS_PER_US)

    def _hear(self, message: bytes) -> Iterator[int]:
        heard = b""
        while len(heard) < len(message):
            yield _READ
            data = self.socket.recv(len(message) - len(heard))
            if not data:
                raise ConnectionAbortedError
            heard += data
        if heard != message:
            raise EOFError

    def _explain(self, error: Optional[Exception]) -> Optional[str]:
        if self._greeted and isinstance(error, OSError):
            return "stopped answering"
        return super()._explain(error)


class Listener:
    """Listens on ports of one address.

    Args:
        connections: serves the callers.
        token: the token that callers must know.
        addr: IP address.
    """

    def __init__(self, connections: Connections, token: str, addr: str) -> None:
        self._connections = connections
        self._token = token.encode()
        self._addr = addr
        self._sockets: list[socket.socket] = []

    def open(self, port: int) -> Optional[str]:
        """Open one port; returns the reason if that fails."""
        opened = listen(self._addr, port)
        if isinstance(opened, str):
            return opened
        self._sockets.append(opened)
        self._connections.watch(opened, lambda: self._accept(opened))
        return None

    def open_ephemeral(self, count: int) -> list[int]:
        """Open free ports, spread over the range of ephemeral ports; returns them."""
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
        for opened in self._sockets:
            opened.close()

    def _accept(self, opened: socket.socket) -> None:
        # The caller may already have closed it.
        with contextlib.suppress(OSError):
            accepted, _ = opened.accept()
            self._connections.begin(_Caller(accepted, self._token))


class _Caller(PeerConnection):
    """Reads `TOKEN WORD`, answers, and does what the word says. A caller with a wrong token gets no answer."""

    def __init__(self, accepted: socket.socket, token: bytes) -> None:
        self._token = token
        super().__init__(accepted, time.monotonic() + _TOKEN_S)

    def steps(self) -> Iterator[int]:
        greeting = yield from _read_line(self.socket)
        token, _, word = greeting.rstrip(b"\n").partition(b" ")
        if token != self._token:
            return
        self.deadline = time.monotonic() + _CALL_S
        yield from _write_all(self.socket, _ANSWER)
        if word == b"whole":
            yield from self._hear_whole()
        elif word == b"stream":
            yield from self._hear_stream()
        elif word == b"ping":
            yield from self._hear_pings()
        # Let the caller close first, so that TIME_WAIT is not on our port.
        while True:
            yield _READ
            if not self.socket.recv(1):
                return

    def over(self, error: Optional[Exception]) -> None:  # noqa: ARG002 - whatever it was, the caller is sent away
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    def _hear_whole(self) -> Iterator[int]:
        left = _WHOLE_BYTES
        while left:
            yield _READ
            data = self.socket.recv(min(left, _CHUNK_BYTES))
            if not data:
                raise EOFError
            left -= len(data)
        yield from _write_all(self.socket, _ANSWER)

    def _hear_pings(self) -> Iterator[int]:
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            yield _READ
            data = self.socket.recv(_PING_BYTES)
            if not data:
                return
            yield from _write_all(self.socket, data)

    def _hear_stream(self) -> Iterator[int]:
        buffer = bytearray(_CHUNK_BYTES)
        size_bytes, began, first, last = 0, 0.0, 0.0, 0.0
        while True:
            yield _READ
            count = self.socket.recv_into(buffer)
            if not count:
                break
            last = time.monotonic()
            began = began or last
            if first:
                size_bytes += count
            elif last - began >= _STREAM_SKIP_S:
                # These bytes arrived before `last`, so they do not count: they only start the clock.
                first = last
        answer = json.dumps({"size_bytes": size_bytes, "time_s": last - first if first else 0.0}).encode() + b"\n"
        yield from _write_all(self.socket, answer)


def listen(addr: str, port: int) -> Union[socket.socket, str]:
    """A non-blocking listening socket; the reason if that fails."""
    opened = socket.socket(address_family(addr), socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.settimeout(0)
        opened.bind((addr, port))
        opened.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        opened.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            return f"in use by {find_port_users([port])[port]}"
        return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    return opened


def _read_line(sock: socket.socket) -> Generator[int, None, bytes]:
    """Read one line, byte by byte to leave everything after it; the generator returns the line."""
    line = b""
    while not line.endswith(b"\n"):
        yield _READ
        with contextlib.suppress(BlockingIOError):
            # Single bytes are fast enough: a connection has few lines, and they are short.
            while not line.endswith(b"\n"):
                byte = sock.recv(1)
                line += byte
                if not byte or len(line) > _MAX_LINE_BYTES:
                    raise EOFError
    return line


def _write_all(sock: socket.socket, data: bytes) -> Iterator[int]:
    """Write all data; waits only if the kernel's buffer is full."""
    rest = memoryview(data)
    while rest:
        with contextlib.suppress(BlockingIOError):
            rest = rest[sock.send(rest) :]
        if rest:
            yield _WRITE


_POLL_S = 0.2
_STDIN = 0
_CALLS: dict[str, Callable[[Record, str, float], ClientConnection]] = {
    "attempts": ConnectionAttempt,
    "streams": TimedStream,
}


def run(request: Record, channel: Channel) -> None:
    """The verb `connectivity`: emits `listening`, then `attempts` or `streams` for each order, then `ended`."""
    connections = Connections()
    listener = Listener(connections, request["token"], request["addr"])
    failed = {port: why for port in request["ports"] for why in [listener.open(port)] if why is not None}
    ports = [port for port in request["ports"] if port not in failed]
    ports += listener.open_ephemeral(int(request.get("ephemeral", 0)))
    channel.emit({"kind": "listening", "ports": ports, "failed": {str(port): why for port, why in failed.items()}})
    try:
        _Orders(connections, channel, request["token"]).serve(time.monotonic() + float(request["deadline_s"]))
    finally:
        listener.close()
        connections.close()
    channel.emit({"kind": "ended"})


class _Orders:
    """Executes the controller's orders to connect."""

    def __init__(self, connections: Connections, channel: Channel, token: str) -> None:
        self._connections = connections
        self._channel = channel
        self._token = token
        self._pending: list[tuple[str, list[ClientConnection]]] = []
        self._over = False

    def serve(self, deadline: float) -> None:
        """Serve until the controller orders the end, stdin ends, or the monotonic clock passes `deadline`."""
        self._connections.watch(_STDIN, self._read)
        while not self._over and not self._channel.closed and time.monotonic() < deadline:
            self._connections.turn(_POLL_S)
            self._answer()

    def _read(self) -> None:
        for line in self._channel.lines(0):
            order = json.loads(line)
            if order.get("end"):
                self._over = True
            for kind in _CALLS:
                if kind in order:
                    self._begin(kind, order)

    def _begin(self, kind: str, order: Record) -> None:
        timeout_s = float(order["timeout_s"])
        calls: list[ClientConnection] = [_CALLS[kind](target, self._token, timeout_s) for target in order[kind]]
        self._pending.append((kind, calls))
        for call in calls:
            self._connections.begin(call)

    def _answer(self) -> None:
        for kind, calls in [
            pending for pending in self._pending if all(call.result is not None for call in pending[1])
        ]:
            self._pending.remove((kind, calls))
            self._channel.emit({"kind": kind, "results": [call.result for call in calls]})
