"""TCP ports of this node: which are taken, and by whom as far as /proc shows it."""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import socket
from collections.abc import Collection, Iterable
from typing import NamedTuple, Optional

__all__ = ["Listener", "find_port_users", "find_taken_ports", "parse_tcp_table"]

_LISTEN = "0A"


class Listener(NamedTuple):
    """A row of /proc/net/tcp: a socket that listens on a port, and the user whose it is."""

    port: int
    uid: int
    inode: int


def find_taken_ports(ports: Iterable[int]) -> list[int]:
    """Those that a rendezvous could not bind now, on any address.

    Raises:
        OSError: a port may not be bound at all (below 1024, for an ordinary user).
    """
    return [port for port in ports if not _can_bind(port)]


def find_port_users(ports: Collection[int]) -> dict[int, str]:
    """Who listens on the ports: `python3 (pid 123, user alice)`; of other users' processes only the user shows."""
    listeners = {listener.port: listener for listener in _read_listeners() if listener.port in ports}
    pids = _find_socket_owners({listener.inode for listener in listeners.values()})
    return {port: _describe(listeners.get(port), pids) for port in ports}


def parse_tcp_table(text: str) -> list[Listener]:
    """The listening sockets in the text of /proc/net/tcp or tcp6 (proc(5))."""
    rows = (line.split() for line in text.splitlines()[1:])
    return [Listener(int(row[1].rpartition(":")[2], 16), int(row[7]), int(row[9])) for row in rows if row[3] == _LISTEN]


def _can_bind(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As torch's store does: remains of closed connections do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))  # noqa: S104 - bound for a moment, and never listened on
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True


def _read_listeners() -> list[Listener]:
    listeners: list[Listener] = []
    for name in ("tcp6", "tcp"):
        # A kernel without IPv6 has one table only.
        with contextlib.suppress(OSError), open(f"/proc/net/{name}", encoding="ascii") as file:
            listeners += parse_tcp_table(file.read())
    return listeners


def _find_socket_owners(inodes: set[int]) -> dict[int, int]:
    """Pid by inode, for the sockets whose owner we may see."""
    names = {f"socket:[{inode}]": inode for inode in inodes}
    owners: dict[int, int] = {}
    for pid in filter(str.isdigit, os.listdir("/proc") if names else ()):
        for link in _read_links(f"/proc/{pid}/fd"):
            if link in names:
                owners.setdefault(names[link], int(pid))
    return owners


def _read_links(folder: str) -> list[str]:
    links: list[str] = []
    # Another user's process, or one that has just ended.
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                links.append(os.readlink(os.path.join(folder, name)))
    return links


def _describe(listener: Optional[Listener], pids: dict[int, int]) -> str:
    if listener is None:
        return "a process that cannot be seen"
    try:
        user = pwd.getpwuid(listener.uid).pw_name
    except KeyError:
        user = str(listener.uid)
    pid = pids.get(listener.inode)
    if pid is None:
        return f"a process of user {user}"
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            command = file.read().strip()
    except OSError:
        command = "a process"
    return f"{command} (pid {pid}, user {user})"
