"""Which machine a run is of. Nodes may share a home directory, and a run of another machine is not ours to judge.

A machine has a host name and a machine id, and for a while a boot and a process namespace, in which a pid means
something. The watchers of a run hold a lock, which every process of their kernel sees, in whatever container it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from typing import Optional

from ..channel import Record
from ..kernel_files import try_read
from ..processes import boot_id

# struct flock of fcntl(2): type, whence, start, length, pid.
_FLOCK = struct.Struct("hhqqi4x")
_WHOLE = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


def this_machine() -> Record:
    """The fields by which supervisor.json names this machine."""
    return {
        "hostname": os.uname().nodename,
        "machine_id": try_read("/etc/machine-id") or None,
        "boot_id": boot_id(),
        "pid_namespace": _pid_namespace(),
    }


def shows_processes_of(watcher: Record) -> bool:
    """Whether our /proc is the one in which the pids of a supervisor.json are to be looked for."""
    here = this_machine()
    return all(watcher.get(name, here[name]) == here[name] for name in ("boot_id", "pid_namespace"))


def may_have_been(watcher: Record) -> bool:
    """Whether it is of this machine before it was booted, or of this container before it was started anew."""
    here = this_machine()
    if any(watcher.get(name) != here[name] for name in ("hostname", "machine_id")):
        return False
    # Containers on machines of their own may have one name, and no id at all.
    return here["machine_id"] is not None or watcher.get("boot_id") == here["boot_id"]


def hold_lock(fd: int) -> None:
    """Lock a file until the last process that has this descriptor from us is gone; nothing where there are no locks."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _WHOLE)


def is_locked(path: str) -> bool:
    """Whether somebody holds it; False where that cannot be seen."""
    try:
        fd = os.open(path, os.O_RDWR)
        try:
            held = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _WHOLE)
        finally:
            os.close(fd)
    except OSError:
        return False
    return bool(_FLOCK.unpack(held)[0] != fcntl.F_UNLCK)


def _pid_namespace() -> Optional[str]:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
