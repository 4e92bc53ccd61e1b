"""Opening one SSH connection as an OpenSSH user expects it: configuration, keys, jump hosts, strict host keys."""

from __future__ import annotations

import contextlib
import logging
import math
import shlex
import socket
import time
from pathlib import Path

import fabric
import paramiko

from multinode.core.cluster.cluster import Node
from multinode.errors import NodeError, UsageError
from multinode.transport.deadline import closing_at
from multinode.transport.refusals import (
    LOCKED_KEY,
    NO_NAME,
    explain_changed_key,
    explain_no_connection,
    explain_refused_key,
    explain_silence,
    explain_unknown_key,
)
from multinode.transport.ssh_config import resolve_ssh_config

__all__ = ["KEEPALIVE_S", "close_connection", "make_connection", "open_connection"]

# sshd's ClientAliveInterval is 0 by default, so a dropped link is noticed by nobody unless we ask.
KEEPALIVE_S = 15

# Its threads log what they raise as well; without a handler Python would print that, traceback and all.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

# TCP, handshake, authentication.
_STAGES = 3

_SYSTEM_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"


class _UnknownHostKey(paramiko.SSHException):
    def __init__(self, hostname: str, key: paramiko.PKey) -> None:
        super().__init__(f"unknown host key of {hostname}")
        self.hostname = hostname
        self.key = key


class _RejectUnknown(paramiko.MissingHostKeyPolicy):
    """Refuses a host that known_hosts does not have, keeping its key for the message."""

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:  # noqa: ARG002 - paramiko's signature
        raise _UnknownHostKey(hostname, key)


def make_connection(node: Node, *, connect_timeout_s: float) -> fabric.Connection:
    """The connection to a node, not yet open: hostfile keys first, then the SSH configuration, then the defaults.

    Raises:
        UsageError: the SSH configuration, a known_hosts file or the jump host's name cannot be understood.
    """
    try:
        return _make(node, connect_timeout_s)
    except (OSError, ValueError, paramiko.SSHException, paramiko.hostkeys.InvalidHostKey) as error:
        raise UsageError(
            f"its SSH settings cannot be used: {error}",
            node=node.name,
            hint="correct its line in the hostfile, the SSH configuration, or known_hosts",
        ) from error


def _make(node: Node, connect_timeout_s: float) -> fabric.Connection:
    config = _load_config(node)
    gateway = fabric.Connection(node.jump, config=config) if node.jump is not None else None
    connection = fabric.Connection(
        node.name,
        user=node.user,
        port=node.port,
        config=config,
        gateway=gateway,
        connect_timeout=math.ceil(connect_timeout_s),
        connect_kwargs={
            "banner_timeout": connect_timeout_s,
            "channel_timeout": connect_timeout_s,
            # Of each key that is offered, and there may be many; `open_connection` ends the waiting for all of them.
            "auth_timeout": _STAGES * connect_timeout_s,
        },
    )
    if node.key is not None:
        connection.connect_kwargs["key_filename"] = [str(Path(node.key).expanduser())]
        connection.connect_kwargs["look_for_keys"] = False
    return _strict(connection)


def open_connection(
    connection: fabric.Connection, node: Node, *, connect_timeout_s: float, target: fabric.Connection | None = None
) -> None:
    """Open it, its jump hosts first; each has `connect_timeout_s` for every stage. `target` is what a jump host is for.

    Raises:
        NodeError: it cannot be opened; the error says why, and what mends it.
    """
    if isinstance(connection.gateway, fabric.Connection):
        gateway = connection.gateway
        open_connection(gateway, node, connect_timeout_s=connect_timeout_s, target=target or connection)
    end = time.monotonic() + _STAGES * connect_timeout_s
    with closing_at(end, connection.client.get_transport) as passed:
        try:
            _open(connection, node, target or connection)
        except NodeError as error:
            if passed.is_set():
                raise explain_silence(connection, node) from error
            raise


def close_connection(connection: fabric.Connection) -> None:
    """Close it, and those of its jump hosts."""
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        connection.close()
    if isinstance(connection.gateway, fabric.Connection):
        close_connection(connection.gateway)


def _open(connection: fabric.Connection, node: Node, target: fabric.Connection) -> None:
    try:
        connection.open()
    except paramiko.BadHostKeyException as error:
        raise explain_changed_key(connection, node, error) from error
    except _UnknownHostKey as error:
        raise explain_unknown_key(target, node, error.hostname, error.key) from error
    except paramiko.PasswordRequiredException as error:
        raise LOCKED_KEY.error(node) from error
    except paramiko.AuthenticationException as error:
        raise explain_refused_key(connection, node) from error
    except (socket.gaierror, UnicodeError) as error:
        raise NO_NAME.error(node, host=connection.host) from error
    except (OSError, EOFError, paramiko.SSHException) as error:
        transport = connection.client.get_transport()
        if transport is not None and transport.is_active() and transport.initial_kex_done:
            # Paramiko reads the file of a refused key as one of every other kind, too, and raises what comes last.
            raise explain_refused_key(connection, node) from error
        raise explain_no_connection(connection, node, error) from error


def _load_config(node: Node) -> fabric.Config:
    try:
        path = None if node.ssh_config is None else Path(node.ssh_config).expanduser()
        text = None if path is None else path.read_text()
        resolved = resolve_ssh_config(node.name, node.jump, path)
        if resolved is None and text is not None:
            resolved = paramiko.SSHConfig.from_text(text)
        return fabric.Config() if resolved is None else fabric.Config(ssh_config=resolved)
    except (OSError, UnicodeDecodeError, paramiko.ConfigParseError) as error:
        raise UsageError(f"the SSH configuration cannot be read: {error}", node=node.name) from error


def _strict(connection: fabric.Connection) -> fabric.Connection:
    """Make it verify host keys and use keys as OpenSSH does; its jump hosts likewise."""
    options = connection.ssh_config
    if isinstance(connection.gateway, fabric.Connection) and connection.gateway.host == "none":
        connection.gateway = None  # what OpenSSH means by `ProxyJump none`; Fabric takes it for a name
    client = connection.client
    client.set_missing_host_key_policy(_RejectUnknown())
    named = options.get("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2")
    for name in [*shlex.split(named), _SYSTEM_KNOWN_HOSTS]:
        path = Path(name).expanduser()
        if path.is_file():
            _load_known_hosts(client, path)
    kwargs = connection.connect_kwargs
    # OpenSSH passes over an IdentityFile that does not exist; paramiko would stop at it.
    kwargs["key_filename"] = [key for key in kwargs.get("key_filename", []) if Path(key).expanduser().is_file()]
    if options.get("identitiesonly", "no").lower() == "yes":
        kwargs["allow_agent"] = False
        kwargs["look_for_keys"] = False
    if isinstance(connection.gateway, fabric.Connection):
        connection.gateway.connect_timeout = connection.connect_timeout
        for name in ("banner_timeout", "channel_timeout", "auth_timeout"):
            connection.gateway.connect_kwargs[name] = connection.connect_kwargs[name]
        _strict(connection.gateway)
    return connection


def _load_known_hosts(client: paramiko.SSHClient, path: Path) -> None:
    try:
        client.load_system_host_keys(str(path))
    except (UnicodeDecodeError, paramiko.hostkeys.InvalidHostKey) as error:
        raise UsageError(f"{path} has a line that is no host key: {error}") from error
