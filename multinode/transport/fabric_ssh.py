"""SSH through the library Fabric, for controllers without an `ssh` program: one connection per node.

Limited to what paramiko reads of the SSH configuration. Host keys are always verified; passwords are never asked for.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fabric
import paramiko

from multinode.cluster.cluster import Node
from multinode.errors import ContactLost, MultinodeError, UsageError
from multinode.transport import refusals
from multinode.transport.base import BufferedStream, Transport, fan_out, held, time_left

_LOG = logging.getLogger(__name__)
# Paramiko's threads log what they raise; without a handler Python would print it with a traceback.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

_BROKEN = (OSError, EOFError, paramiko.SSHException)
# sshd's ClientAliveInterval is 0 by default, so a dropped link shows only if we ask.
_KEEPALIVE_S = 15
# TCP, handshake, authentication.
_STAGES = 3
_CHUNK_BYTES = 1 << 16
_DRAIN_EVERY_S = 0.5
_LOOK_S = 0.1
# For the few bytes that signal the end of input.
_CLOSE_S = 2.0
# sshd drops logins when 10 are in progress (MaxStartups 10:30:100), and all may pass one jump host.
_LOGINS = 8
# A timeout of 0 would mean none.
_LEAST_S = 0.01
_KNOWN_HOSTS = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
_SYSTEM_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"


class _UnknownHostKey(paramiko.SSHException):
    def __init__(self, hostname: str, key: paramiko.PKey) -> None:
        super().__init__(f"unknown host key of {hostname}")
        self.hostname = hostname
        self.key = key


class _SecondFactor(paramiko.SSHException):
    """The key was accepted, and sshd asks for more."""


class _RejectUnknown(paramiko.MissingHostKeyPolicy):
    """Rejects a host that is not in known_hosts, keeping its key for the message."""

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:  # noqa: ARG002 - paramiko's signature
        raise _UnknownHostKey(hostname, key)


class _SilentTransport(paramiko.Transport):
    """Never asks: paramiko's own class prompts on stdout and reads stdin."""

    def auth_interactive_dumb(self, *_: object, **__: object) -> list[str]:
        raise _SecondFactor


class FabricTransport(Transport):
    """Runs commands on nodes over SSH. Connections are opened at first use and kept.

    Args:
        connect_timeout_s: timeout of the TCP connection, again of handshake and authentication, and again per jump
            host.
    """

    def __init__(self, *, connect_timeout_s: float = 10.0) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._lock = threading.Lock()
        self._connections: dict[str, fabric.Connection] = {}
        self._opening: dict[str, threading.RLock] = {}
        self._is_closed = False
        self._logins = threading.Semaphore(min(fan_out(), _LOGINS))

    def open(self, node: Node, command: str, *, deadline_s: float) -> FabricStream:
        """Start a command and communicate with it. See `Transport.open`."""
        end = time.monotonic() + deadline_s
        connection = self._connect(node, end)
        transport = connection.transport
        try:
            with _closing_at(end, lambda: transport) as passed:
                channel = transport.open_session(timeout=time_left(end, _LEAST_S))
                channel.settimeout(deadline_s)
                channel.exec_command(command)
        except paramiko.ChannelException as error:
            # The connection works, and others use it.
            raise refusals.MAX_SESSIONS.error(node) from error
        except _BROKEN as error:
            self._forget(node)
            late = passed.is_set() or "Timeout" in str(error)
            reason = "sshd did not answer in time" if late else error or type(error).__name__
            raise ContactLost(f"the SSH connection failed: {reason}", node=node.name) from error
        return FabricStream(channel, node.name, send_deadline_s=deadline_s)

    def close(self) -> None:
        """Close every connection, including those being opened."""
        with self._lock:
            self._is_closed = True
            connections = list(self._connections.values())
            self._connections.clear()
        for connection in connections:
            _close(connection)

    def _connect(self, node: Node, end: float) -> fabric.Connection:
        """The open connection, or a new one by `end` on the monotonic clock; waits for another thread that opens it."""
        late = refusals.STILL_OPENING.error(node, where=node.name)
        with self._lock:
            opening = self._opening.setdefault(node.name, threading.RLock())
        with held(opening, end, late):
            connection = self._connections.get(node.name)
            if connection is not None and connection.is_connected:
                return connection
            stage_s = min(self._connect_timeout_s, time_left(end, _LEAST_S))
            connection = make_connection(node, connect_timeout_s=stage_s)
            with held(self._logins, end, late):
                try:
                    _open(connection, node, stage_s, end)
                except BaseException:
                    _close(connection)
                    raise
            connection.transport.set_keepalive(_KEEPALIVE_S)
            with self._lock:
                if not self._is_closed:
                    self._connections[node.name] = connection
                    return connection
            _close(connection)
            raise ContactLost("the connection was closed while opening", node=node.name)

    def _forget(self, node: Node) -> None:
        with self._lock:
            connection = self._connections.pop(node.name, None)
        if connection is not None:
            _close(connection)


