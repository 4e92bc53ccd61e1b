"""SSH through the system's `ssh`: one persistent connection per node (a master), with a session per command.

Configuration, keys, host keys and second factors are up to OpenSSH. A master of the user is used, and never closed;
otherwise ours, which closes when the command ends, or a minute after the controller is killed. A jump host has a master
of its own, so that any number of nodes behind it costs one login there.
"""

from __future__ import annotations

import binascii
import contextlib
import hashlib
import itertools
import logging
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from multinode.cluster.cluster import Node
from multinode.cluster.quoting import destination, ssh_words
from multinode.errors import ContactLost, MultinodeError, NodeError, UsageError
from multinode.transport import refusals
from multinode.transport.base import Transport, fan_out, held, time_left
from multinode.transport.local import LocalStream, ask_program, start_piped

_LOG = logging.getLogger(__name__)

# sshd's ClientAliveInterval is 0 by default, so a dropped link shows only if we ask.
_ALIVE = ("ServerAliveInterval=15", "ServerAliveCountMax=3")
# A master without sessions closes by itself, also after the controller was killed, long before a lease expires.
_PERSIST_S = 60
# Overrides of the configuration; a terminal is never asked.
_PLAIN = (
    "BatchMode=yes ClearAllForwardings=yes ControlPersist=no EscapeChar=none ForwardAgent=no ForwardX11=no "
    "LogLevel=DEBUG1 PermitLocalCommand=no RequestTTY=no Tunnel=no UpdateHostKeys=no VisualHostKey=no"
)
# Overrides that releases before 7.6 and 8.7 do not know.
_NEWER = "RemoteCommand=none ForkAfterAuthentication=no SessionType=default StdinNull=no"
# A session that its master rejects would log in again by itself.
_NO_LOGIN = "ProxyCommand=exit 1"
# TCP with sshd's banner, key exchange, authentication, and as long again for LDAP.
_STAGES = 4
# sshd drops logins when 10 are in progress (MaxStartups 10:30:100), and a ProxyCommand may lead all to one host.
_LOGINS_BY_COMMAND = 8
# How long an unreachable jump host is not retried for the next node behind it.
_GATE_FAILED_S = 15.0
# A Unix socket's path holds 107 bytes, and ssh appends 17 while creating it.
_MOST_PATH_BYTES = 90
_QUERY_S = 10.0
_END_S = 5.0
# A session without confirmation or output by then is on a dead connection.
_SILENT_S = 3.0
# A timeout of 0 would mean none.
_LEAST_S = 0.01
_SSH_FAILED = 255
_SSH_PORT = "22"
_OWN_LINE = re.compile(r"^(?!debug\d: |OpenSSH_|Warning: Permanently added|Authenticated to |\s*$).*$", re.MULTILINE)

_KEYS_AGREED = "SSH2_MSG_NEWKEYS received"
# The first line of a server without an SSH banner; sshd itself may say that it is full.
_NO_SSHD = re.compile(r"banner line 0: (?!.*(?:MaxStartups|Not allowed))")


def find_ssh() -> str | None:
    """The `ssh` program of this machine; None if missing."""
    return shutil.which("ssh")


class _Settings(NamedTuple):
    """OpenSSH's settings for a node (`ssh -G`), as far as needed."""

    hostname: str = ""
    port: str = ""
    user: str = ""
    proxyjump: str = "none"
    proxycommand: str = "none"
    controlpath: str = "none"
    ignoreunknown: str = ""
    stricthostkeychecking: str = ""
    userknownhostsfile: str = ""
    hostkeyalias: str = ""

    @property
    def where(self) -> str:
        return f"{self.hostname} port {self.port}"

    @property
    def known_name(self) -> str:
        """What known_hosts has it under."""
        name = self.hostkeyalias if self.hostkeyalias not in {"", "none"} else self.hostname
        return name if self.port == _SSH_PORT else f"[{name}]:{self.port}"


