"""Paths of the job on this node: whether they exist, whether they can be written, and which file system holds them."""

from __future__ import annotations

import os
import re
from typing import NamedTuple, Optional

from ..channel import Record

__all__ = ["Mount", "find_mount", "look_at", "parse_mounts", "read_mounts"]

_MOUNTS = "/proc/self/mountinfo"
_MOST_BYTES = 1 << 20
_MOST_CHARACTERS = 1000
_OCTAL = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """A mounted file system: where, of which type, and from which source."""

    place: str
    filesystem: str
    device: str


def look_at(path: str, cwd: str, mounts: list[Mount]) -> Record:
    """The facts of one path; relative ones start at `cwd`."""
    full = os.path.join(cwd, os.path.expanduser(path))
    kind = "directory" if os.path.isdir(full) else "file" if os.path.exists(full) else "missing"
    # Whether something that is missing could be made, and on which disk, is decided where its path begins to exist.
    while not os.path.exists(full):
        full = os.path.dirname(full)
    mount = find_mount(os.path.realpath(full), mounts)
    return {
        "path": path,
        "kind": kind,
        "writable": _is_writable(full) and (kind != "missing" or os.path.isdir(full)),
        "filesystem": mount.filesystem if mount else None,
        "device": mount.device if mount else None,
    }


def read_mounts() -> list[Mount]:
    """The file systems that this process sees; empty where the kernel does not tell."""
    try:
        with open(_MOUNTS, "rb") as file:
            return parse_mounts(file.read(_MOST_BYTES).decode(errors="replace"))
    except OSError:
        return []


def parse_mounts(text: str) -> list[Mount]:
    """Lines of mountinfo (proc_pid_mountinfo(5)); a line that is cut off or unknown is passed over."""
    mounts = []
    for line in text.splitlines():
        fields, _, tail = line.partition(" - ")
        place, source = fields.split(" ")[4:5], tail.split(" ")
        if place and len(source) > 1:
            mounts.append(Mount(_unescape(place[0]), source[0][:_MOST_CHARACTERS], _unescape(source[1])))
    return mounts


def find_mount(full: str, mounts: list[Mount]) -> Optional[Mount]:
    """The file system that holds an absolute path without links: the deepest, and the last of those at one place."""
    found = None
    for mount in mounts:
        inside = full == mount.place or full.startswith(mount.place.rstrip("/") + "/")
        if inside and (found is None or len(mount.place) >= len(found.place)):
            found = mount
    return found


def _is_writable(full: str) -> bool:
    # To make something in a directory one has to pass through it as well.
    return os.access(full, os.W_OK | os.X_OK if os.path.isdir(full) else os.W_OK)


def _unescape(text: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)[:_MOST_CHARACTERS]
