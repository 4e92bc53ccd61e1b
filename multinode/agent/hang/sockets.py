"""The TCP connections of one process: to whom, in what state, and what its queues hold (proc(5), proc_net_tcp)."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Collection
from typing import NamedTuple

from ..channel import Record

__all__ = ["Row", "describe_sockets", "parse_connections"]

_STATES = {"01": "established", "02": "connecting", "03": "connecting"}
_MOST_LISTED = 32
_MOST_FILES = 4096
_TABLE_BYTES = 1 << 20


class Row(NamedTuple):
    """One connection.

    Attributes:
        state: `established` or `connecting`.
        peer: `10.0.0.2:29500`.
        send_queue_bytes: sent and not acknowledged, or not sent yet.
        receive_queue_bytes: arrived and not read by the process.
        inode: of the socket.
    """

    state: str
    peer: str
    send_queue_bytes: int
    receive_queue_bytes: int
    inode: int


def describe_sockets(pid: int) -> Record:
    """Counts of the process's connections, and the fullest of them.

    Raises:
        OSError: they may not be seen, or the process is gone.
    """
    inodes = _socket_inodes(pid)
    rows: list[Row] = []
    for name in ("tcp", "tcp6"):
        # A kernel without IPv6 has one table only.
        with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/net/{name}", encoding="ascii") as file:
            rows += parse_connections(file.read(_TABLE_BYTES), inodes)
    rows.sort(key=lambda row: (row.state == "established", -row.send_queue_bytes - row.receive_queue_bytes))
    return {
        "established": sum(row.state == "established" for row in rows),
        "connecting": sum(row.state == "connecting" for row in rows),
        "listed": [
            {
                "state": row.state,
                "peer": row.peer,
                "send_queue_bytes": row.send_queue_bytes,
                "receive_queue_bytes": row.receive_queue_bytes,
            }
            for row in rows[:_MOST_LISTED]
        ],
    }


def parse_connections(table: str, inodes: Collection[int]) -> list[Row]:
    """The rows of /proc/PID/net/tcp or tcp6 that belong to these sockets; a torn last line is passed over."""
    found = []
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 10 or fields[3] not in _STATES or int(fields[9]) not in inodes:  # noqa: PLR2004 - proc(5)
            continue
        sent, _, received = fields[4].partition(":")
        found.append(Row(_STATES[fields[3]], _address(fields[2]), int(sent, 16), int(received, 16), int(fields[9])))
    return found


def _address(text: str) -> str:
    """`0200000A:7148` as `10.0.0.2:29000`: each 32-bit word of the address stands in the machine's own byte order."""
    words, _, port = text.partition(":")
    order = "<" if sys.byteorder == "little" else ">"
    packed = b"".join(struct.pack(f"{order}I", int(words[start : start + 8], 16)) for start in range(0, len(words), 8))
    mapped = packed[:12] == b"\0" * 10 + b"\xff\xff"
    if len(packed) == 4 or mapped:  # noqa: PLR2004 - the bytes of an IPv4 address
        return f"{socket.inet_ntop(socket.AF_INET, packed[-4:])}:{int(port, 16)}"
    return f"[{socket.inet_ntop(socket.AF_INET6, packed)}]:{int(port, 16)}"


def _socket_inodes(pid: int) -> set[int]:
    inodes = set()
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder)[:_MOST_FILES]:
        # A descriptor may be closed while we look.
        with contextlib.suppress(OSError):
            link = os.readlink(os.path.join(folder, name))
            if link.startswith("socket:["):
                inodes.add(int(link[8:-1]))
    return inodes
