"""Files of ours: who may write them besides us; replaced whole or not at all, or added to by whole lines."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from typing import Optional, Union


def describe_stranger(path: Union[str, "os.PathLike[str]"]) -> Optional[str]:
    """Who else could have written a file, as in `is owned by alice, mode 0644`; None if only we or root.

    The owner's private group may write, as some systems create one per user. Under sudo, the invoking user counts as
    us. Of a symbolic link both it and its target count. sshd's StrictModes checks ~/.ssh likewise.
    """
    us = {os.getuid(), 0} | _sudo_user()
    link, target = os.lstat(path), os.stat(path)
    for status in (link, target):
        if status.st_uid not in us:
            return f"is owned by {user_name(status.st_uid)}, mode {stat.S_IMODE(status.st_mode):04o}"
    if target.st_mode & stat.S_IWOTH or (target.st_mode & stat.S_IWGRP and not _is_private(target)):
        mode = stat.S_IMODE(target.st_mode)
        return f"is writable by others: owned by {user_name(target.st_uid)}, mode {mode:04o}"
    return None


def user_name(uid: int) -> str:
    """The user's name, or the number where the system knows none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def replace_file(path: Union[str, "os.PathLike[str]"], data: bytes, *, sync: bool = False) -> None:
    """Put a file in place, all of it or nothing, however many do so at once: the last one wins.

    Args:
        path: the file.
        data: what it then holds.
        sync: whether it is on the disk when this returns.
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
    """A descriptor of a file of lines that is added to."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    size = os.fstat(descriptor).st_size
    # A writer that was killed may have left half a line.
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")
    return descriptor


def write_lines(descriptor: int, data: bytes) -> None:
    """Add lines to such a file, whole ones."""
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
    """Add lines to a file that is not kept open; raises likewise."""
    descriptor = open_lines(path)
    try:
        write_lines(descriptor, data)
    finally:
        os.close(descriptor)


def _sudo_user() -> set[int]:
    """Who became root by sudo, and can have anything run as root."""
    text = os.environ.get("SUDO_UID", "")
    return {int(text)} if os.getuid() == 0 and text.isdecimal() else set()


def _is_private(status: os.stat_result) -> bool:
    try:
        user, group = pwd.getpwuid(status.st_uid), grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    return group.gr_gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
