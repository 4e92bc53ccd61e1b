"""A real sshd on loopback with throw-away keys, and the SSH configuration that reaches it."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from multinode.cluster.cluster import Node
from tests.warm import free_port

_SSHD = "/usr/sbin/sshd"
_DEADLINE_S = 20.0


class Sshd:
    """One sshd."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder  # its keys and configuration
        self.home = folder / "home"  # the home directory of whoever logs in
        self.port = port  # where it listens
        self.user = getpass.getuser()  # who may log in
        self.home.mkdir()
        make_key(folder / "host_key")
        make_key(folder / "user_key")
        shutil.copy(folder / "user_key.pub", folder / "authorized_keys")

    @property
    def known_hosts_line(self) -> str:
        """The line that makes its host key known."""
        return f"[127.0.0.1]:{self.port} " + (self.folder / "host_key.pub").read_text()

    def node(self, folder: Path, *, known_hosts: str | None = None, key: str = "user_key", settings: str = "") -> Node:
        """A node named `box` whose SSH configuration, written to `folder`, leads here.

        `known_hosts` is that file's text; by default it has our host key. `settings` are further lines.
        """
        (folder / "known_hosts").write_text(self.known_hosts_line if known_hosts is None else known_hosts)
        config = folder / "ssh_config"
        config.write_text(
            f"Host box jump\n  HostName 127.0.0.1\n  Port {self.port}\n  User {self.user}\n"
            f"  IdentityFile {self.folder / key}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {folder / 'known_hosts'}\n{settings}\n"
        )
        return Node(name="box", ssh_config=str(config))


def make_key(path: Path, kind: str = "ed25519") -> None:
    """A key pair at `path` and `path`.pub."""
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", "", "-f", str(path)], check=True, timeout=30)


@contextmanager
def running_sshd(folder: Path, settings: str = "") -> Iterator[Sshd]:
    """An sshd that answers; it and the sessions below it are gone at the end.

    `settings` are lines of its configuration, which come before ours.
    """
    sshd = Sshd(folder, free_port())
    with started(sshd, settings):
        yield sshd


@contextmanager
def started(sshd: Sshd, settings: str = "") -> Iterator[None]:
    """It runs, with these settings, for the time of the block."""
    folder = sshd.folder
    os.makedirs("/run/sshd", exist_ok=True)  # noqa: PTH103 - sshd refuses to start without it
    config = folder / "sshd_config"
    config.write_text(
        f"{settings}\nListenAddress 127.0.0.1\nPort {sshd.port}\nHostKey {folder / 'host_key'}\nPidFile none\n"
        f"AuthorizedKeysFile {folder / 'authorized_keys'}\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\n"
        f"SetEnv HOME={sshd.home}\nMaxSessions 4\n"
    )
    log = folder / "sshd.log"
    with (
        log.open("wb") as output,
        subprocess.Popen([_SSHD, "-D", "-e", "-f", str(config)], stdin=subprocess.DEVNULL, stderr=output) as process,
    ):
        try:
            _wait_for_answer(sshd.port, process, log)
            yield
        finally:
            process.terminate()
            process.wait(_DEADLINE_S)


def _wait_for_answer(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _DEADLINE_S
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                if connection.recv(4) == b"SSH-":
                    return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"sshd does not answer: {log.read_text()}")