class _Link:
    """The way to a node or jump host: a connection shared by sessions, once open.

    Attributes:
        lock: held while it is opened.
        path: the master's socket; None before.
        is_own: whether the master is ours.
        options: of `ssh`, for every session.
        settings: of the node; None before.
        log: the master's output; None for a master of the user.
        gate: the jump host, its link, and the length of its log when this one started to open.
        failed: why it could not be opened, and when.
    """

    path: Path | None = None
    is_own = True
    settings: _Settings | None = None
    log: Path | None = None
    gate: tuple[Node, _Link, int] | None = None
    failed: tuple[MultinodeError, float] | None = None

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.options: list[str] = []

    @property
    def is_open(self) -> bool:
        """Whether a master listens there."""
        return self.path is not None and _listens(self.path)


class OpensshTransport(Transport):
    """Runs commands on nodes through `ssh`. Connections are opened at first use and kept.

    Args:
        connect_timeout_s: timeout of the TCP connection and sshd's banner; four times that for a login.
    """

    def __init__(self, *, connect_timeout_s: float = 10.0) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._lock = threading.Lock()
        self._links: dict[tuple[object, ...], _Link] = {}
        self._logins = threading.Semaphore(fan_out())
        self._command_logins = threading.Semaphore(_LOGINS_BY_COMMAND)
        self._under_way: set[subprocess.Popen[bytes]] = set()
        self._sessions: list[subprocess.Popen[bytes]] = []
        self._numbers = itertools.count()
        self._directory: Path | None = None
        self._is_closed = False

    def open(self, node: Node, command: str, *, deadline_s: float) -> OpensshStream:
        """Start a command and communicate with it. See `Transport.open`."""
        end = time.monotonic() + deadline_s
        link = self._connect(node, end)
        log = self._file(node, ".log")
        try:
            process = start_piped([*_session(node, link, log), command], _environment())
        except OSError as error:
            raise _no_ssh(error) from error
        with self._lock:
            self._sessions = [session for session in self._sessions if session.poll() is None] + [process]
        return OpensshStream(process, node, link, log, send_deadline_s=deadline_s)

    def close(self) -> None:
        """Close our connections, including those being opened, and wait for all processes that we started."""
        with self._lock:
            self._is_closed = True
            links = [link for link in self._links.values() if link.path is not None and link.is_own]
            self._links.clear()
            for process in self._under_way:
                _kill(process)
        for process in [_end_master(link) for link in links]:
            _wait(process, _END_S)
        end = time.monotonic() + _END_S
        while any(link.path is not None and link.path.exists() for link in links) and time.monotonic() < end:
            time.sleep(_LEAST_S)
        for process in self._sessions:
            # One on the user's connection, which stays open.
            process.terminate()
            _wait(process, _END_S)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def verifies(self, node: Node) -> bool:
        """Whether its host key is compared with a known one. See `Transport.verifies`."""
        node = _expanded(node)
        settings = self._link(node).settings or self._settings(node)
        return settings.stricthostkeychecking not in {"false", "no", "off"}

    def _connect(self, node: Node, end: float) -> _Link:
        """The open connection, or a new one by `end` on the monotonic clock; waits for another thread that opens it."""
        node = _expanded(node)
        link = self._link(node)
        with held(link.lock, end, refusals.STILL_OPENING.error(node, where=node.name)):
            if not link.is_open:
                self._open_link(node, link, end)
        return link

    def _connect_gate(self, gate: Node, node: Node, end: float) -> _Link:
        """The connection to a jump host, open or new; nodes behind it share its failure."""
        link = self._link(gate)
        with held(link.lock, end, refusals.STILL_OPENING.error(node, where=node.name)):
            try:
                if link.failed is not None and time.monotonic() < link.failed[1] + _GATE_FAILED_S:
                    raise link.failed[0]
                if not link.is_open:
                    self._open_link(gate, link, end)
            except UsageError as error:
                raise type(error)(error.message, node=node.name, hint=error.hint_lines) from error
            except NodeError as error:
                if link.failed is None or link.failed[0] is not error:
                    link.failed = (error, time.monotonic())
                raise refusals.of_jump_host(error, gate, node) from error
        return link

    def _link(self, node: Node) -> _Link:
        key = (node.name, node.user, node.port, node.key, node.jump, node.ssh_config)
        with self._lock:
            return self._links.setdefault(key, _Link())

    def _open_link(self, node: Node, link: _Link, end: float) -> None:
        settings = link.settings = self._settings(node)
        unknown = ",".join([*filter(None, [settings.ignoreunknown]), *re.findall(r"(\w+)=", _NEWER)])
        words = ssh_words(msgspec.structs.replace(node, jump=None), "ssh")[1:]
        link.options = [*words, *_options(f"IgnoreUnknown={unknown}", *_PLAIN.split(), *_NEWER.split())]
        if settings.controlpath != "none" and self._has_master(node, Path(settings.controlpath)):
            link.path, link.is_own = Path(settings.controlpath), False
            return
        link.path, link.is_own, link.log = None, True, self._file(node, ".log")
        through: list[str] = []
        gate = _gate(node, settings)
        link.gate = None
        if gate is not None:
            way = self._connect_gate(gate, node, end)
            link.gate = gate, way, len(_read(way.log))
            through = ["-o", f"ProxyCommand={_through(gate, way)}", "-o", "ProxyUseFdpass=no"]
        path = self._file(node, ".s")
        began = time.monotonic()
        self._log_in(node, link, settings, ["-S", str(path), *through], end)
        _LOG.debug("%s: logged in to %s in %.2f s", node.name, settings.where, time.monotonic() - began)
        link.path = path
        with self._lock:
            closed = self._is_closed
        if closed:
            _wait(_end_master(link), _END_S)
            raise ContactLost("the connection was closed while opening", node=node.name)
        if not link.is_open:
            raise ContactLost("the SSH connection closed right after opening", node=node.name)

    def _log_in(self, node: Node, link: _Link, settings: _Settings, words: Sequence[str], end: float) -> None:
        """Start a master, which goes into the background after the login."""
        timeout_s = max(1, math.ceil(min(self._connect_timeout_s, time_left(end))))
        own = _options(f"ConnectTimeout={timeout_s}", *_ALIVE, "ControlMaster=yes", f"ControlPersist={_PERSIST_S}")
        argv = ["ssh", "-f", "-N", "-T", "-E", str(link.log), *own, *words, *link.options, "--", destination(node)]
        places = [self._logins] + ([self._command_logins] if settings.proxycommand != "none" else [])
        with contextlib.ExitStack() as taken:
            for place in places:
                taken.enter_context(held(place, end, refusals.STILL_OPENING.error(node, where=node.name)))
            with self._lock:
                if self._is_closed:
                    raise ContactLost("the connection was closed while opening", node=node.name)
                process = _start(argv)
                self._under_way.add(process)
            code = _wait(process, min(time_left(end, _LEAST_S), _STAGES * self._connect_timeout_s))
            with self._lock:
                self._under_way.discard(process)
        if code != 0:
            if self._is_closed:
                raise ContactLost("the connection was closed while opening", node=node.name)
            raise _explain(node, link, settings, is_late=code == -signal.SIGKILL)

    def _has_master(self, node: Node, path: Path) -> bool:
        if not path.is_socket():
            return False
        argv = ["ssh", *ssh_words(msgspec.structs.replace(node, jump=None), "ssh")[1:], "-S", str(path), "-O", "check"]
        return _ask([*argv, "--", destination(node)]).returncode == 0

    def _settings(self, node: Node) -> _Settings:
        """The output of `ssh -G` for a node."""
        ended = _ask(["ssh", "-G", *ssh_words(node, "ssh")[1:], "--", destination(node)])
        if ended.returncode != 0:
            words = " ".join(ended.stderr.split()) or "ssh -G failed"
            raise UsageError(
                f"ssh cannot parse the SSH configuration: {words}",
                node=node.name,
                hint="correct its line in the hostfile, or the SSH configuration",
            )
        pairs = (line.partition(" ") for line in ended.stdout.splitlines())
        return _Settings(**{name: value for name, _, value in pairs if name in _Settings._fields})

    def _file(self, node: Node, suffix: str) -> Path:
        with self._lock:
            if self._is_closed:
                raise ContactLost("the connection was closed while opening", node=node.name)
            if self._directory is None or not self._directory.is_dir():
                self._directory = _make_directory(os.environ)
            return self._directory / f"{next(self._numbers)}{suffix}"


