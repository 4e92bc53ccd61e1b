"""Reading files and folders, those of the kernel below /proc and /sys above all: any of them may not be there."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional, Union

TABLE_CHARACTERS = 1 << 20
"""More of a table that grows with the machine is not read."""

_NET_FIELDS = ("tx_bytes", "rx_bytes", "tx_packets", "rx_packets")
# Counted in words of four bytes (InfiniBand Architecture Specification, PortCounters).
_RDMA_FIELDS = {"tx_bytes": "port_xmit_data", "rx_bytes": "port_rcv_data"}
_RDMA_WORD_BYTES = 4
_OCTAL = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """A mounted file system: where, of which type, from which source, with which options, and which part of it."""

    place: str
    filesystem: str
    device: str
    options: str = ""
    root: str = "/"


def read_text(path: str, most: int = -1) -> str:
    """What a file says, without the blanks around it; of a long one its first `most` characters."""
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read(most).strip()


def try_read(path: str, most: int = -1) -> Optional[str]:
    """The same; None where it cannot be read: a NIC or a process may go meanwhile, and not every file is ours."""
    try:
        return read_text(path, most)
    except (OSError, ValueError):
        return None


def read_number(path: str) -> Optional[int]:
    """The integer that a file says; None where it cannot be read, or says something else."""
    try:
        return int(read_text(path))
    except (OSError, ValueError):
        return None


def read_end(path: Union[str, "os.PathLike[str]"], most: int) -> bytes:
    """The last bytes of a file, at most so many."""
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most))
        return file.read(most)


def read_object(path: str, most: int, what: str = "it") -> dict[str, Any]:
    """The JSON object that a stranger's file holds, of at most so many bytes.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds something else; the message begins with `what`.
    """
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{what} is too large")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError(f"{what} is {'not JSON, or cut' if data else 'empty'}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{what} is not a JSON object")  # noqa: TRY004 - a file's content, not an argument's type
    return found


def list_names(folder: str) -> list[str]:
    """What a folder holds, in order; nothing where it cannot be listed."""
    try:
        return sorted(os.listdir(folder))
    except (OSError, ValueError):
        return []


def read_mounts(path: str = "/proc/self/mountinfo") -> list[Mount]:
    """What is mounted for this process (proc_pid_mountinfo(5)); a line that is cut off or unknown is passed over."""
    mounts = []
    for line in (try_read(path, TABLE_CHARACTERS) or "").splitlines():
        mount, _, source = line.partition(" - ")
        places, about = mount.split(" ")[3:5], source.split(" ")
        if len(places) == 2 and len(about) == 3:  # noqa: PLR2004 - root and place; type, source and options
            root, place, device = map(_unescape, (*places, about[1]))
            mounts.append(Mount(place, about[0], device, about[2], root))
    return mounts


def rdma_ports(classes: str) -> Iterator[tuple[str, str]]:
    """Each port of an RDMA NIC: its name, `device/port`, and its folder."""
    root = classes + "/infiniband"
    for device in list_names(root):
        for port in list_names("%s/%s/ports" % (root, device)):
            yield "%s/%s" % (device, port), "%s/%s/ports/%s" % (root, device, port)


def counter_paths(name: str, classes: str) -> tuple[dict[str, str], int]:
    """By field, the file that counts it, of an interface or an RDMA port; and the bytes that each of its units is."""
    device, _, port = name.rpartition("/")
    if device:
        folder = "%s/infiniband/%s/ports/%s/counters" % (classes, device, port)
        return {field: "%s/%s" % (folder, file) for field, file in _RDMA_FIELDS.items()}, _RDMA_WORD_BYTES
    return {field: "%s/net/%s/statistics/%s" % (classes, name, field) for field in _NET_FIELDS}, 1


def _unescape(text: str) -> str:
    """A path as it is; the kernel writes blanks in it as octal numbers."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)
