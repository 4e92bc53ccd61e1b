"""Opening one SSH connection as an OpenSSH user expects it: configuration, keys, jump hosts, strict host keys."""

from __future__ import annotations

import math
import os
import shlex
import socket
from pathlib import Path

import fabric
import paramiko

from multinode.core.cluster import Node
from multinode.errors import AuthError, ConnectError, HostKeyError, NodeError, ResolveError, UsageError

__all__ = ["KEEPALIVE_S", "make_connection", "open_connection"]

# sshd's ClientAliveInterval is 0 by default, so a dropped link is noticed by nobody unless we ask.
KEEPALIVE_S = 15

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
        connect_kwargs={"banner_timeout": connect_timeout_s, "auth_timeout": connect_timeout_s},
    )
    if node.key is not None:
        connection.connect_kwargs["key_filename"] = [str(Path(node.key).expanduser())]
        connection.connect_kwargs["look_for_keys"] = False
    return _strict(connection)


def open_connection(connection: fabric.Connection, node: Node) -> None:
    """Open it.

    Raises:
        NodeError: with the exact reason and the command that mends it or shows more.
    """
    try:
        connection.open()
    except paramiko.BadHostKeyException as error:
        raise _changed_key(connection, node, error) from error
    except _UnknownHostKey as error:
        raise _unknown_key(connection, node, error) from error
    except paramiko.PasswordRequiredException as error:
        raise AuthError(
            "its key is protected by a passphrase",
            node=node.name,
            ran=_typed(node),
            hint="load it into the agent first: ssh-add",
        ) from error
    except paramiko.AuthenticationException as error:
        raise _refused_key(connection, node) from error
    except (socket.gaierror, UnicodeError) as error:
        raise ResolveError(
            f"the name {connection.host!r} does not resolve to an address",
            node=node.name,
            ran=_typed(node),
            hint="correct the name in the hostfile, or give it a HostName in ~/.ssh/config",
        ) from error
    except (OSError, EOFError, paramiko.SSHException) as error:
        raise _no_connection(connection, node, error) from error


def _load_config(node: Node) -> fabric.Config:
    try:
        if node.ssh_config is None:
            return fabric.Config()
        path = Path(node.ssh_config).expanduser()
        with path.open() as file:
            ssh_config = paramiko.SSHConfig.from_file(file)
        return fabric.Config(ssh_config=ssh_config)
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
        for name in ("banner_timeout", "auth_timeout"):
            connection.gateway.connect_kwargs[name] = connection.connect_kwargs[name]
        _strict(connection.gateway)
    return connection


def _load_known_hosts(client: paramiko.SSHClient, path: Path) -> None:
    try:
        client.load_system_host_keys(str(path))
    except (UnicodeDecodeError, paramiko.hostkeys.InvalidHostKey) as error:
        raise UsageError(f"{path} has a line that is no host key: {error}") from error


def _typed(node: Node, *, accept: bool = False) -> str:
    """The ssh command that a person would type to see the same."""
    words = ["ssh"]
    if node.ssh_config is not None:
        words += ["-F", node.ssh_config]
    if node.port is not None:
        words += ["-p", str(node.port)]
    if node.key is not None:
        words += ["-i", node.key]
    if node.jump is not None:
        words += ["-J", node.jump]
    if accept:
        words += ["-o", "StrictHostKeyChecking=ask"]
    destination = f"{node.user}@{node.name}" if node.user else node.name
    return shlex.join([*words, destination, "true"])


def _known_name(connection: fabric.Connection) -> str:
    return connection.host if connection.port == paramiko.config.SSH_PORT else f"[{connection.host}]:{connection.port}"


def _unknown_key(connection: fabric.Connection, node: Node, error: _UnknownHostKey) -> NodeError:
    own = error.hostname == _known_name(connection)
    whose = "its host key" if own else f"the host key of its jump host {error.hostname}"
    return HostKeyError(
        f"{whose} is not known ({error.key.get_name()} {error.key.fingerprint})",
        node=node.name,
        ran=_typed(node),
        hint=f"compare the fingerprint and accept it once: {_typed(node, accept=True)}",
    )


def _changed_key(connection: fabric.Connection, node: Node, error: paramiko.BadHostKeyException) -> NodeError:
    known = shlex.split(connection.ssh_config.get("userknownhostsfile", "~/.ssh/known_hosts"))[0]
    name = shlex.quote(_known_name(connection))
    return HostKeyError(
        f"its host key has changed: it shows {error.key.fingerprint}, known_hosts has "
        f"{error.expected_key.fingerprint}. Either the node was reinstalled, or something stands between you and it",
        node=node.name,
        ran=_typed(node),
        hint=f"if it was reinstalled: ssh-keygen -f {known} -R {name} && {_typed(node, accept=True)}",
    )


def _refused_key(connection: fabric.Connection, node: Node) -> NodeError:
    named = connection.connect_kwargs.get("key_filename") or []
    tried = list(named)
    if connection.connect_kwargs.get("look_for_keys", True):
        tried.append("the keys in ~/.ssh")
    if connection.connect_kwargs.get("allow_agent", True) and os.environ.get("SSH_AUTH_SOCK"):
        tried.append("the agent's keys")
    port = "" if connection.port == paramiko.config.SSH_PORT else f"-p {connection.port} "
    return AuthError(
        f"it refused our keys for user {connection.user!r} (tried: {', '.join(tried) or 'none, there is no key'})",
        node=node.name,
        ran=_typed(node),
        hint=f"give it your key: ssh-copy-id {port}{shlex.quote(f'{connection.user}@{connection.host}')}"
        ", or name user= and key= in the hostfile",
    )


def _no_connection(connection: fabric.Connection, node: Node, error: Exception) -> NodeError:
    where = f"{connection.host} port {connection.port}"
    reason, hint = _explain(error)
    return ConnectError(f"no SSH connection to {where}: {reason}", node=node.name, ran=_typed(node), hint=hint)


def _explain(error: Exception) -> tuple[str, str]:
    first = error
    if isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
        first = next(iter(error.errors.values()))
    if isinstance(first, ConnectionRefusedError):
        return "refused", "no sshd listens there: start it on the node, or name another port= in the hostfile"
    if isinstance(first, TimeoutError):
        return "timed out", "the node is down, or a firewall drops the packets: try to ping it"
    if isinstance(first, OSError) and first.errno in {101, 113}:
        return "no route to it", "the node is down or in another network: check its address and power"
    if isinstance(error, paramiko.SSHException) and "banner" in str(error).lower():
        return (
            "the port answers, but not as sshd does in time",
            "sshd is overloaded (MaxStartups) or something else listens there",
        )
    return str(first) or type(first).__name__, "see what OpenSSH says: add -v to the command above"