class OpensshStream(LocalStream):
    """A running remote command, in its own session. See `Stream`.

    Args:
        process: ssh, with pipes.
        node: where the command runs.
        link: the connection of the session.
        log: the output of ssh itself.
        send_deadline_s: as for LocalStream.
    """

    client_end_s = 10.0

    def __init__(
        self, process: subprocess.Popen[bytes], node: Node, link: _Link, log: Path, *, send_deadline_s: float
    ) -> None:
        super().__init__(process, node.name, send_deadline_s=send_deadline_s)
        self._to = node
        self._link = link
        self._path = link.path
        self._log = log
        self._silent_from = time.monotonic() + _SILENT_S

    def close(self) -> None:
        """Release it. See `Stream.close`."""
        super().close()
        self._log.unlink(missing_ok=True)

    def _receive(self, end: float) -> bool:
        try:
            return super()._receive(end)
        except ContactLost as error:
            if time.monotonic() < self._silent_from or "master session id" in _read(self._log):
                raise
            # No other session gets an answer on it either.
            if self._link.path == self._path:
                if self._link.is_own:
                    _wait(_end_master(self._link), _END_S)
                self._link.path = None
            raise ContactLost("the SSH connection failed: sshd did not answer in time", node=self._node) from error

    def _wait(self, end: float) -> int:
        try:
            exit_code = super()._wait(end)
        except ContactLost as error:
            if self._process.poll() is None:
                raise
            raise _lost(self._node) from error
        if exit_code != _SSH_FAILED:
            return exit_code
        words = "\n".join(_OWN_LINE.findall(_read(self._log)))
        refusal = refusals.find_refusal(words, (refusals.MAX_SESSIONS, refusals.NO_EXEC))
        if refusal is not None:
            raise refusal[0].error(self._to)
        # A command may exit with 255, too: then ssh prints nothing, and the connection stands.
        if words or self._path is None or not _listens(self._path):
            raise _lost(self._node)
        return exit_code


