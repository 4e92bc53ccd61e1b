"""LabSpec, LabNode and Lab: what was asked for and what stands; and where the lab keeps it on disk.

Names and addresses follow from the spec. The state directory exists as long as anything of a lab may.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from multinode.decoding import decode_json
from multinode.errors import UsageError
from multinode.node.own_files import replace_file
from multinode.node.processes import boot_id
from multinode.units import GIB

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
    """What a lab shall be."""

    node_count: int = 2  # nodes, 1 to 200
    rate_gbit_per_s: float | None = 1.0  # line rate of each training interface; None leaves it unshaped
    slots: int = 2  # workers a node offers in the hostfile
    # pins each node to this many cores of its own; None lets all nodes share all cores
    cores_per_node: int | None = None
    python: str  # interpreter of the training environment, as the nodes see it
    disk_bytes: int = 4 * GIB  # what a node may write, in memory; its /dev/shm is as large again
    # an IPv4 /23 of the lab's own; the lower half is management, the upper half training
    network: str = DEFAULT_NETWORK
    ipv6: bool = False  # whether the training network has IPv6 addresses in place of that upper half
    # what the hostfile has jobs on the nodes find in their environment
    job_env: dict[str, str] = msgspec.field(default_factory=lambda: dict(CPU_ENVIRONMENT))
    files: tuple[NodeFile, ...] = ()  # further files that each node has of its own
    # devices and files that the nodes see as they are here, whatever they are mounted over
    shared_files: tuple[str, ...] = ()


class ProcessRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A process that cannot be taken for another one that has its number later."""

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
    """A lab that stands."""

    schema: str = "multinode.lab/1"
    spec: LabSpec
    controller_boot_id: str  # of the machine that it was made on; after a reboot nothing of it stands
    hostfile: str  # path of the hostfile that names its nodes
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
