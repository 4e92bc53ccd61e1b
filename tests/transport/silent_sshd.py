"""An SSH server that falls silent at a step of the protocol and keeps its connections open, as a frozen one does."""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import paramiko

from multinode.cluster.cluster import Node

from .sshd import make_key


class _Host(paramiko.ServerInterface):
    """Lets everybody in and runs nothing; `reach` is called at each step that is come to."""

    def __init__(self, reach: Callable[[str], None]) -> None:
        self._reach = reach

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        del username, key
        self._reach("auth")
        return paramiko.common.AUTH_SUCCESSFUL

    def get_allowed_auths(self, username: str) -> str:
        del username
        return "publickey"

    def check_channel_request(self, kind: str, chanid: int) -> int:
        del kind, chanid
        self._reach("channel")
        return paramiko.common.OPEN_SUCCEEDED

    def check_channel_direct_tcpip_request(
        self, chanid: int, origin: tuple[str, int], destination: tuple[str, int]
    ) -> int:
        del chanid, origin, destination
        self._reach("forward")
        return paramiko.common.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        del channel, command
        self._reach("exec")
        return True


class _Connection(paramiko.Transport):
    """The server's end of one connection."""

    def __init__(self, sock: socket.socket, reach: Callable[[str], None]) -> None:
        super().__init__(sock)
        self._reach = reach

    def _negotiate_keys(self, m: paramiko.Message) -> None:
        self._reach("key exchange")
        super()._negotiate_keys(m)  # type: ignore[misc]  # not in the stubs: paramiko's own step


class SilentSshd:
    """It goes silent at `step`: `output` runs a command that prints nothing, `input` one that reads nothing either."""

    def __init__(self, step: str, folder: Path) -> None:
        self._step = step
        self._over = threading.Event()
        # Somebody has come to where it is silent.
        self.was_met = threading.Event()
        self._key = paramiko.ECDSAKey.generate()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.logins = 0
        self._connections: list[socket.socket | paramiko.Transport] = []
        self._thread = threading.Thread(target=self._accept, name="silent-sshd", daemon=True)
        self.port: int = self._listener.getsockname()[1]
        self._folder = folder

    def node(self) -> Node:
        """A node named `box` whose SSH configuration leads here, with a key that is let in."""
        folder = self._folder
        key = folder / "key"
        make_key(key)
        known = f"[127.0.0.1]:{self.port} {self._key.get_name()} {self._key.get_base64()}\n"
        (folder / "known_hosts").write_text(known)
        (folder / "ssh_config").write_text(
            f"Host box jump\n  HostName 127.0.0.1\n  Port {self.port}\n  User anyone\n  IdentityFile {key}\n"
            f"  IdentitiesOnly yes\n  UserKnownHostsFile {folder / 'known_hosts'}\n"
        )
        return Node(name="box", ssh_config=str(folder / "ssh_config"))

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        # Closing alone does not wake who waits for a connection.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.logins += 1
            self._connections.append(sock)
            if self._step == "accept":
                self.was_met.set()
                continue
            if self._step == "banner":
                self.was_met.set()
                sock.sendall(b"SSH-2.0-silent\r\n")
                continue
            transport = _Connection(sock, self._reach)
            transport.add_server_key(self._key)
            self._connections.append(transport)
            transport.start_server(threading.Event(), _Host(functools.partial(self._reach, transport=transport)))

    def _reach(self, step: str, transport: paramiko.Transport | None = None) -> None:
        if step == self._step:
            self.was_met.set()
            self._over.wait()
        if step == "exec" and self._step == "input" and transport is not None:
            # Deaf from the next message on: the answer to this one is still sent.
            transport.packetizer.read_message = self._hear_nothing  # type: ignore[method-assign]  # what a frozen one does

    def _hear_nothing(self) -> tuple[int, paramiko.Message]:
        self._over.wait()
        raise EOFError


@contextmanager
def silent_sshd(step: str, folder: Path) -> Iterator[SilentSshd]:
    """One that is there for the time of a test."""
    server = SilentSshd(step, folder)
    server.start()
    try:
        yield server
    finally:
        server.close()
