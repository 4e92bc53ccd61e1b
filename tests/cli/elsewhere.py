"""The command on a stand-in for macOS: what CPython has on Linux alone is gone, and /proc and /sys are not there.

    python elsewhere.py "COMMAND LINE" ...

Imports all modules, then runs each command line. The packages of others come for macOS too; they are imported before.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import resource
import select
import signal
import socket
import sys
from types import ModuleType

import multinode

# Of the standard library: what is built otherwise there, and loads libraries when it is imported.
OTHERS = (
    "ctypes urllib.request",
    "fabric paramiko msgspec psutil rich.console rich.live rich.markup typer yaml plotly.subplots plotly.offline",
)
GONE: dict[ModuleType, str] = {
    os: "O_DIRECT O_NOATIME O_PATH O_RSYNC O_TMPFILE copy_file_range eventfd getrandom getresuid getxattr listxattr "
    "memfd_create pidfd_open posix_fadvise posix_fallocate removexattr sched_getaffinity sched_getparam "
    "sched_setaffinity setns setresgid setresuid setxattr splice unshare",
    signal: "SIGPOLL SIGPWR SIGRTMAX SIGRTMIN SIGSTKFLT sigtimedwait sigwaitinfo",
    select: "EPOLLIN epoll",
    socket: "AF_ALG AF_NETLINK AF_PACKET AF_VSOCK SOCK_CLOEXEC SOCK_NONBLOCK SO_BINDTODEVICE SO_MARK SO_PEERCRED "
    "TCP_CONGESTION TCP_CORK TCP_INFO TCP_KEEPIDLE TCP_QUICKACK TCP_USER_TIMEOUT",
    resource: "RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_RTPRIO RLIMIT_SIGPENDING prlimit",
}
ON_NODES = ("multinode.node", "multinode.worker", "multinode.lab.node_init")
REFUSED = {"ctypes.dlopen", "subprocess.Popen", "os.system", "socket.connect"}


def main() -> None:
    """Import all, run what was asked for, and say how each ended."""
    commands = sys.argv[1:]
    for name in " ".join(OTHERS).split():
        importlib.import_module(name)
    for module, names in GONE.items():
        for name in names.split():
            vars(module).pop(name, None)
    sys.platform = "darwin"
    sys.addaudithook(refuse)
    modules = [
        module.name
        for module in pkgutil.walk_packages(multinode.__path__, "multinode.")
        # These run on nodes, the lab's among them, and nodes are Linux machines.
        if not module.name.startswith(ON_NODES) and module.name != "multinode.__main__"
    ]
    for name in modules:
        importlib.import_module(name)
    say(f"{len(modules)} modules")
    run = importlib.import_module("multinode.cli.main").run
    for command in commands:
        sys.argv = ["multinode", *command.split()]
        try:
            run()
        except SystemExit as ended:
            say(f"{command} exited {ended.code}")


def say(text: str) -> None:
    """A line, between those of the command."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def refuse(event: str, arguments: tuple[object, ...]) -> None:
    """What no import may do, and what is not there elsewhere, a lab of the tests beside this one included."""
    if event == "open" and str(arguments[0]).startswith(("/proc", "/sys", "/run/multinode")):
        raise FileNotFoundError(f"{arguments[0]} is of Linux alone")
    if event in REFUSED:
        raise RuntimeError(f"{event} {arguments}")


if __name__ == "__main__":
    main()
