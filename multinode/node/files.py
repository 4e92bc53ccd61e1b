"""Files: the kernel's below /proc and /sys, any of which may be missing, and our own, which are written atomically."""

from __future__ import annotations

import contextlib
import grp
import json
import os
import pwd
import re
import stat
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional, Union

TABLE_CHARACTERS = 1 << 20
"""Most characters that are read of a table that grows with the machine."""

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
    """The text of a file, stripped; at most its first `most` characters."""
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read(most).strip()


def try_read(path: str, most: int = -1) -> Optional[str]:
    """The text of a file, stripped; None if it cannot be read: its NIC or process is gone, or it is not readable."""
    try:
        return read_text(path, most)
    except (OSError, ValueError):
        return None


def read_number(path: str) -> Optional[int]:
    """The integer in a file; None if it cannot be read, or holds something else."""
    try:
        return int(read_text(path))
    except (OSError, ValueError):
        return None


def read_end(path: Union[str, "os.PathLike[str]"], most: int) -> bytes:
    """The last bytes of a file, at most `most`."""
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most))
        return file.read(most)


def read_object(path: str, most: int, name: str = "it") -> dict[str, Any]:
    """The JSON object in a file that we did not write, of at most `most` bytes.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is larger or holds something else; the message begins with `name`.
    """
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{name} is too large")
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError(f"{name} is {'not JSON, or truncated' if data else 'empty'}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{name} is not a JSON object")  # noqa: TRY004 - a file's content, not an argument's type
    return content


def list_names(folder: str) -> list[str]:
    """Sorted names in a folder; empty if it cannot be listed."""
    try:
        return sorted(os.listdir(folder))
    except (OSError, ValueError):
        return []


def read_mounts(path: str = "/proc/self/mountinfo") -> list[Mount]:
    """Mounts of this process (proc_pid_mountinfo(5)); lines that are cut off or unknown are skipped."""
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
    """The file of each counter of an interface or an RDMA port, by field; and the bytes per unit of the counters."""
    device, _, port = name.rpartition("/")
    if device:
        folder = "%s/infiniband/%s/ports/%s/counters" % (classes, device, port)
        return {field: "%s/%s" % (folder, file) for field, file in _RDMA_FIELDS.items()}, _RDMA_WORD_BYTES
    return {field: "%s/net/%s/statistics/%s" % (classes, name, field) for field in _NET_FIELDS}, 1


def _unescape(text: str) -> str:
    """Decode a path of mountinfo: the kernel writes blanks as octal numbers."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


def describe_stranger(path: Union[str, "os.PathLike[str]"]) -> Optional[str]:
    """Who else could have written a file, as in `is owned by user alice, mode 0644`; None if only we or root could.

    The owner's private group may write, as some systems create one per user. Under sudo, the invoking user counts as
    us. Both a symbolic link and its target are checked. sshd's StrictModes checks ~/.ssh in the same way.
    """
    us = {os.getuid(), 0} | _sudo_user()
    link, target = os.lstat(path), os.stat(path)
    for status in (link, target):
        if status.st_uid not in us:
            return f"is owned by user {user_name(status.st_uid)}, mode {stat.S_IMODE(status.st_mode):04o}"
    if target.st_mode & stat.S_IWOTH or (target.st_mode & stat.S_IWGRP and not _is_private(target)):
        mode = stat.S_IMODE(target.st_mode)
        return f"is writable by others: owned by user {user_name(target.st_uid)}, mode {mode:04o}"
    return None


def user_name(uid: int) -> str:
    """The user's name, or the number if the system has no name for it."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def replace_file(path: Union[str, "os.PathLike[str]"], data: bytes, *, sync: bool = False) -> None:
    """Replace a file atomically. If several processes do so at once, the last one wins.

    Args:
        path: the file.
        data: its new content.
        sync: whether to wait until it is on the disk.
    """
    folder, name = os.path.split(path)
    partial = os.path.join(folder, f".{name}.{os.urandom(8).hex()}.partial")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def open_lines(path: str) -> int:
    """Open a file of lines for appending; returns the descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    size = os.fstat(descriptor).st_size
    # A writer that was killed may have left half a line; the next line must not continue it.
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")
    return descriptor


def write_lines(descriptor: int, data: bytes) -> None:
    """Append whole lines to a file of `open_lines`; if that fails, half a line is cut off again."""
    before = os.fstat(descriptor).st_size
    written = 0
    try:
        while written < len(data):
            written += os.write(descriptor, data[written:])
    except OSError:
        whole = data.rfind(b"\n", 0, written) + 1
        if whole < written:
            os.ftruncate(descriptor, before + whole)
        raise


def append_lines(path: str, data: bytes) -> None:
    """Append whole lines to a file that is not kept open; raises OSError."""
    descriptor = open_lines(path)
    try:
        write_lines(descriptor, data)
    finally:
        os.close(descriptor)


def _sudo_user() -> set[int]:
    """The user who became root by sudo, and who could run anything as root anyway."""
    text = os.environ.get("SUDO_UID", "")
    return {int(text)} if os.getuid() == 0 and text.isdecimal() else set()


def _is_private(status: os.stat_result) -> bool:
    try:
        user, group = pwd.getpwuid(status.st_uid), grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    return group.gr_gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
