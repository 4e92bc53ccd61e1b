"""A TLS connection between two agents that carries frames both ways. Both ends use the certificate of this copy.

A listener accepts one caller: the first with the certificate and the token. Other callers are disconnected.
"""

from __future__ import annotations

import contextlib
import hmac
import queue
import select
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from typing import NamedTuple, Union

from ..channel import AgentError
from ..connectivity.connections import listen
from ..run.job import open_unnamed

# The longest time that a peer may be silent, and that data may stay unacknowledged.
IDLE_S = 60.0
# Seconds between pings of a peer that has nothing else to send.
PING_S = 5.0
_CONNECT_S = 15.0
_GREETING_S = 10.0
_MOST_CALLERS = 16
_WAKE_BYTES = 1 << 18
_ANSWER = b"multinode\n"
_HEAD = struct.Struct(">BQ")
_MS_PER_S = 1000
_TCP_USER_TIMEOUT = 18  # linux/tcp.h
_KEEP_ALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 6}

MANIFEST, DIGESTS, HAVE, BLOCK, DONE, COPIED, _PING = range(1, 8)
"""Kinds of frames: the list of files; digests of blocks; blocks that a receiver has; one block; no more blocks; all
files have been verified and put in place; a ping without content."""


class PeerError(Exception):
    """A peer cannot be reached, is gone, or sent something unexpected."""


class Credentials(NamedTuple):
    """Secrets that both ends of this copy share: certificate and key in PEM, and the token."""

    certificate: str
    key: str
    token: str


class Wire:
    """One connection. Only one thread uses it.

    Args:
        sock: authenticated.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        sock.settimeout(IDLE_S)
        for option, value in {**_KEEP_ALIVE, _TCP_USER_TIMEOUT: int(IDLE_S * _MS_PER_S), socket.TCP_NODELAY: 1}.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket = sock

    def send(self, kind: int, *parts: Union[bytes, bytearray, memoryview]) -> None:
        """Send one frame."""
        with _as_peer_error():
            *first, last = parts or (b"",)
            self._socket.sendall(b"".join([_HEAD.pack(kind, sum(map(len, parts))), *first]))
            self._socket.sendall(last)

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
            raise PeerError("it sent something else than was asked for")
        return kind, size_bytes

    def read(self, kind: int, *, most_bytes: int) -> bytes:
        """Content of the next frame, which must be of this kind."""
        _, size_bytes = self.receive(kind, most_bytes=most_bytes)
        data = bytearray(size_bytes)
        self.read_into(memoryview(data))
        return bytes(data)

    def await_frame(self) -> None:
        """Wait for a frame of a slow peer, and send pings meanwhile."""
        readable = select.poll()
        readable.register(self._socket, select.POLLIN)
        while not self._socket.pending() and not readable.poll(PING_S * _MS_PER_S):
            self.ping()

    def read_into(self, view: memoryview) -> None:
        """Read until the view is full."""
        with _as_peer_error():
            if len(view) > 2 * _WAKE_BYTES:
                # Many more bytes will come: waking up less often saves processor time.
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _WAKE_BYTES)
                try:
                    view = self._fill(view, 2 * _WAKE_BYTES)
                finally:
                    self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            self._fill(view, 0)

    def _fill(self, view: memoryview, until: int) -> memoryview:
        """Read until at most `until` bytes of the view are left; returns the part that is left."""
        while len(view) > until:
            count = self._socket.recv_into(view)
            if not count:
                raise EOFError
            view = view[count:]
        return view

    def close(self) -> None:
        """End the connection."""
        self._socket.close()


@contextlib.contextmanager
def _as_peer_error() -> Iterator[None]:
    try:
        yield
    except EOFError:
        raise PeerError("it closed the connection") from None
    except socket.timeout:
        raise PeerError(f"it was silent for {IDLE_S:.0f} s") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise PeerError(reason or str(error)) from error


class OpenPort:
    """A listening port on one address, open until the peer has called.

    Raises:
        AgentError: the port cannot be opened.
    """

    def __init__(self, addr: str) -> None:
        opened = listen(addr, 0)
        if isinstance(opened, str):
            raise AgentError(f"no port of {addr} can be opened: {opened}")
        opened.settimeout(None)
        self._socket = opened
        self.port: int = opened.getsockname()[1]

    def accept(self, credentials: Credentials) -> Wire:
        """Wait for the peer, and close the port.

        Raises:
            PeerError: the peer did not call in time.
        """
        heard: queue.Queue[ssl.SSLSocket] = queue.Queue()
        context = _make_context(credentials, ssl.PROTOCOL_TLS_SERVER)
        threading.Thread(target=self._serve, args=(context, credentials, heard), daemon=True).start()
        try:
            return Wire(heard.get(timeout=IDLE_S))
        except queue.Empty:
            raise PeerError(f"it did not call within {IDLE_S:.0f} s") from None
        finally:
            self.close()

    def close(self) -> None:
        """Close the port, which also ends a wait in `accept`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self, context: ssl.SSLContext, credentials: Credentials, heard: queue.Queue[ssl.SSLSocket]) -> None:
        places = threading.Semaphore(_MOST_CALLERS)

        def hear(accepted: socket.socket) -> None:
            accepted.settimeout(_GREETING_S)
            # A stranger's errors only end its own connection.
            with contextlib.suppress(OSError, EOFError, ValueError), contextlib.ExitStack() as closing:
                closing.enter_context(accepted)
                sock = closing.enter_context(context.wrap_socket(accepted, server_side=True))
                _check_certificate(sock, credentials)
                if hmac.compare_digest(_read(sock, len(credentials.token)), credentials.token.encode()):
                    sock.sendall(_ANSWER)
                    closing.pop_all()
                    heard.put(sock)
            places.release()

        with contextlib.suppress(OSError):
            while True:
                accepted, _ = self._socket.accept()
                if places.acquire(blocking=False):
                    threading.Thread(target=hear, args=(accepted,), daemon=True).start()
                else:
                    accepted.close()


