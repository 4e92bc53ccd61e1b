"""SSH through Fabric: one connection a node, channels multiplexed on it, a deadline on every wait.

Host keys are always verified: an unknown or changed key is an error that prints the command which fixes it.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Sequence

import fabric
import paramiko

from multinode.core.cluster.cluster import Node
from multinode.errors import ContactLost
from multinode.transport.base import BufferedStream, Transport, time_left
from multinode.transport.connection import (
    BROKEN,
    KEEPALIVE_S,
    close_connection,
    closing_at,
    make_connection,
    open_connection,
)
from multinode.transport.fan_out import fan_out
from multinode.transport.refusals import MAX_SESSIONS, TIMED_OUT

__all__ = ["SshStream", "SshTransport"]

_CHUNK_BYTES = 1 << 16
_DRAIN_EVERY_S = 0.5
# For the few bytes which say that no more follows.
_CLOSE_S = 2.0
# sshd begins to drop logins when 10 of them are under way (MaxStartups 10:30:100); others may log in to a gateway, too.
_LOGINS_BY_GATEWAY = 8
# For what is to end at once: a timeout of nothing would be none.
_LEAST_S = 0.01


class SshTransport(Transport):
    """Runs commands on nodes over SSH. Connections are opened at first use and kept.

    Args:
        connect_timeout_s: the longest wait for a TCP connection, and again for the handshake and the authentication;
            again for each jump host.
    """

    def __init__(self, *, connect_timeout_s: float = 10.0) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._lock = threading.Lock()
        self._connections: dict[str, fabric.Connection] = {}
        self._opening: dict[str, threading.RLock] = {}
        self._failed: dict[str, Exception] = {}
        self._is_closed = False
        # Logins under way: all of them, and those that pass one jump host, which is one sshd.
        self._logins = threading.Semaphore(fan_out())
        self._by_gateway: dict[str, threading.Semaphore] = {}

    def open_early(self, nodes: Sequence[Node]) -> None:
        """Begin to open the connections to these nodes in the background; what goes wrong is told at the first use."""
        for node in nodes[: fan_out()]:
            threading.Thread(target=self._open_early, args=(node,), name=f"open-{node.name}", daemon=True).start()

    def open(self, node: Node, command: str, *, deadline_s: float) -> SshStream:
        """Start a command and talk to it. See `Transport.open`."""
        end = time.monotonic() + deadline_s
        connection = self._connect(node, end)
        transport = connection.transport
        try:
            with closing_at(end, lambda: transport) as passed:
                channel = transport.open_session(timeout=time_left(end, _LEAST_S))
                channel.settimeout(deadline_s)
                channel.exec_command(command)
        except paramiko.ChannelException as error:
            # The connection itself is well, and others talk over it.
            raise MAX_SESSIONS.error(node) from error
        except BROKEN as error:
            self._forget(node)
            late = passed.is_set() or "Timeout" in str(error)
            reason = "sshd did not answer in time" if late else error or type(error).__name__
            raise ContactLost(f"the SSH connection failed: {reason}", node=node.name) from error
        return SshStream(channel, node.name, send_deadline_s=deadline_s)

    def close(self) -> None:
        """Close every connection, also those that are being opened early."""
        with self._lock:
            self._is_closed = True
            connections = list(self._connections.values())
            self._connections.clear()
        for connection in connections:
            close_connection(connection)

    def _open_early(self, node: Node) -> None:
        with self._opening_lock(node):
            try:
                self._connect(node, math.inf)
            except Exception as error:  # noqa: BLE001 - a defect, too, is raised at the first use
                self._failed[node.name] = error

    def _opening_lock(self, node: Node) -> threading.RLock:
        with self._lock:
            return self._opening.setdefault(node.name, threading.RLock())

    def _connect(self, node: Node, end: float) -> fabric.Connection:
        """The open connection, or a new one by `end` on the monotonic clock; whoever else opens it is waited for."""
        with _held(self._opening_lock(node), node, end):
            if node.name in self._failed:
                raise self._failed.pop(node.name)
            connection = self._connections.get(node.name)
            if connection is not None and connection.is_connected:
                return connection
            stage_s = min(self._connect_timeout_s, time_left(end, _LEAST_S))
            connection = make_connection(node, connect_timeout_s=stage_s)
            with contextlib.ExitStack() as places:
                for one in (*self._gateway_places(connection), self._logins):
                    places.enter_context(_held(one, node, end))
                open_connection(connection, node, connect_timeout_s=stage_s, end=end)
            connection.transport.set_keepalive(KEEPALIVE_S)
            with self._lock:
                if not self._is_closed:
                    self._connections[node.name] = connection
                    return connection
            close_connection(connection)
            raise ContactLost("the connection was closed while it was opened", node=node.name)

    def _gateway_places(self, connection: fabric.Connection) -> Sequence[threading.Semaphore]:
        """A place among the logins that pass the same jump host; a ProxyCommand does not say which one it passes."""
        gateway = connection.gateway
        if not gateway:
            return ()
        name = f"{gateway.host}:{gateway.port}" if isinstance(gateway, fabric.Connection) else "ProxyCommand"
        with self._lock:
            return (self._by_gateway.setdefault(name, threading.Semaphore(_LOGINS_BY_GATEWAY)),)

    def _forget(self, node: Node) -> None:
        with self._lock:
            connection = self._connections.pop(node.name, None)
        if connection is not None:
            close_connection(connection)


@contextlib.contextmanager
def _held(lock: threading.RLock | threading.Semaphore, node: Node, end: float) -> Iterator[None]:
    """Hold it, once others let go of it.

    Raises:
        NodeError: they did not by `end`.
    """
    if not lock.acquire(timeout=min(time_left(end), threading.TIMEOUT_MAX)):
        raise TIMED_OUT.error(node, where=node.name)
    try:
        yield
    finally:
        lock.release()


class SshStream(BufferedStream):
    """A remote command that is running, on a channel of its own. See `Stream`.

    Args:
        channel: the command's.
        node: the node's name, for messages.
        send_deadline_s: how long what is sent to it may be left unread.
    """

    def __init__(self, channel: paramiko.Channel, node: str, *, send_deadline_s: float) -> None:
        super().__init__(node, send_deadline_s=send_deadline_s)
        self._channel = channel

    def send(self, data: bytes) -> None:
        """Write to its standard input. See `Stream.send`."""
        end = time.monotonic() + self._send_deadline_s
        try:
            with self._closing_at(end + _CLOSE_S) as passed, self._sending:
                self._send_all(memoryview(data), end)
        except BROKEN as error:
            # A command that ended early has closed its stdin; what it printed tells more than a broken pipe.
            ended = self._channel.eof_received or self._channel.exit_status_ready()
            if passed.is_set() or not ended:
                raise ContactLost("the SSH connection was lost while sending", node=self._node) from error

    def close_stdin(self) -> None:
        """Tell the command that no more input follows."""
        with contextlib.suppress(*BROKEN), self._closing_at():
            self._channel.shutdown_write()

    def close(self) -> None:
        """Let go of the channel; what runs on the node is not stopped."""
        with contextlib.suppress(*BROKEN), self._closing_at():
            self._channel.close()

    def _closing_at(self, end: float | None = None) -> contextlib.AbstractContextManager[threading.Event]:
        return closing_at(end or time.monotonic() + _CLOSE_S, self._channel.get_transport)

    def _send_all(self, rest: memoryview, end: float) -> None:
        while rest:
            try:
                sent = self._channel.send(bytes(rest[:_CHUNK_BYTES]))
            except TimeoutError:
                # Whoever reads sets how long a look takes, for both directions.
                if time.monotonic() >= end:
                    raise
                continue
            if sent == 0:
                raise EOFError
            rest = rest[sent:]

    def _wait(self, end: float) -> int:
        if not self._channel.status_event.wait(time_left(end)):
            raise ContactLost("the command did not end in time", node=self._node)
        self._drain_stderr()
        exit_code = self._channel.recv_exit_status()
        if exit_code < 0:
            raise ContactLost("the SSH connection was lost before the command ended", node=self._node)
        return exit_code

    def _receive(self, end: float) -> bool:
        while True:
            self._drain_stderr()
            left_s = time_left(end)
            self._channel.settimeout(max(0.01, min(left_s, _DRAIN_EVERY_S)))
            try:
                data = self._channel.recv(_CHUNK_BYTES)
            except TimeoutError:
                if left_s > _DRAIN_EVERY_S:
                    continue
                raise ContactLost("no answer in time", node=self._node) from None
            except BROKEN as error:
                raise _lost(self._node) from error
            self._pending += data
            return bool(data)

    def _drain_stderr(self) -> None:
        # Unread stderr fills the channel's window and would stop stdout too.
        try:
            while self._channel.recv_stderr_ready():
                self._keep_stderr(self._channel.recv_stderr(_CHUNK_BYTES))
        except BROKEN as error:
            raise _lost(self._node) from error


def _lost(node: str) -> ContactLost:
    return ContactLost("the SSH connection was lost", node=node)
