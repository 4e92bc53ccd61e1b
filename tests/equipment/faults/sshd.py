"""Faults of a node's SSH daemon, and of the sessions it begins: their variables, their clock.

Its configuration follows from what is in force. A clock is libfaketime, preloaded: the kernel has one for all nodes.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from multinode.errors import NodeFailed, UsageError
from multinode.lab.cluster import ns_command
from multinode.lab.nodes import SSHD_CONFIG, log_path, sshd_config
from multinode.lab.state import (
    SSHD,
    Lab,
    LabNode,
    ProcessRef,
    environment_of,
    is_alive,
    node_processes,
    poll,
    process_ref,
    signal_all,
)
from tests.equipment.faults.fault import AnyFault, Scene, is_stopped, run_in_node

_SSHD_WORDS = {
    "stop": "is stopped",
    "freeze": "is frozen: it accepts connections but does not answer",
    "new-host-key": "has a host key that differs from known_hosts",
    "refuse-key": "authorises no key",
    "crowded": "drops new connections because it is full",
}
_DEADLINE_S = 10.0
_MOST_SAID, _LINES_SAID = 4000, 12
_OTHER_KEY = "/etc/ssh/ssh_host_other_key"
_MAKE_KEY = f"rm -f {_OTHER_KEY} {_OTHER_KEY}.pub; ssh-keygen -q -t ed25519 -N '' -f {_OTHER_KEY}"

# Opens a connection and says nothing: to sshd it is one that has not authenticated yet.
_HOLDER = """\
import os, signal, socket, sys
held = socket.create_connection((sys.argv[1], 22), timeout=10)
held.recv(7)
os.write(1, b"held")
null = os.open("/dev/null", os.O_RDWR)
for fd in (0, 1, 2):
    os.dup2(null, fd)
signal.pause()
"""
_HOLDER_MARK = "MULTINODE_LAB_FAULT"

_LIBRARY = "faketime/libfaketimeMT.so.1"
_LIBRARY_PLACES = ("/usr/lib", "/usr/local/lib", "/usr/lib64")
# On the node. It stays until the lab is down: sessions that have begun may start further programs with it.
_INSTALLED = "/usr/local/lib/multinode-clock.so.1"
# With the monotonic clock left alone, version 0.9.10 turns a sleep until a point of that clock into an error, and so
# does time.sleep of Python 3.11 end. Without this name in its symbol table the C library's own function is called; the
# name is changed at its beginning, for other names may share its end.
INSTALL_CLOCK = """\
import os, sys
with open(sys.argv[1], "rb") as file:
    library = file.read().replace(b"\\0clock_nanosleep\\0", b"\\0Clock_nanosleep\\0", 1)
os.makedirs(os.path.dirname(sys.argv[2]), exist_ok=True)
with open(sys.argv[2] + ".new", "wb") as file:
    file.write(library)
os.rename(sys.argv[2] + ".new", sys.argv[2])
"""


class _Configured(AnyFault, frozen=True, kw_only=True):
    """What is in force as long as sshd has it in its configuration."""

    def make(self, scene: Scene) -> None:
        _apply(scene.node, (*scene.others, self))

    def undo(self, scene: Scene) -> LabNode | None:
        if scene.is_same_boot:
            _apply(scene.node, scene.others)
        return None


class SshdState(_Configured, frozen=True, kw_only=True, tag="sshd"):
    """The SSH daemon is stopped or frozen, or does not take this client, or not now."""

    how: Literal["stop", "freeze", "new-host-key", "refuse-key", "crowded"]

    def describe(self) -> str:
        return f"sshd {_SSHD_WORDS[self.how]}"

    def make(self, scene: Scene) -> None:
        if self.how == "stop":
            _stop(scene.node)
        elif self.how == "freeze":
            signal_all([_need_listener(scene.node).pid], signal.SIGSTOP)
        else:
            if self.how == "new-host-key":
                run_in_node(scene.node, ["sh", "-c", _MAKE_KEY])
            super().make(scene)

    def undo(self, scene: Scene) -> LabNode | None:
        if self.how not in {"stop", "freeze"}:
            return super().undo(scene)
        if self.how == "stop" and scene.is_same_boot:
            return _start(scene.node)
        if scene.is_same_boot and (found := _listener(scene.node)):
            signal_all([found.pid], signal.SIGCONT)
        return None


class Variable(_Configured, frozen=True, kw_only=True, tag="variable"):
    """A variable is set in every SSH session that begins."""

    name: str
    value: str

    def describe(self) -> str:
        return f"{self.name}={self.value} in SSH sessions"


class Clock(_Configured, frozen=True, kw_only=True, tag="clock"):
    """The wall clock of SSH sessions that begin is wrong; the monotonic clock is not."""

    offset_s: float

    def describe(self) -> str:
        return f"the clock of SSH sessions is wrong by {self.offset_s:+g} s"

    def check(self, lab: Lab) -> None:
        del lab
        find_clock_library()

    def make(self, scene: Scene) -> None:
        """A library on the node's disk changes the wall clock and nothing else."""
        install = ["-I", "-S", "-c", INSTALL_CLOCK, find_clock_library(), _INSTALLED]
        run_in_node(scene.node, [scene.lab.spec.python, *install])
        super().make(scene)


