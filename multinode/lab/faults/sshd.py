"""Faults of a node's SSH daemon, and of the sessions it begins. Its configuration follows from what is in force."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import msgspec

from multinode.errors import NodeFailed
from multinode.lab.access import SSHD_CONFIG, sshd_config
from multinode.lab.cluster import ns_command
from multinode.lab.faults.clock import clock_variables, install_library
from multinode.lab.faults.kinds import Clock, Fault, SshdState, Variable
from multinode.lab.faults.scene import Scene, run_in_node
from multinode.lab.nodes import log_path
from multinode.lab.processes import (
    has_environment,
    is_alive,
    is_stopped,
    kill_all,
    namespace_id,
    poll,
    process_ref,
    processes_in,
    signal_all,
)
from multinode.lab.requirements import SSHD
from multinode.lab.spec import LabNode, ProcessRef

__all__ = ["configure", "deconfigure", "disturb", "fault_config", "mend"]

_DEADLINE_S = 10.0
_OTHER_KEY = "/etc/ssh/ssh_host_other_key"

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
_HOLDER_MARK = {"MULTINODE_LAB_FAULT": "crowded"}


def disturb(scene: Scene, fault: SshdState) -> None:
    """Stop or freeze it, or give it a configuration in which it turns clients away."""
    if fault.how == "stop":
        _stop(scene.node)
    elif fault.how == "freeze":
        signal_all([_need_listener(scene.node).pid], signal.SIGSTOP)
    else:
        configure(scene, fault)


def mend(scene: Scene, fault: SshdState) -> LabNode | None:
    """Let it run, and with the configuration of what else is in force."""
    if not scene.is_same_boot:
        return None
    if fault.how == "stop":
        return _start(scene.node)
    if fault.how == "freeze":
        found = _listener(scene.node)
        signal_all([found.pid] if found else [], signal.SIGCONT)
        return None
    deconfigure(scene, fault)
    return None


def configure(scene: Scene, fault: SshdState | Variable | Clock) -> None:
    """Have it read a configuration with this fault."""
    if fault == SshdState(node=fault.node, how="new-host-key"):
        make_key = f"rm -f {_OTHER_KEY} {_OTHER_KEY}.pub; ssh-keygen -q -t ed25519 -N '' -f {_OTHER_KEY}"
        run_in_node(scene.node, ["sh", "-c", make_key])
    if isinstance(fault, Clock):
        install_library(scene)
    _apply(scene.node, (*scene.others, fault))


def deconfigure(scene: Scene, fault: SshdState | Variable | Clock) -> None:
    """Have it read a configuration without this fault."""
    del fault
    if scene.is_same_boot:
        _apply(scene.node, scene.others)


def fault_config(address: str, faults: tuple[Fault, ...]) -> str:
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
                variables |= clock_variables(fault)
            case _:
                continue
    if variables:
        lines.append("SetEnv " + " ".join(_quote(f"{name}={value}") for name, value in variables.items()))
    return "".join(f"{line}\n" for line in lines) + text


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _apply(node: LabNode, faults: tuple[Fault, ...]) -> None:
    """Write the configuration, and have a daemon that runs read it."""
    text = fault_config(node.management_addr, faults)
    run_in_node(node, ["sh", "-c", f"cat > {SSHD_CONFIG} && {SSHD} -t"], stdin=text)
    kill_all(_holders(node))
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
    """Have it read its configuration; asked again where a busy machine let a child of it hear the signal instead."""
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
    environment = " ".join(f"{name}={value}" for name, value in _HOLDER_MARK.items())
    if run_in_node(node, ["sh", "-c", f'env {environment} "$@" &', "sh", *hold]) != "held":
        raise NodeFailed("its sshd does not accept a connection to hold", node=node.name)


def _holders(node: LabNode) -> list[int]:
    ((name, value),) = _HOLDER_MARK.items()
    return [pid for pid in _processes(node) if has_environment(pid, f"{name}={value}".encode())]


def _stop(node: LabNode) -> None:
    daemon = _need_listener(node)
    signal_all([daemon.pid], signal.SIGCONT)
    signal_all([daemon.pid], signal.SIGTERM)
    for _ in poll(_DEADLINE_S):
        if not is_alive(daemon):
            return
    raise NodeFailed("its sshd does not end", node=node.name)


def _start(node: LabNode) -> LabNode:
    """Start it unless it runs; an orphan of the shell's, it becomes a child of the node's first process."""
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
    raise NodeFailed("its sshd does not run", node=node.name, hint="multinode lab fault clear")


def _listener(node: LabNode) -> ProcessRef | None:
    """The daemon itself; those of its children that serve a session are called sshd, too."""
    # In the order of their ids: a child that was forked this moment has its title still.
    for pid in sorted(_processes(node)):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if title.startswith(b"sshd: ") and b"[listener]" in title:
            return process_ref(pid)
    return None


def _processes(node: LabNode) -> list[int]:
    namespace = namespace_id(Path(f"/proc/{node.init.pid}/ns/pid"))
    return [] if namespace is None else processes_in("pid", namespace)


def _log_size(node: LabNode) -> int:
    return log_path(node.name).stat().st_size


def _wait_until_listening(node: LabNode, seen: int) -> None:
    """Wait until it says so: a connection would not tell whether the old or the new configuration answers."""
    said = ""
    for _ in poll(_DEADLINE_S):
        said = log_path(node.name).read_bytes()[seen:].decode(errors="replace")
        if "Server listening on" in said:
            return
    raise NodeFailed("its sshd does not come back", node=node.name, detail=said.strip())
