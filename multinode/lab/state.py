"""LabSpec, LabNode and Lab: what was asked for and what stands; and where the lab keeps it on disk.

Names and addresses follow from the spec. The state directory exists as long as anything of a lab may.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from multinode.decoding import decode_json
from multinode.errors import MultinodeError, UsageError, printable_line
from multinode.node.files import replace_file
from multinode.node.processes import boot_id, find_process, is_running
from multinode.node.programs import Query, QueryFailed
from multinode.secret_values import redact_words
from multinode.units import GIB, format_duration

STATE_DIR = Path("/run/multinode/lab")

_STATE_FILE = "state.json"

MANAGEMENT_IFNAME = "eth0"
DATA_IFNAME = "ens1f0"
DEFAULT_NETWORK = "10.213.0.0/23"

# Nodes share the cores, and threads that wait for a core would be taken for a slow network; LLaMA-Factory 0.9.5 refuses
# the DeepSpeed that is installed beside it otherwise; and that would guess from what is installed what to train on.
CPU_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "DISABLE_VERSION_CHECK": "1", "DS_ACCELERATOR": "cpu"}

_PREFIX_LENGTH = 23
# Of the nodes alone: the controller is not on the training network, so it need not be free there.
_DATA_IPV6 = ipaddress.IPv6Network("fd6d:6e00::/64")
_MAX_NODES = 200
_LOCK_POLL_S = 0.05


class NodeFile(msgspec.Struct, frozen=True):
    """A file that a node has of its own."""

    path: str
    text: str
    mode: int = 0o644


class LabSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The specification of a lab."""

    node_count: int = 2  # nodes, 1 to 200
    rate_gbit_per_s: float | None = 1.0  # line rate of each training interface; None leaves it unshaped
    slots: int = 2  # workers a node offers in the hostfile
    # pins each node to this many cores of its own; None lets all nodes share all cores
    cores_per_node: int | None = None
    python: str  # interpreter of the training environment, as the nodes see it
    disk_bytes: int = 4 * GIB  # what a node may write, in memory; its /dev/shm has the same size
    # a private IPv4 /23 network; the lower half is for management, the upper half for training
    network: str = DEFAULT_NETWORK
    ipv6: bool = False  # whether the training network has IPv6 addresses instead of that upper half
    # variables that the hostfile sets for jobs on the nodes
    job_env: dict[str, str] = msgspec.field(default_factory=lambda: dict(CPU_ENVIRONMENT))
    files: tuple[NodeFile, ...] = ()  # further files that each node has of its own
    # devices, files and directories that the nodes share with this machine
    shared_files: tuple[str, ...] = ()


class ProcessRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A process, identified so that a later one with the same pid is not taken for it."""

    pid: int  # as the controller numbers it
    start_ticks: int  # when it started, in clock ticks since boot (field 22 of /proc/PID/stat)


class NodeAddresses(msgspec.Struct, frozen=True, kw_only=True):
    """Where a node is reached: `management` by SSH, `data` by its jobs."""

    management: str
    data: str


class LabNode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One virtual node."""

    name: str  # `node<rank>`, also its hostname
    node_rank: int  # its place in the hostfile
    addr: str  # on the training network, shaped
    management_addr: str  # on the management network, where its sshd listens
    ifname: str = DATA_IFNAME  # the training interface
    rate_gbit_per_s: float | None  # line rate of that interface, both directions; None is unshaped
    cores: tuple[int, ...] | None = None  # the cores it is pinned to; None is all of them
    boot_id: str  # what the node reads as its kernel's boot id
    init: ProcessRef  # process 1 of the node; killing it kills the node
    sshd: ProcessRef

    @property
    def namespace(self) -> str:
        """Its network namespace, as `ip netns` names it."""
        return f"mn-{self.name}"


