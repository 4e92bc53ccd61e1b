"""What the lab needs of the machine, judged before anything is made: every lack in one error, with what fixes it."""

from __future__ import annotations

import ipaddress
import os
import shutil
import sys
from pathlib import Path

import msgspec

from multinode.decoding import decode_json
from multinode.errors import UsageError
from multinode.lab.processes import run_program
from multinode.lab.state import LabSpec

# sshd insists on being started by its full path.
SSHD = "/usr/sbin/sshd"

_INSTALL = "apt-get install iproute2 openssh-server openssh-client nftables util-linux"
_PROGRAMS = ("ip", "tc", "nft", "ssh", "ssh-keygen", "nsenter", "mount", "taskset")
_CAP_NET_ADMIN = 12
_CAP_SYS_ADMIN = 21


class _Route(msgspec.Struct):
    """A line of `ip -json route`; the rest of it does not matter here."""

    dst: str
    dev: str | None = None


def check_requirements() -> None:
    """See that this is Linux, that we are root, and that the programs and the kernel's overlay are there.

    Raises:
        UsageError: something is missing; the message lists all of it.
    """
    if sys.platform != "linux":
        raise UsageError(
            f"the lab needs Linux; this is {sys.platform}", hint="run it in a Linux virtual machine, or use real nodes"
        )
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_search_path()) is None]
    missing += [] if os.access(SSHD, os.X_OK) else ["sshd"]
    lacks = [f"missing: {', '.join(missing)}"] if missing else []
    hints = [f"install: {_INSTALL}"] if missing else []
    if os.geteuid() != 0:
        lacks.append("not root")
        hints.append("run it with sudo")
    elif not _has_capabilities():
        lacks.append("root without CAP_SYS_ADMIN and CAP_NET_ADMIN")
        hints.append("a container needs --privileged")
    elif not _has_overlay():
        lacks.append("no overlayfs in this kernel")
        hints.append("load it: modprobe overlay")
    if lacks:
        raise UsageError(f"the lab cannot run here: {'; '.join(lacks)}", hint="; ".join(hints))


def check_free_network(spec: LabSpec) -> None:
    """See that no route of this machine leads into the lab's addresses.

    Raises:
        UsageError: one does.
    """
    network = ipaddress.IPv4Network(spec.network)
    text = run_program(["ip", "-json", "-4", "route", "show", "table", "all"])
    for route in decode_json(text or "[]", list[_Route]):
        if route.dst != "default" and ipaddress.IPv4Network(route.dst, strict=False).overlaps(network):
            raise UsageError(
                f"the lab's network {network} is in use: {route.dst} on {route.dev}",
                hint="choose another private /23 with --network",
            )


def _search_path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _has_capabilities() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            effective = int(line.split()[1], 16)
            return bool(effective >> _CAP_NET_ADMIN & effective >> _CAP_SYS_ADMIN & 1)
    return False


def _has_overlay() -> bool:
    # The module is loaded by the first mount; what can be loaded is listed below /sys/module or /lib/modules.
    known = Path("/proc/filesystems").read_text().split()
    modules = Path("/lib/modules") / os.uname().release
    return "overlay" in known or any(modules.glob("kernel/fs/overlayfs/*"))