def _gate(node: Node, settings: _Settings) -> Node | None:
    jump = node.jump or settings.proxyjump
    if jump in {"none", ""} or settings.proxycommand != "none":
        return None
    *before, last = jump.split(",")
    match = re.fullmatch(
        r"(?:ssh://)?(?:(?P<user>[^@]*)@)?(?P<host>\[[^]]*\]|[^:]*|.*:.*:.*?)(?::(?P<port>\d+))?/?", last
    )
    if match is None:
        raise UsageError(f"{last!r} is not a jump host", node=node.name, hint="jump=[user@]host[:port]")
    host = match["host"].strip("[]")
    if host == node.name:
        raise UsageError(
            f"the SSH configuration uses jump host {host} as its own jump host",
            node=node.name,
            hint=f"exclude it from the ProxyJump lines there: Host * !{host}",
        )
    port = int(match["port"]) if match["port"] else None
    return Node(
        name=host, user=match["user"] or None, port=port, jump=",".join(before) or None, ssh_config=node.ssh_config
    )


def _through(gate: Node, link: _Link) -> str:
    """The command that reaches a node through its jump host's connection; ssh fills in the node."""
    argv = _session(gate, link, Path(os.devnull), "-W", "[%h]:%p")
    return " ".join(shlex.quote(word if word == "[%h]:%p" else word.replace("%", "%%")) for word in argv)


