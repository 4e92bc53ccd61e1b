"""The TLS connection between two agents of a copy. Both ends use the certificate of this copy.

A listener accepts one caller: the first with the certificate and the token. Other callers are disconnected.
"""

from __future__ import annotations

import contextlib
import hmac
import queue
import select
import socket
import ssl
import threading
from typing import NamedTuple

from ..channel import AgentError
from ..connectivity.connections import listen
from ..run.job import open_unnamed
from .wire import IDLE_S, PING_S, PeerError, Wire, as_peer_error

_CONNECT_S = 15.0
_GREETING_S = 10.0
_MOST_CALLERS = 16
_WAKE_BYTES = 1 << 18
_ANSWER = b"multinode\n"
_MS_PER_S = 1000
_TCP_USER_TIMEOUT = 18  # linux/tcp.h
# By name: the controller's machine, which imports this, may lack one.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6}


class Credentials(NamedTuple):
    """Secrets that both ends of this copy share: certificate and key in PEM, and the token."""

    certificate: str
    key: str
    token: str


class TlsWire(Wire):
    """Frames over TLS.

    Args:
        sock: authenticated.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        super().__init__(sock)
        sock.settimeout(IDLE_S)
        alive = {getattr(socket, name): value for name, value in _KEEP_ALIVE.items()}
        for option, value in {**alive, _TCP_USER_TIMEOUT: int(IDLE_S * _MS_PER_S), socket.TCP_NODELAY: 1}.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket = sock

    def await_frame(self) -> None:
        """Wait for a frame of a slow peer, and send pings meanwhile."""
        readable = select.poll()
        readable.register(self._socket, select.POLLIN)
        while not self._socket.pending() and not readable.poll(PING_S * _MS_PER_S):
            self.ping()

    def read_into(self, view: memoryview) -> None:
        """Read until the view is full."""
        with as_peer_error():
            if len(view) > 2 * _WAKE_BYTES:
                # Many more bytes will come: waking up less often saves processor time.
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _WAKE_BYTES)
                try:
                    view = self.fill(view, 2 * _WAKE_BYTES)
                finally:
                    self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            self.fill(view, 0)


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
            return TlsWire(heard.get(timeout=IDLE_S))
        except queue.Empty:
            raise PeerError(f"it did not connect within {IDLE_S:.0f} s") from None
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
    with as_peer_error(), contextlib.ExitStack() as closing:
        closing.enter_context(plain)
        sock = closing.enter_context(context.wrap_socket(plain))
        _check_certificate(sock, credentials)
        sock.sendall(credentials.token.encode())
        if _read(sock, len(_ANSWER)) != _ANSWER:
            raise EOFError
        closing.pop_all()
    return TlsWire(sock)


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
        raise AgentError("its python3 has no TLS 1.3", hint="name another interpreter in the hostfile: python=")
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
