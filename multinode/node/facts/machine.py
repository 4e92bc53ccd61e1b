"""The machine that this node is: its name, kernel, processors, memory, disk and limits, and whether it is a container.

Reads files of the kernel; starts nothing and knows nothing of networks, GPUs or jobs.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import resource
import sys
from collections.abc import Callable
from typing import Any, Optional

from ..channel import Record
from ..kernel_files import read_text, try_read
from ..processes import boot_id
from .memory import MemoryReader, read_meminfo

_GIB = 1 << 30
_SHM = "/dev/shm"  # noqa: S108 - it is looked at, nothing is put there
_LIMITS = {
    "open_files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
    "locked_memory_bytes": resource.RLIMIT_MEMLOCK,
}
# Parts of a control group's path, by what makes such groups. Kubernetes comes first: below it others run the container.
_GROUPS = {"kubernetes": "kubepods", "docker": "docker", "podman": "libpod", "containerd": "containerd", "lxc": "lxc"}
_LONGEST_NAME = 200
_KIND = re.compile(r"[a-z][a-z0-9._-]{0,31}")


def read_machine() -> tuple[Record, dict[str, str]]:
    """The facts by the names of NodeFacts, and by the same names why one is None."""
    readers: dict[str, Callable[[], Any]] = {
        "user": lambda: pwd.getpwuid(os.getuid()).pw_name,
        "boot_id": lambda: _known(boot_id(), "the kernel shows no boot id"),
        "machine_id": lambda: _known(read_text("/etc/machine-id"), "/etc/machine-id is empty"),
        "processor": lambda: _known(read_processor_name(), "the kernel does not report it"),
        "memory_total_gib": lambda: read_meminfo().total / _GIB,
        "memory_available_gib": lambda: MemoryReader().read().available / _GIB,
        "memory_limit_gib": lambda: _known(MemoryReader().limit(), "no limit below the machine's memory") / _GIB,
        "disk_free_gib": _read_disk_free_gib,
        "shm_total_gib": lambda: os.statvfs(_SHM).f_blocks * os.statvfs(_SHM).f_frsize / _GIB,
        "shm_free_gib": lambda: os.statvfs(_SHM).f_bavail * os.statvfs(_SHM).f_frsize / _GIB,
        "container": lambda: find_container(dict(os.environ)),
        "ssh_address": _read_ssh_address,
    }
    facts: Record = {
        "hostname": os.uname().nodename,
        "home": os.path.expanduser("~"),
        "cores": len(os.sched_getaffinity(0)),
        "agent_python": ".".join(map(str, sys.version_info[:3])),
        "limits": {name: _soft_limit(number) for name, number in _LIMITS.items()},
    }
    answers = {name: _ask(read) for name, read in readers.items()}
    facts.update({name: value for name, (value, _) in answers.items()})
    return facts, {name: reason for name, (_, reason) in answers.items() if reason is not None}


def read_processor_name(path: str = "/proc/cpuinfo") -> Optional[str]:
    """What the kernel calls our processors, on one line; None where it does not name them, as on ARM."""
    # No further than the first: of many cores the kernel takes its time to say how fast they run.
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return " ".join(value.split())[:_LONGEST_NAME] or None
    return None


def find_container(env: dict[str, str], root: str = "/") -> str:
    """What kind of container we are in, by our environment and by what lies below `root`.

    Raises:
        LookupError: none shows.
    """
    groups = try_read(os.path.join(root, "proc/1/cgroup")) or ""
    # SSH hands down nothing of what the container was started with; its first process still has it.
    entries = (try_read(os.path.join(root, "proc/1/environ")) or "").split("\0")
    env = {**dict(entry.split("=", 1) for entry in entries if "=" in entry), **env}
    if "KUBERNETES_SERVICE_HOST" in env:
        return "kubernetes"
    for kind, part in _GROUPS.items():
        if part in groups:
            return kind
    told = env.get("container") or try_read(os.path.join(root, "run/systemd/container")) or ""
    if _KIND.fullmatch(told.strip()):
        return told.strip()
    for kind, mark in (("docker", ".dockerenv"), ("podman", "run/.containerenv")):
        if os.path.exists(os.path.join(root, mark)):
            return kind
    raise LookupError("no sign of a container")


def _ask(read: Callable[[], Any]) -> tuple[Any, Optional[str]]:
    try:
        return read(), None
    except (OSError, ValueError, LookupError) as error:
        return None, str(error)


def _soft_limit(number: int) -> Optional[int]:
    soft, _ = resource.getrlimit(number)
    return None if soft == resource.RLIM_INFINITY else soft


def _known(value: Any, otherwise: str) -> Any:
    if not value:
        raise LookupError(otherwise)
    return value


def _read_disk_free_gib() -> float:
    path = os.path.expanduser("~/.multinode")
    stat = None
    with contextlib.suppress(FileNotFoundError):
        stat = os.statvfs(path)
    stat = stat or os.statvfs(os.path.dirname(path))
    return stat.f_bavail * stat.f_frsize / _GIB


def _read_ssh_address() -> str:
    words = os.environ.get("SSH_CONNECTION", "").split()
    if len(words) != 4:  # noqa: PLR2004 - client address and port, our address and port (ssh(1))
        raise OSError("SSH_CONNECTION is not set")
    return words[2]
