"""Opening one SSH connection as an OpenSSH user expects it: configuration, keys, jump hosts, strict host keys.

The configuration is read by OpenSSH itself (`ssh -G`): `Include`, `Match` and all, which paramiko knows in part.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pwd
import queue
import re
import shlex
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fabric
import paramiko
from fabric.connection import derive_shorthand

from multinode.core.cluster.cluster import Node
from multinode.errors import MultinodeError, UsageError
from multinode.transport import refusals
from multinode.transport.base import time_left

__all__ = ["BROKEN", "KEEPALIVE_S", "close_connection", "closing_at", "make_connection", "open_connection"]

BROKEN = (OSError, EOFError, paramiko.SSHException)
"""What paramiko raises when a connection breaks."""

# sshd's ClientAliveInterval is 0 by default, so a dropped link is noticed by nobody unless we ask.
KEEPALIVE_S = 15

_LOG = logging.getLogger(__name__)

# How often paramiko's thread looks up from an open connection: for a keepalive, new keys, or its end. By itself it does
# so ten times per second, which costs more than all that hundreds of nodes say.
_LOOK_UP_S = 1.0

# Its threads log what they raise as well; without a handler Python would print that, traceback and all.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

_LOOK_S = 0.1
# TCP, handshake, authentication.
_STAGES = 3

_SYSTEM_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"

_CONFIG_DEADLINE_S = 10.0
# What a connection is made from; OpenSSH tells every other setting too, with words that paramiko does not know.
_READ = frozenset(
    {
        "forwardagent",
        "hostname",
        "identitiesonly",
        "identityfile",
        "port",
        "proxycommand",
        "proxyjump",
        "user",
        "userknownhostsfile",
    }
)
_UNSET = "none"
_DEFAULT_KEY = re.compile(r"~/\.ssh/id_(?:rsa|dsa|ecdsa|ed25519|xmss)(?:_sk)?")


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
                # Of each key that is offered, and there may be many; `open_connection` ends the wait for all of them.
                "auth_timeout": _STAGES * connect_timeout_s,
            },
        )
        if node.key is not None:
            connection.connect_kwargs["key_filename"] = [str(Path(node.key).expanduser())]
            connection.connect_kwargs["look_for_keys"] = False
        return _strict(connection)
    except (OSError, ValueError, paramiko.SSHException, paramiko.hostkeys.InvalidHostKey) as error:
        raise UsageError(
            f"its SSH settings cannot be used: {error}",
            node=node.name,
            hint="correct its line in the hostfile, the SSH configuration, or known_hosts",
        ) from error


def open_connection(
    connection: fabric.Connection,
    node: Node,
    *,
    connect_timeout_s: float,
    end: float = math.inf,
    target: fabric.Connection | None = None,
) -> None:
    """Open it, its jump hosts first.

    Args:
        connection: from `make_connection`.
        node: for messages.
        connect_timeout_s: for every stage of each of them.
        end: of all of it, on the monotonic clock.
        target: what a jump host is for.

    Raises:
        NodeError: it cannot be opened; the error says why, and what fixes it.
    """
    if isinstance(connection.gateway, fabric.Connection):
        gateway = connection.gateway
        open_connection(gateway, node, connect_timeout_s=connect_timeout_s, end=end, target=target or connection)
    began = time.monotonic()
    with closing_at(min(end, began + _STAGES * connect_timeout_s), connection.client.get_transport) as passed:
        try:
            if connection.gateway is None:
                _resolve(connection, node, max(0.0, min(connect_timeout_s, end - began)))
            connection.open()
            _set_look_up(connection)
            _LOG.debug("%s: connected to %s in %.2f s", node.name, _where(connection), time.monotonic() - began)
        except (OSError, EOFError, UnicodeError, paramiko.SSHException) as error:
            if passed.is_set():
                raise refusals.FROZEN.error(node, where=_where(connection)) from error
            raise _explain(connection, node, target or connection, error) from error


def _resolve(connection: fabric.Connection, node: Node, within_s: float) -> None:
    """Resolve its name, and have paramiko connect to these addresses: by itself it waits for a resolver without end.

    Raises:
        NodeError: no name server answered in time.
        OSError, UnicodeError: the name does not resolve.
    """
    answers: queue.SimpleQueue[list[tuple[Any, Any]] | OSError | UnicodeError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(connection.host, connection.port, type=socket.SOCK_STREAM)
            answers.put([(family, address) for family, _, _, _, address in found])
        except (OSError, UnicodeError) as error:
            answers.put(error)

    # Nothing ends a call of the resolver: its thread is left behind.
    threading.Thread(target=ask, name=f"resolver-{node.name}", daemon=True).start()
    try:
        answer = answers.get(timeout=within_s)
    except queue.Empty:
        raise refusals.NO_ANSWER.error(node, host=connection.host) from None
    if isinstance(answer, (OSError, UnicodeError)):
        raise answer
    connection.client._families_and_addresses = lambda *_: iter(answer)  # noqa: SLF001 - of SSHClient.connect


def close_connection(connection: fabric.Connection) -> None:
    """Close it, and those of its jump hosts."""
    with contextlib.suppress(*BROKEN):
        sock = _own_socket(connection)
        if sock is not None:
            # Its thread hears of it at once, and sshd as well.
            sock.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(*BROKEN):
        connection.close()
    if isinstance(connection.gateway, fabric.Connection):
        close_connection(connection.gateway)


def _set_look_up(connection: fabric.Connection) -> None:
    sock = _own_socket(connection)
    if sock is not None:
        sock.settimeout(_LOOK_UP_S)


def _own_socket(connection: fabric.Connection) -> socket.socket | None:
    """The socket of an open connection; None where it goes through a jump host or a program."""
    transport = connection.client.get_transport()
    sock = transport.sock if transport is not None else None
    return sock if isinstance(sock, socket.socket) else None


@contextlib.contextmanager
def closing_at(end: float, transport: Callable[[], paramiko.Transport | None]) -> Iterator[threading.Event]:
    """Close the connection if the block still runs at `end`; the event is set then.

    Paramiko waits without end for the answer to an exec request (paramiko#2599), for a socket that takes no more bytes,
    and on a lock that another thread holds in either of these. What waits raises once its connection is closed.

    Args:
        end: on the monotonic clock.
        transport: the connection, asked for from `end` on: while one is being opened it comes into being.
    """
    passed, over = threading.Event(), threading.Event()

    def close() -> None:
        while (found := transport()) is None:
            # Its port is being connected to: paramiko has an own timeout for that.
            if over.wait(_LOOK_S):
                return
        passed.set()
        found.close()

    timer = threading.Timer(time_left(end), close)
    timer.daemon = True
    timer.start()
    try:
        yield passed
    finally:
        over.set()
        timer.cancel()


def _explain(connection: fabric.Connection, node: Node, target: fabric.Connection, error: Exception) -> MultinodeError:
    """Why it could not be opened: its host key, our key, its name, or nothing that speaks SSH."""
    if isinstance(error, paramiko.BadHostKeyException):
        return refusals.CHANGED_KEY.error(
            node,
            shown=error.key.fingerprint,
            known=error.expected_key.fingerprint,
            file=shlex.split(connection.ssh_config.get("userknownhostsfile", "~/.ssh/known_hosts"))[0],
            entry=shlex.quote(_known_name(connection)),
        )
    if isinstance(error, _UnknownHostKey):
        fingerprint = f"{error.key.get_name()} {error.key.fingerprint}"
        refusal = refusals.UNKNOWN_KEY.error(node, fingerprint=fingerprint, certificate="")
        own = error.hostname == _known_name(target)
        return refusal if own else refusals.of_jump_host(refusal, Node(name=error.hostname), node)
    if isinstance(error, paramiko.PasswordRequiredException):
        return refusals.LOCKED_KEY.error(node, file=" ".join(connection.connect_kwargs.get("key_filename") or []))
    if isinstance(error, (socket.gaierror, UnicodeError)):
        return refusals.NO_NAME.error(node, host=connection.host)
    transport = connection.client.get_transport()
    # Paramiko reads the file of a refused key as one of every other kind, too, and raises what comes last.
    let_in = transport is not None and transport.is_active() and transport.initial_kex_done
    if let_in or isinstance(error, paramiko.AuthenticationException):
        return _refused_key(connection, node)
    first: Exception = error
    if isinstance(error, paramiko.ssh_exception.NoValidConnectionsError):
        first = next(iter(error.errors.values()))
    reason = str(first) or type(first).__name__
    return _refusal(error, first).error(node, where=_where(connection), reason=reason)


def _refused_key(connection: fabric.Connection, node: Node) -> MultinodeError:
    tried = list(connection.connect_kwargs.get("key_filename") or [])
    if connection.connect_kwargs.get("look_for_keys", True):
        tried.append("the keys in ~/.ssh")
    if connection.connect_kwargs.get("allow_agent", True) and os.environ.get("SSH_AUTH_SOCK"):
        tried.append("the agent's keys")
    return refusals.REFUSED_KEY.error(
        node,
        user=connection.user,
        tried=", ".join(tried) or "none, there is no key",
        copy=refusals.copy_command(node),
    )


def _refusal(error: Exception, first: Exception) -> refusals.Refusal:
    if isinstance(first, ConnectionRefusedError):
        return refusals.REFUSED
    # The second in paramiko's words for a jump host that waits for the node itself.
    if isinstance(first, TimeoutError) or "Timeout opening channel" in str(error):
        return refusals.TIMED_OUT
    if isinstance(first, OSError) and first.errno in {101, 113}:
        return refusals.NO_ROUTE
    # Paramiko's words for a handshake that never came, and for one that ended before it was over.
    if isinstance(error, (EOFError, ConnectionResetError)) or re.search("banner|No existing session", str(error)):
        return refusals.FROZEN
    return refusals.OTHERWISE


def _where(connection: fabric.Connection) -> str:
    return f"{connection.host} port {connection.port}"


def _known_name(connection: fabric.Connection) -> str:
    return connection.host if connection.port == paramiko.config.SSH_PORT else f"[{connection.host}]:{connection.port}"


def _load_config(node: Node) -> fabric.Config:
    try:
        path = None if node.ssh_config is None else Path(node.ssh_config).expanduser()
        text = None if path is None else path.read_text()
        resolved = _resolve_ssh_config(node.name, node.jump, path)
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


def _resolve_ssh_config(host: str, jump: str | None, path: Path | None) -> paramiko.SSHConfig | None:
    """What `ssh -G` says of a host and of all hosts that it is reached through; None where there is no OpenSSH.

    Args:
        host: as a person would name it to `ssh`.
        jump: the jump host that is named for it, if any.
        path: the configuration file; None is the user's and the system's.

    Raises:
        paramiko.ConfigParseError: OpenSSH refuses the configuration.
    """
    program = shutil.which("ssh")
    if program is None:
        return None
    command = [program, "-G", *(["-F", str(path)] if path is not None else []), "--"]
    left = [host, *_hops(jump)]
    settings: dict[str, list[tuple[str, str]]] = {}
    while left:
        name = left.pop()
        if name not in settings:
            settings[name] = _ask(command, name)
            left += _hops(dict(settings[name]).get("proxyjump"))
    lines = (f"Host {name}\n" + "".join(f" {key} {value}\n" for key, value in of) for name, of in settings.items())
    return paramiko.SSHConfig.from_text("".join(lines))


def _ask(command: list[str], host: str) -> list[tuple[str, str]]:
    try:
        ended = subprocess.run(
            [*command, host],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_CONFIG_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise paramiko.ConfigParseError(f"ssh -G {host} did not answer within {_CONFIG_DEADLINE_S:.0f} s") from None
    if ended.returncode != 0:
        raise paramiko.ConfigParseError(" ".join(ended.stderr.split()) or f"ssh -G {host} failed")
    found = [(key, value) for key, _, value in (line.partition(" ") for line in ended.stdout.splitlines())]
    told = [(key, value) for key, value in found if key in _READ and value != _UNSET]
    only = ("identitiesonly", "yes") in told
    return [(key, value) for key, value in told if not _is_default(key, value) or (only and key == "identityfile")]


def _is_default(key: str, value: str) -> bool:
    """Whether it is what holds without a configuration, too: those keys are looked for anyway, and tried once."""
    if key == "identityfile":
        return _DEFAULT_KEY.fullmatch(value) is not None
    own = Path(pwd.getpwuid(os.getuid()).pw_dir) / ".ssh" / "known_hosts"
    return key == "userknownhostsfile" and value == f"{own} {own}2"


def _hops(jump: str | None) -> list[str]:
    hops = [] if jump is None or jump == _UNSET else jump.split(",")
    return [host for host in (derive_shorthand(hop)["host"] for hop in hops) if host]