def _options(*options: str) -> list[str]:
    return [word for option in options for word in ("-o", option)]


def _session(node: Node, link: _Link, log: Path, *words: str) -> list[str]:
    options = [*link.options, *_options("ControlMaster=no", _NO_LOGIN)]
    return ["ssh", *options, "-T", "-S", str(link.path), "-E", str(log), *words, "--", destination(node)]


def _explain(node: Node, link: _Link, settings: _Settings, *, is_late: bool) -> MultinodeError:
    log = _read(link.log)
    words = "\n".join(_OWN_LINE.findall(log))
    offered = re.findall(r"Offering public key: (.+?) [A-Z0-9-]+ SHA256:", log)
    fingerprint = re.search(r"Server host key: (\S+ \S+)", log)
    offending = re.search(r"Offending \S+ key in (.+):(\d+)", log)
    values: dict[str, object] = {
        "where": settings.where,
        "host": settings.hostname,
        "user": settings.user,
        "fingerprint": fingerprint[1] if fingerprint else "it showed none",
        "shown": fingerprint[1].partition(" ")[2] if fingerprint else "another",
        "known": _fingerprint(Path(offending[1]), int(offending[2])) if offending else "another",
        "file": shlex.quote(offending[1]) if offending else "~/.ssh/known_hosts",
        "entry": shlex.quote(settings.known_name),
        "tried": ", ".join(dict.fromkeys(offered)) or "none (no key found)",
        "copy": refusals.copy_command(node),
        "reason": "no reason given",
    }
    if is_late:
        return _late(log).error(node, values)
    match = refusals.find_refusal(words)
    if match is None or (match[0] is refusals.LOGIN_ENDED and _KEYS_AGREED not in log):
        last = words.splitlines()[-1:] or ["ssh exited without a message"]
        return refusals.OTHERWISE.error(node, values, reason=last[0])
    refusal, named = match
    values |= named
    if refusal is refusals.UNKNOWN_KEY:
        refusal, more = _unknown_key(log, settings)
    elif refusal is refusals.REFUSED_KEY:
        refusal, more = _refused_key(log, words)
    elif refusal is refusals.NO_PLACE and link.gate is not None:
        refusal, more = _refused_by_gate(link)
    elif refusal is refusals.FROZEN and link.gate is not None:
        refusal, more = refusals.TIMED_OUT, {}
    elif refusal in {refusals.NO_PLACE, refusals.FROZEN} and _NO_SSHD.search(log):
        refusal, more = refusals.NOT_SSH, {}
    else:
        more = {}
    return refusal.error(node, values, **more)


def _fingerprint(path: Path, number: int) -> str:
    try:
        key = re.search(r"AAAA[\w+/=]+", path.read_text(errors="replace").splitlines()[number - 1])
        digest = hashlib.sha256(binascii.a2b_base64(key[0] if key else "")).digest()
    except (OSError, IndexError, binascii.Error):
        return "another"
    return "SHA256:" + binascii.b2a_base64(digest, newline=False).decode().rstrip("=")


_Found = tuple[refusals.Refusal, Mapping[str, object]]


def _unknown_key(log: str, settings: _Settings) -> _Found:
    invalid = re.search(r"Certificate invalid: (.*)", log)
    if invalid:
        return refusals.BAD_CERTIFICATE, {"reason": invalid[1]}
    if set(settings.userknownhostsfile.split()) <= {os.devnull, "none"}:
        return refusals.KEPT_NOWHERE, {}
    return refusals.UNKNOWN_KEY, {}


def _refused_key(log: str, message: str) -> _Found:
    methods = re.findall(r"Permission denied \(([^)]*)\)", message)[-1]
    words = " and ".join(methods.split(",")) or "another way to log in"
    if "partial success" in log:
        return refusals.SECOND_FACTOR, {"methods": words}
    if "publickey" not in methods.split(","):
        return refusals.NO_KEY_TAKEN, {"methods": words}
    match = refusals.find_refusal(message, (refusals.OPEN_KEY, refusals.BAD_KEY, refusals.AGENT_REFUSED))
    if match is not None:
        return match
    accepted = re.findall(r"Server accepts key: (.+?) [A-Z0-9-]+ SHA256:", log)
    if accepted:
        return refusals.LOCKED_KEY, {"file": shlex.quote(accepted[-1])}
    return refusals.REFUSED_KEY, {}