def fault_config(address: str, faults: tuple[AnyFault, ...]) -> str:
    """sshd_config of a node at this address with these faults in force, oldest first.

    sshd takes the first value of most of its settings, and one line of SetEnv alone.
    """
    text = sshd_config(address)
    lines: list[str] = []
    variables: dict[str, str] = {}
    for fault in faults:
        match fault:
            case SshdState(how="new-host-key"):
                text = text.replace("/etc/ssh/ssh_host_ed25519_key", _OTHER_KEY)
            case SshdState(how="refuse-key"):
                lines.append("AuthorizedKeysFile none")
            case SshdState(how="crowded"):
                # One connection takes all places, and keeps them.
                lines += ["MaxStartups 1:100:1", "LoginGraceTime 0"]
            case Variable():
                variables[fault.name] = fault.value
            case Clock():
                variables |= {
                    "LD_PRELOAD": _INSTALLED,
                    "FAKETIME": f"{fault.offset_s:+g}",
                    # Time spans are right on a node whose clock is wrong.
                    "FAKETIME_DONT_FAKE_MONOTONIC": "1",
                    # Times of files would move too, and Python would compile every module anew.
                    "NO_FAKE_STAT": "1",
                }
            case _:
                continue
    if variables:
        lines.append("SetEnv " + " ".join(_quote(f"{name}={value}") for name, value in variables.items()))
    return "".join(f"{line}\n" for line in lines) + text


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def find_clock_library() -> str:
    """Where libfaketime lies on this machine.

    Raises:
        UsageError: it is not installed.
    """
    for place in _LIBRARY_PLACES:
        for found in sorted([*Path(place).glob(_LIBRARY), *Path(place).glob(f"*/{_LIBRARY}")]):
            return str(found)
    raise UsageError(
        "libfaketime is not installed, and the kernel has one clock for all nodes", hint="apt-get install libfaketime"
    )


def _apply(node: LabNode, faults: tuple[AnyFault, ...]) -> None:
    text = fault_config(node.management_addr, faults)
    run_in_node(node, ["sh", "-c", f"cat > {SSHD_CONFIG} && {SSHD} -t"], stdin=text)
    holders = [pid for pid in node_processes(node) if _HOLDER_MARK in environment_of(pid)]
    signal_all(holders, signal.SIGKILL)
    daemon = _listener(node)
    if daemon is None:
        return
    if is_stopped(daemon.pid):
        signal_all([daemon.pid], signal.SIGHUP)
        return
    _restart(node)
    if any(isinstance(fault, SshdState) and fault.how == "crowded" for fault in faults):
        _take_all_places(node)


def _restart(node: LabNode) -> None:
    for last in (False, False, True):
        seen = _log_size(node)
        signal_all([_need_listener(node).pid], signal.SIGHUP)
        try:
            _wait_until_listening(node, seen)
        except NodeFailed:
            if last:
                raise
        else:
            return


def _take_all_places(node: LabNode) -> None:
    hold = ["python3", "-I", "-S", "-c", _HOLDER, node.management_addr]
    if run_in_node(node, ["sh", "-c", f'env {_HOLDER_MARK}=crowded "$@" &', "sh", *hold]) != "held":
        raise NodeFailed("its sshd does not accept a connection to hold", node=node.name)


def _stop(node: LabNode) -> None:
    daemon = _need_listener(node)
    signal_all([daemon.pid], signal.SIGCONT)
    signal_all([daemon.pid], signal.SIGTERM)
    for _ in poll(_DEADLINE_S):
        if not is_alive(daemon):
            return
    raise NodeFailed("its sshd does not exit", node=node.name)


def _start(node: LabNode) -> LabNode:
    if _listener(node) is None:
        seen = _log_size(node)
        with log_path(node.name).open("ab") as log:
            subprocess.run(
                [*ns_command(node), "sh", "-c", f"setsid {SSHD} -D -e &"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={"PATH": os.defpath},
                timeout=_DEADLINE_S,
                check=True,
            )
        _wait_until_listening(node, seen)
    return msgspec.structs.replace(node, sshd=_need_listener(node))


def _need_listener(node: LabNode) -> ProcessRef:
    for _ in poll(_DEADLINE_S):
        found = _listener(node)
        if found is not None:
            return found
    raise NodeFailed("its sshd does not run", node=node.name, hint="scripts/lab-fault clear")


def _listener(node: LabNode) -> ProcessRef | None:
    # In the order of their ids: a child that was forked this moment has its title still.
    for pid in sorted(node_processes(node)):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if title.startswith(b"sshd: ") and b"[listener]" in title:
            return process_ref(pid)
    return None


def _log_size(node: LabNode) -> int:
    return log_path(node.name).stat().st_size


def _wait_until_listening(node: LabNode, seen: int) -> None:
    log = b""
    for _ in poll(_DEADLINE_S):
        log = log_path(node.name).read_bytes()
        if b"Server listening on" in log[seen:]:
            return
    # What it said before, and which processes it waits for.
    said = log[-_MOST_SAID:].decode(errors="replace").splitlines()[-_LINES_SAID:]
    titles = [" ".join(_title(pid)) for pid in node_processes(node)]
    raise NodeFailed("its sshd does not restart", node=node.name, detail="\n".join([*said, *titles]))


def _title(pid: int) -> list[str]:
    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return []
