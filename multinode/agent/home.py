"""~/.multinode: nobody but us may write there, as sshd's StrictModes has it for ~/.ssh."""

from __future__ import annotations

import os
import stat

from .channel import AgentError
from .run.processes import user_name

# What runs as us lies in `agent` and `code`, and what our runs obey in `runs`.
_FOLDERS = ("", "agent", "runs", "code")


def check_home() -> None:
    """See that what we run from, and what our runs are steered by, is ours or root's to write, as sshd's StrictModes.

    Raises:
        AgentError: somebody else may write there.
    """
    for name in _FOLDERS:
        path = os.path.join(os.path.expanduser("~"), ".multinode", name).rstrip("/")
        try:
            # A link may lead to where there is room; then both count.
            link, folder = os.lstat(path), os.stat(path)
        except OSError:
            continue
        for found in (link, folder):
            if found.st_uid not in {os.getuid(), 0}:
                raise AgentError(
                    f"{path} belongs to user {user_name(found.st_uid)}, who could run programs as you",
                    hint=f"sudo chown -R {user_name(os.getuid())} {path}, or remove it",
                )
        if folder.st_mode & stat.S_IWOTH or (folder.st_mode & stat.S_IWGRP and not _is_ours_alone(folder.st_gid)):
            raise AgentError(
                f"{path} can be written by others (mode {stat.S_IMODE(folder.st_mode):04o}), who could run "
                "programs as you",
                hint=f"check that nobody changed it: ls -lR {path}; then: chmod go-w {path}",
            )


def _is_ours_alone(gid: int) -> bool:
    """Whether it is the private group of our user, as some systems make one for each."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