def _refused_by_gate(link: _Link) -> _Found:
    gate, way, seen = link.gate if link.gate is not None else (None, link, 0)
    values: dict[str, object] = {"gate": gate.name if gate else "", "reason": "no reason given"}
    refusal = refusals.find_refusal(_read(way.log)[seen:], (refusals.FORWARD_REFUSED, refusals.TARGET_REFUSED))
    if refusal is not None:
        return refusal[0], values | refusal[1]
    return (refusals.TARGET_REFUSED if way.log is None else refusals.NO_PLACE), values


def _late(log: str) -> refusals.Refusal:
    if _KEYS_AGREED in log:
        return refusals.SLOW_LOGIN
    if "Connection established" in log:
        return refusals.FROZEN
    if "Connecting to " in log or "Executing proxy command" in log:
        return refusals.TIMED_OUT
    return refusals.NO_ANSWER


def _expanded(node: Node) -> Node:
    paths = {name: getattr(node, name) for name in ("key", "ssh_config")}
    return msgspec.structs.replace(
        node, **{name: str(Path(path).expanduser()) for name, path in paths.items() if path is not None}
    )


def _make_directory(environ: Mapping[str, str]) -> Path:
    """A new private directory for sockets and logs, never in the home directory, which may be on NFS."""
    home = os.path.realpath(Path("~").expanduser()) + os.sep
    reason = "no temporary directory"
    for place in (environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):  # noqa: S108 - a new one of mode 0700 in it
        if not place or (os.path.realpath(place) + os.sep).startswith(home):
            continue
        try:
            made = Path(tempfile.mkdtemp(prefix="mn-", dir=place))
        except OSError as error:
            reason = f"{place}: {error.strerror}"
            continue
        if len(os.fsencode(made / "00000.s")) <= _MOST_PATH_BYTES:
            return made
        made.rmdir()
        reason = f"{place}: its path is too long for a socket"
    raise UsageError(f"cannot create a directory for ssh sockets: {reason}", hint="set TMPDIR")


def _environment() -> dict[str, str]:
    return {**os.environ, "SSH_ASKPASS_REQUIRE": "never"}


def _start(argv: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start ssh without a terminal."""
    null = subprocess.DEVNULL
    try:
        return subprocess.Popen(argv, env=_environment(), stdin=null, stdout=null, stderr=null, start_new_session=True)
    except OSError as error:
        raise _no_ssh(error) from error


def _no_ssh(error: OSError) -> UsageError:
    return UsageError(f"ssh cannot be run: {error.strerror}", hint="install an OpenSSH client")


def _ask(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Ask ssh something that needs no node."""
    try:
        return ask_program(argv, _environment(), deadline_s=_QUERY_S)
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"{shlex.join(argv)} did not answer within {_QUERY_S:.0f} s") from error
    except OSError as error:
        raise _no_ssh(error) from error


def _end_master(link: _Link) -> subprocess.Popen[bytes]:
    return _start(["ssh", "-F", os.devnull, "-S", str(link.path), "-O", "exit", "--", "node"])


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(_END_S)
        try:
            caller.connect(str(path))
        except OSError:
            return False
    return True


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int:
    timer = threading.Timer(limit_s, _kill, (process,))
    timer.daemon = True
    timer.start()
    try:
        return process.wait()
    finally:
        timer.cancel()


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _read(log: Path | None) -> str:
    try:
        return log.read_text(errors="replace") if log is not None else ""
    except OSError:
        return ""


def _lost(node: str) -> ContactLost:
    return ContactLost("the SSH connection was lost before the command finished", node=node)