class FabricStream(BufferedStream):
    """A running remote command, on its own channel. See `Stream`.

    Args:
        channel: the command's.
        node: the node's name, for messages.
        send_deadline_s: how long input may stay unread.
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
        except _BROKEN as error:
            # A command that ended early has closed its stdin; its output says more than a broken pipe.
            ended = self._channel.eof_received or self._channel.exit_status_ready()
            if passed.is_set() or not ended:
                raise ContactLost("the SSH connection was lost while sending", node=self._node) from error

    def close_stdin(self) -> None:
        """Signal the end of the input."""
        with contextlib.suppress(*_BROKEN), self._closing_at():
            self._channel.shutdown_write()

    def close(self) -> None:
        """Release the channel; what runs on the node continues."""
        with contextlib.suppress(*_BROKEN), self._closing_at():
            self._channel.close()

    def _closing_at(self, end: float | None = None) -> contextlib.AbstractContextManager[threading.Event]:
        return _closing_at(end or time.monotonic() + _CLOSE_S, self._channel.get_transport)

    def _send_all(self, rest: memoryview, end: float) -> None:
        while rest:
            try:
                sent = self._channel.send(bytes(rest[:_CHUNK_BYTES]))
            except TimeoutError:
                # The reader sets the timeout, for both directions.
                if time.monotonic() >= end:
                    raise
                continue
            if sent == 0:
                raise EOFError
            rest = rest[sent:]

    def _wait(self, end: float) -> int:
        if not self._channel.status_event.wait(time_left(end)):
            raise ContactLost("the command did not finish in time", node=self._node)
        self._drain_stderr()
        exit_code = self._channel.recv_exit_status()
        if exit_code < 0:
            raise ContactLost("the SSH connection was lost before the command finished", node=self._node)
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
            except _BROKEN as error:
                raise _lost(self._node) from error
            self._pending += data
            return bool(data)

    def _drain_stderr(self) -> None:
        # Unread stderr fills the channel's window and would block stdout.
        try:
            while self._channel.recv_stderr_ready():
                self._keep_stderr(self._channel.recv_stderr(_CHUNK_BYTES))
        except _BROKEN as error:
            raise _lost(self._node) from error


def make_connection(node: Node, *, connect_timeout_s: float) -> fabric.Connection:
    """The unopened connection to a node: hostfile keys, then the SSH configuration, then defaults.

    Raises:
        UsageError: the SSH configuration, a known_hosts file or the jump host's name is invalid.
    """
    try:
        config = fabric.Config()
        if node.ssh_config is not None:
            path = str(Path(node.ssh_config).expanduser())
            config = fabric.Config(ssh_config=paramiko.SSHConfig.from_path(path))
        connection = fabric.Connection(
            node.name,
            user=node.user,
            port=node.port,
            config=config,
            gateway=fabric.Connection(node.jump, config=config) if node.jump is not None else None,
            connect_timeout=math.ceil(connect_timeout_s),
        )
        if node.key is not None:
            connection.connect_kwargs["key_filename"] = [str(Path(node.key).expanduser())]
            connection.connect_kwargs["look_for_keys"] = False
        _make_strict(connection, connect_timeout_s)
    except (OSError, ValueError, paramiko.SSHException, paramiko.hostkeys.InvalidHostKey) as error:
        raise UsageError(
            f"Fabric, used instead of ssh, does not accept its SSH settings: {error}",
            node=node.name,
            hint="correct its line in the hostfile, the SSH configuration or known_hosts, or install an OpenSSH client",
        ) from error
    return connection


def _make_strict(connection: fabric.Connection, timeout_s: float) -> None:
    """Make it, and its jump hosts, verify host keys and keep deadlines."""
    client, options, kwargs = connection.client, connection.ssh_config, connection.connect_kwargs
    client.set_missing_host_key_policy(_RejectUnknown())
    for name in [*shlex.split(options.get("userknownhostsfile", _KNOWN_HOSTS)), _SYSTEM_KNOWN_HOSTS]:
        path = Path(name).expanduser()
        if path.is_file():
            _refuse_marks(path)
            client.load_system_host_keys(str(path))
    # OpenSSH skips a missing IdentityFile; paramiko would fail.
    kwargs["key_filename"] = [key for key in kwargs.get("key_filename", []) if Path(key).expanduser().is_file()]
    kwargs["transport_factory"] = _SilentTransport
    kwargs["banner_timeout"] = kwargs["channel_timeout"] = timeout_s
    # Per offered key, and there may be many; `_open` limits the total.
    kwargs["auth_timeout"] = _STAGES * timeout_s
    if isinstance(connection.gateway, fabric.Connection):
        connection.gateway.connect_timeout = connection.connect_timeout
        _make_strict(connection.gateway, timeout_s)


def _refuse_marks(path: Path) -> None:
    """Paramiko ignores the marks of revoked and CA keys, and would accept them as host keys."""
    marked = re.search(r"^@\S+", path.read_text(errors="replace"), re.MULTILINE)
    if marked:
        raise ValueError(f"{path} has a line with {marked[0]}")


def _open(
    connection: fabric.Connection, node: Node, stage_s: float, end: float, target: fabric.Connection | None = None
) -> None:
    """Open it, its jump hosts first.

    Args:
        connection: from `make_connection`.
        node: for messages.
        stage_s: timeout of each stage.
        end: of everything, on the monotonic clock.
        target: what a jump host is for.
    """
    if isinstance(connection.gateway, fabric.Connection):
        _open(connection.gateway, node, stage_s, end, target or connection)
    began = time.monotonic()
    with _closing_at(min(end, began + _STAGES * stage_s), connection.client.get_transport) as passed:
        try:
            if isinstance(connection.gateway, str):
                # Kept: paramiko kills the program of a ProxyCommand without reaping it.
                connection.connect_kwargs["sock"], connection.gateway = connection.open_gateway(), None
            connection.open()
            _LOG.debug("%s: logged in to %s in %.2f s", node.name, _where(connection), time.monotonic() - began)
        except (OSError, EOFError, UnicodeError, paramiko.SSHException) as error:
            refusal = refusals.FROZEN.error(node, where=_where(connection)) if passed.is_set() else None
            refusal = refusal or _explain(connection, node, error)
            if target is not None:
                refusal = refusals.of_jump_host(refusal, Node(name=connection.host), node)
            raise refusal from error


def _close(connection: fabric.Connection) -> None:
    reader = connection.client.get_transport()
    with contextlib.suppress(*_BROKEN):
        connection.close()
        # Even if it was never open: it has asked the user's SSH agent for keys.
        connection.client.close()
    proxy = connection.connect_kwargs.get("sock")
    if isinstance(proxy, paramiko.ProxyCommand):
        with proxy.process as program:
            if reader is not None and reader.is_alive():
                # It polls the pipes every 0.1 s, and finally kills the program by its pid.
                reader.join(_CLOSE_S)
            program.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(_CLOSE_S)
            program.kill()
    if isinstance(connection.gateway, fabric.Connection):
        _close(connection.gateway)


@contextlib.contextmanager
def _closing_at(end: float, transport: Callable[[], paramiko.Transport | None]) -> Iterator[threading.Event]:
    """Close the connection and set the event if the block still runs at `end`.

    Paramiko waits forever for the answer to an exec request (paramiko#2599), for a socket that accepts no more bytes,
    and for a lock held by a thread in one of these. Closing the connection makes the waiting call raise.

    Args:
        end: on the monotonic clock.
        transport: returns the connection, called from `end` on: it may not exist before.
    """
    passed, over = threading.Event(), threading.Event()

    def close() -> None:
        while (opened := transport()) is None:
            # While connecting, paramiko's own timeout applies.
            if over.wait(_LOOK_S):
                return
        passed.set()
        opened.close()

    timer = threading.Timer(time_left(end), close)
    timer.daemon = True
    timer.start()
    try:
        yield passed
    finally:
        over.set()
        timer.cancel()


_BY_KIND: dict[type[Exception], refusals.Refusal] = {
    _UnknownHostKey: refusals.UNKNOWN_KEY,
    _SecondFactor: refusals.SECOND_FACTOR,
    paramiko.PasswordRequiredException: refusals.LOCKED_KEY,
    socket.gaierror: refusals.NO_NAME,
    UnicodeError: refusals.NO_NAME,
}


def _explain(connection: fabric.Connection, node: Node, error: Exception) -> MultinodeError:
    where = _where(connection)
    keys = list(connection.connect_kwargs.get("key_filename") or [])
    transport = connection.client.get_transport()
    values: dict[str, Any] = {"where": where, "host": connection.host, "user": connection.user}
    if isinstance(error, paramiko.BadHostKeyException):
        options = connection.ssh_config
        values |= {"shown": error.key.fingerprint, "known": error.expected_key.fingerprint}
        values |= {"entry": shlex.quote(_known_name(connection))}
        values |= {"file": shlex.split(options.get("userknownhostsfile", _KNOWN_HOSTS))[0]}
        return refusals.CHANGED_KEY.error(node, values)
    if isinstance(error, _UnknownHostKey):
        values["fingerprint"] = f"{error.key.get_name()} {error.key.fingerprint}"
    values |= {"methods": "keyboard-interactive", "file": " ".join(keys)}
    for kind, refusal in _BY_KIND.items():
        if isinstance(error, kind):
            return refusal.error(node, values)
    # Paramiko tries a rejected key file as every other type, too, and raises the last error.
    let_in = transport is not None and transport.is_active() and transport.initial_kex_done
    if let_in or isinstance(error, paramiko.AuthenticationException):
        tried = [*keys, *(["the keys in ~/.ssh"] if connection.connect_kwargs.get("look_for_keys", True) else [])]
        tried += ["the agent's keys"] if os.environ.get("SSH_AUTH_SOCK") else []
        copy = refusals.copy_command(node)
        return refusals.REFUSED_KEY.error(node, values, tried=", ".join(tried) or "none", copy=copy)
    first: Exception = error
    if isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
        first = next(iter(error.errors.values()))
    reason = error.text if isinstance(error, paramiko.ChannelException) else str(first) or type(first).__name__
    return _refusal(error, first).error(node, values, reason=reason)


def _refusal(error: Exception, first: Exception) -> refusals.Refusal:
    if isinstance(first, ConnectionRefusedError):
        return refusals.REFUSED
    # The second is paramiko's message for a jump host that waits for the node.
    if isinstance(first, TimeoutError) or "Timeout opening channel" in str(error):
        return refusals.TIMED_OUT
    if isinstance(first, OSError) and first.errno in {101, 113}:
        return refusals.NO_ROUTE
    # Paramiko's messages for a handshake that never arrived, and for one that was cut off.
    if isinstance(error, (EOFError, ConnectionResetError)) or re.search("banner|No existing session", str(error)):
        return refusals.FROZEN
    return refusals.BEYOND_FABRIC


def _where(connection: fabric.Connection) -> str:
    return f"{connection.host} port {connection.port}"


def _known_name(connection: fabric.Connection) -> str:
    return connection.host if connection.port == paramiko.config.SSH_PORT else f"[{connection.host}]:{connection.port}"


def _lost(node: str) -> ContactLost:
    return ContactLost("the SSH connection was lost", node=node)
