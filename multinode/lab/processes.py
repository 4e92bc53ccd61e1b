"""The system's programs (ip, tc, ssh-keygen), and the processes of the lab's nodes as this machine has them.

Programs are run by argv with a deadline, and their failures become our errors.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from multinode.decoding import decode_json
from multinode.errors import MultinodeError, UsageError, printable_line
from multinode.lab.state import LabNode, LabSpec, ProcessRef
from multinode.node.processes import find_process, is_running
from multinode.node.programs import Query, QueryFailed
from multinode.secret_values import redact_words
from multinode.units import format_duration

_MARKER = "MULTINODE_LAB_OF"

_PROC = Path("/proc")
_POLL_S = 0.01
_SHOWN = 80
_PROGRAM_DEADLINE_S = 60.0

NamespaceId = tuple[int, int]


def run_program(argv: Sequence[str], *, stdin: str = "") -> str:
    """Run a program to its end and return its standard output."""
    return run_all([argv], stdin=stdin)[0]


def run_batch(argv: Sequence[str], lines: Sequence[str]) -> None:
    """Run `ip` or `tc` once for many commands, one a line."""
    run_program([*argv, "-batch", "-"], stdin="".join(f"{line}\n" for line in lines))


def run_all(commands: Sequence[Sequence[str]], *, stdin: str = "") -> list[str]:
    """Run several programs at the same time and return their standard outputs, in order.

    Raises:
        MultinodeError: the first that failed, after all have ended.
    """
    outputs: list[str] = []
    failures: list[MultinodeError] = []
    with contextlib.ExitStack() as started:
        queries = [Query(list(argv), deadline_s=_PROGRAM_DEADLINE_S, stdin=stdin) for argv in commands]
        for query in queries:
            started.callback(query.close)
        for argv, query in zip(commands, queries, strict=True):
            try:
                outputs.append(query.answer())
            except QueryFailed as error:
                failures.append(MultinodeError(str(error), ran=shlex.join(argv), detail=error.detail))
    if failures:
        raise failures[0]
    return outputs


def init_environment() -> dict[str, str]:
    """What marks a node's first process, and no other process, as ours: finds it when all records are lost.

    It names the controller's network namespace: a lab inside a container is none of the machine's around it.
    """
    return {_MARKER: str((_PROC / "self/ns/net").readlink())}


def namespace_id(path: Path) -> NamespaceId | None:
    """What tells one namespace from another; None where the file names none (any more)."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def process_ref(pid: int) -> ProcessRef | None:
    """This process and when it started; None when it is gone or has ended."""
    found = find_process(pid)
    return ProcessRef(pid=pid, start_ticks=found.start_ticks) if found is not None and found.alive else None


def is_alive(process: ProcessRef) -> bool:
    """Whether the very process is still there."""
    return is_running(process.pid, process.start_ticks)


def children_of(parents: Collection[int], name: str) -> dict[int, ProcessRef]:
    """For each of these processes that has one, a child of this name."""
    children = (one for one in psutil.process_iter(["ppid", "name"]) if one.info["name"] == name)
    found = {one.info["ppid"]: process_ref(one.pid) for one in children if one.info["ppid"] in parents}
    return {parent: child for parent, child in found.items() if child is not None}


def processes_of_lab(network_namespaces: Collection[NamespaceId]) -> list[int]:
    """Every process in one of these network namespaces, and every first process of a lab node, wherever it is."""
    own = namespace_id(_PROC / "self/ns/pid")
    ((name, value),) = init_environment().items()
    return [
        pid
        for pid in psutil.pids()
        if namespace_id(_PROC / str(pid) / "ns/net") in network_namespaces
        or (namespace_id(_PROC / str(pid) / "ns/pid") not in {None, own} and environment_of(pid).get(name) == value)
    ]


def processes_in(kind: Literal["net", "pid"], namespace: NamespaceId | None) -> list[int]:
    """Every process in this network or PID namespace; those that have ended and wait to be collected do not count."""
    if namespace is None:
        return []
    return [
        pid
        for pid in psutil.pids()
        if namespace_id(_PROC / str(pid) / "ns" / kind) == namespace and process_ref(pid) is not None
    ]


def node_processes(node: LabNode) -> list[int]:
    """Every process of a node; one whose first process has ended has none."""
    return processes_in("pid", namespace_id(_PROC / str(node.init.pid) / "ns/pid"))


def runs_of(node: LabNode) -> dict[str, str]:
    """Ids of the runs that have processes on a node, whoever started them: when the oldest began, and what it is."""
    oldest: dict[str, psutil.Process] = {}
    for pid in node_processes(node):
        run_id = environment_of(pid).get("MULTINODE_RUN_ID")
        if run_id is not None:
            # On a node a run is called with its node rank behind a dot.
            run = run_id.rpartition(".")[0]
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                oldest[run] = min(oldest.get(run, process), process, key=psutil.Process.create_time)
    return {run: _describe(process) for run, process in oldest.items()}


def _describe(process: psutil.Process) -> str:
    age_s = time.time() - process.create_time()
    try:
        words = process.cmdline()
    except psutil.Error:
        words = []
    # What it is given may be a secret.
    return f"for {format_duration(max(0.0, age_s))}: {printable_line(' '.join(redact_words(words)))[:_SHOWN].strip()}"


def environment_of(pid: int) -> dict[str, str]:
    """The variables that a process was started with; none of one that is gone."""
    try:
        return psutil.Process(pid).environ()
    except psutil.Error:
        return {}


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """A signal to each; those that have gone meanwhile are passed over."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).send_signal(number)


def poll(seconds: float) -> Iterator[None]:
    """Yield again and again, with a pause, until so many seconds have passed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield
        time.sleep(_POLL_S)


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
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    missing = [name for name in _PROGRAMS if shutil.which(name, path=path) is None]
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