class Lab(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A running lab."""

    schema: str = "multinode.lab/2"
    spec: LabSpec
    controller_boot_id: str  # of the machine that it was created on; a reboot removes the lab
    hostfile: str  # path of the hostfile that names its nodes
    directory: str  # working directory of the command that started it
    nodes: tuple[LabNode, ...]  # in node-rank order

    def node(self, name: str) -> LabNode:
        """The node of this name.

        Raises:
            UsageError: there is none.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        names = f"{self.nodes[0].name} to {self.nodes[-1].name}"
        raise UsageError(f"the lab has no node {name!r}", hint=f"its nodes are {names}")


def node_name(node_rank: int) -> str:
    """The name of the node of this rank."""
    return f"node{node_rank}"


def node_addresses(spec: LabSpec, node_rank: int) -> NodeAddresses:
    """Both addresses of a node.

    Raises:
        UsageError: the spec's network is not an IPv4 /23, or the lab is larger than it.
    """
    management, data = _halves(spec)
    if not 1 <= spec.node_count <= _MAX_NODES:
        raise UsageError(f"a lab of {spec.node_count} nodes cannot be created", hint=f"use 1 to {_MAX_NODES}")
    if spec.ipv6:
        return NodeAddresses(management=str(management[node_rank + 1]), data=str(_DATA_IPV6[node_rank + 1]))
    return NodeAddresses(management=str(management[node_rank + 1]), data=str(data[node_rank + 1]))


def controller_address(spec: LabSpec) -> str:
    """The controller's address on the management network: the last one."""
    return str(_halves(spec)[0][-2])


def assign_cores(spec: LabSpec, available: tuple[int, ...], node_rank: int) -> tuple[int, ...] | None:
    """The cores of a node's own; None where all nodes share all cores.

    Raises:
        UsageError: there are fewer cores than the lab would need.
    """
    if spec.cores_per_node is None:
        return None
    needed = spec.cores_per_node * spec.node_count
    if spec.cores_per_node < 1 or needed > len(available):
        raise UsageError(
            f"{spec.node_count} nodes of {spec.cores_per_node} cores do not fit on {len(available)} cores",
            hint="use fewer nodes or cores, or remove --cores-per-node to share all cores",
        )
    first = node_rank * spec.cores_per_node
    return available[first : first + spec.cores_per_node]


def node_dir(name: str) -> Path:
    """The files of one node that the controller keeps: its log, its keys, and the place where its disk is mounted."""
    return STATE_DIR / "nodes" / name


def controller_boot_id() -> str:
    """This boot of the controller; what a lab left behind before a reboot is known by another one."""
    return boot_id() or ""


def load_lab() -> Lab | None:
    """The lab that stands on this machine; None where there is none, none of this boot, or none that was finished."""
    try:
        lab = decode_json((STATE_DIR / _STATE_FILE).read_bytes(), Lab)
    except (FileNotFoundError, PermissionError, msgspec.DecodeError):
        return None
    return lab if lab.controller_boot_id == controller_boot_id() else None


def save_lab(lab: Lab) -> None:
    """Write state.json, all of it or nothing."""
    write_json(STATE_DIR / _STATE_FILE, lab)


def write_json(path: Path, value: object) -> None:
    """Write a file that is root's alone, all of it or nothing."""
    replace_file(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


@contextlib.contextmanager
def lock_lab(deadline_s: float = 10.0) -> Iterator[None]:
    """Keep other `multinode lab` commands from changing the lab meanwhile; one that is running is waited for.

    An abstract socket rather than a file: the kernel lets go of it when its owner dies, and nothing is left behind.

    Raises:
        UsageError: another one is still running after `deadline_s`.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock:
        deadline = time.monotonic() + deadline_s
        while not _is_bound(lock):
            if time.monotonic() > deadline:
                raise UsageError(
                    "another `multinode lab` command is running", hint="wait until it ends, or stop it with Ctrl-C"
                )
            time.sleep(_LOCK_POLL_S)
        yield


def _is_bound(lock: socket.socket) -> bool:
    try:
        lock.bind("\0multinode-lab")
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


def _halves(spec: LabSpec) -> tuple[ipaddress.IPv4Network, ipaddress.IPv4Network]:
    try:
        network = ipaddress.IPv4Network(spec.network)
    except ValueError as error:
        raise UsageError(
            f"{spec.network!r} is not a network: {error}", hint=f"for example {DEFAULT_NETWORK}"
        ) from error
    if network.prefixlen != _PREFIX_LENGTH or not network.is_private:
        raise UsageError(
            f"{spec.network} is not a private /{_PREFIX_LENGTH} network", hint=f"for example {DEFAULT_NETWORK}"
        )
    management, data = network.subnets(prefixlen_diff=1)
    return management, data


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
    process = find_process(pid)
    return ProcessRef(pid=pid, start_ticks=process.start_ticks) if process is not None and process.alive else None


def is_alive(process: ProcessRef) -> bool:
    """Whether the very process is still there."""
    return is_running(process.pid, process.start_ticks)


def children_of(parents: Collection[int], name: str) -> dict[int, ProcessRef]:
    """For each of these processes that has one, a child of this name."""
    children = (process for process in psutil.process_iter(["ppid", "name"]) if process.info["name"] == name)
    children_by_parent = {
        process.info["ppid"]: process_ref(process.pid) for process in children if process.info["ppid"] in parents
    }
    return {parent: child for parent, child in children_by_parent.items() if child is not None}


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
    filesystems = Path("/proc/filesystems").read_text().split()
    modules = Path("/lib/modules") / os.uname().release
    return "overlay" in filesystems or any(modules.glob("kernel/fs/overlayfs/*"))
