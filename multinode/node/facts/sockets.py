"""TCP sockets of this node: which ports are taken and by whom, and the connections of one process (proc_net_tcp(5))."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import sys
from collections.abc import Collection, Iterator
from typing import NamedTuple, Optional

from ..channel import Record
from ..kernel_files import TABLE_CHARACTERS, try_read
from ..own_files import user_name
from ..processes import command_of, list_pids

# By their numbers in the kernel's table.
CONNECTED = {"01": "established", "02": "connecting", "03": "connecting"}
LISTENING = {"0A": "listening"}

_MOST_LISTED = 32
_MOST_FILES = 4096
_SOCKET = "socket:["


class Row(NamedTuple):
    """One socket."""

    state: str
    port: int
    peer: str  # `10.0.0.2:29500`
    send_queue_bytes: int  # sent and not acknowledged, or not sent yet
    receive_queue_bytes: int  # arrived and not read by the process
    uid: int
    inode: int  # by which processes hold it


def is_port_taken(port: int) -> bool:
    """Whether a rendezvous could not bind it now, on any address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As torch's store does: remains of closed connections do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))  # noqa: S104 - bound for a moment, and never listened on
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return True
    return False


def find_port_users(ports: Collection[int]) -> dict[int, str]:
    """Who listens on the ports: `python3 (pid 123, user alice)`; of other users' processes only the user shows."""
    # Both tables may hold rows of one port; what listens on IPv4 goes before.
    tables = [parse_table(try_read(f"/proc/net/{name}", TABLE_CHARACTERS) or "", LISTENING) for name in ("tcp6", "tcp")]
    listeners = {row.port: row for rows in tables for row in rows if row.port in ports}
    wanted = {row.inode for row in listeners.values()}
    pids: dict[int, int] = {}
    for pid in sorted(list_pids()) if wanted else ():
        for inode in wanted & _socket_inodes(pid):
            pids.setdefault(inode, pid)
    return {port: _describe_user(listeners.get(port), pids) for port in ports}


def describe_connections(pid: int) -> Record:
    """Counts of a process's connections, and the fullest of them."""
    # Another user's process is told from one that has no connections.
    os.listdir(f"/proc/{pid}/fd")
    inodes = _socket_inodes(pid)
    # A kernel without IPv6 has one table only.
    tables = [try_read(f"/proc/{pid}/net/{name}", TABLE_CHARACTERS) or "" for name in ("tcp", "tcp6")]
    rows = [row for table in tables for row in parse_table(table, CONNECTED) if row.inode in inodes]
    rows.sort(key=lambda row: (row.state == "established", -row.send_queue_bytes - row.receive_queue_bytes))
    listed = ("state", "peer", "send_queue_bytes", "receive_queue_bytes")
    return {
        "established": sum(row.state == "established" for row in rows),
        "connecting": sum(row.state == "connecting" for row in rows),
        "listed": [{name: getattr(row, name) for name in listed} for row in rows[:_MOST_LISTED]],
    }


def parse_table(text: str, states: dict[str, str]) -> Iterator[Row]:
    """The rows of /proc/net/tcp or tcp6 in one of these states; a torn last line is passed over."""
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) >= 10 and fields[3] in states:  # noqa: PLR2004 - up to the inode
            sent, _, received = fields[4].partition(":")
            port = int(fields[1].rpartition(":")[2], 16)
            queues = int(sent, 16), int(received, 16)
            yield Row(states[fields[3]], port, _address(fields[2]), *queues, int(fields[7]), int(fields[9]))


def _socket_inodes(pid: int) -> set[int]:
    """Of the sockets that a process holds; none where it is gone, or another user's."""
    inodes = set()
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder)[:_MOST_FILES]:
            # A descriptor may be closed while we look.
            with contextlib.suppress(OSError):
                link = os.readlink(os.path.join(folder, name))
                if link.startswith(_SOCKET):
                    inodes.add(int(link[len(_SOCKET) : -1]))
    return inodes


def _address(text: str) -> str:
    """`0200000A:7148` as `10.0.0.2:29000`: each 32-bit word of the address stands in the machine's own byte order."""
    words, _, port = text.partition(":")
    order = "<" if sys.byteorder == "little" else ">"
    packed = b"".join(struct.pack(f"{order}I", int(words[start : start + 8], 16)) for start in range(0, len(words), 8))
    mapped = packed[:12] == b"\0" * 10 + b"\xff\xff"
    if len(packed) == 4 or mapped:  # noqa: PLR2004 - the bytes of an IPv4 address
        return f"{socket.inet_ntop(socket.AF_INET, packed[-4:])}:{int(port, 16)}"
    return f"[{socket.inet_ntop(socket.AF_INET6, packed)}]:{int(port, 16)}"


def _describe_user(listener: Optional[Row], pids: dict[int, int]) -> str:
    if listener is None:
        return "a process that cannot be seen"
    user = user_name(listener.uid)
    pid = pids.get(listener.inode)
    if pid is None:
        return f"a process of user {user}"
    return f"{command_of(pid) or 'a process'} (pid {pid}, user {user})"
