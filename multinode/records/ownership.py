"""Who else could have written a file: what another user may have put there does not speak for us."""

from __future__ import annotations

import grp
import os
import pwd
import shlex
import stat
from pathlib import Path


def describe_stranger(path: Path) -> str | None:
    """Who else may have written a file or directory, as `is owned by alice, mode 0644`; None: we, or root, alone.

    A private group of its owner may write, as some systems make one for each user. With sudo, the user who typed it
    counts as we do. Of a symbolic link both it and its target count.

    Raises:
        OSError: there is none.
    """
    us = {os.getuid(), 0} | _sudo_user()
    link, target = path.lstat(), path.stat()
    for status in (link, target):
        if status.st_uid not in us:
            return f"is owned by {_user_name(status.st_uid)}, mode {stat.S_IMODE(status.st_mode):04o}"
    if target.st_mode & stat.S_IWOTH or (target.st_mode & stat.S_IWGRP and not _is_private(target)):
        mode = stat.S_IMODE(target.st_mode)
        return f"can be written by others: owned by {_user_name(target.st_uid)}, mode {mode:04o}"
    return None


def ownership_fix(path: Path) -> str:
    """The command that makes a file or directory ours alone."""
    whole = shlex.quote(str(path))
    return f"if you trust what it says: sudo chown -R {_user_name(os.getuid())} {whole} && chmod -R go-w {whole}"


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


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