def call(addr: str, port: int, source: str, credentials: Credentials) -> Wire:
    """Connect to a listener, from our own address `source`.

    Raises:
        PeerError: the listener cannot be reached, or is not part of this copy.
    """
    context = _make_context(credentials, ssl.PROTOCOL_TLS_CLIENT)
    try:
        plain = socket.create_connection((addr, port), _CONNECT_S, (source, 0))
    except OSError as error:
        raise PeerError(f"{addr} port {port}: {error.strerror or error}") from error
    with _as_peer_error(), contextlib.ExitStack() as closing:
        closing.enter_context(plain)
        sock = closing.enter_context(context.wrap_socket(plain))
        _check_certificate(sock, credentials)
        sock.sendall(credentials.token.encode())
        if _read(sock, len(_ANSWER)) != _ANSWER:
            raise EOFError
        closing.pop_all()
    return Wire(sock)


def _read(sock: ssl.SSLSocket, size_bytes: int) -> bytes:
    data = b""
    while len(data) < size_bytes:
        part = sock.recv(size_bytes - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _check_certificate(sock: ssl.SSLSocket, credentials: Credentials) -> None:
    if sock.getpeercert(binary_form=True) != ssl.PEM_cert_to_DER_cert(credentials.certificate):
        raise EOFError


def _make_context(credentials: Credentials, protocol: int) -> ssl.SSLContext:
    """A context for TLS 1.3 in which each end uses, and only trusts, the certificate of this copy."""
    if not ssl.HAS_TLSv1_3:
        raise AgentError("its python3 has no TLS 1.3", hint="python= in the hostfile names another interpreter")
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=credentials.certificate)
    # Python can only load a key from a file.
    with open(open_unnamed(), "wb", buffering=0) as file:
        file.write((credentials.key + credentials.certificate).encode())
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context
