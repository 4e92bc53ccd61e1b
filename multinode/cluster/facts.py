"""NodeFacts: what a probe found on a node, without judgement."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from multinode.cluster.accelerators import accelerator_named
from multinode.node.facts import unknown
from multinode.stats.unknown import Entries, Unknown, or_empty

UNASKED = Unknown(unknown.NOT_ASKED)
"""A fact that no probe asked for."""
NO_ANSWER = Unknown(unknown.NO_ANSWER)
"""The job's directory, if it is one of `hung_paths`."""
WITHOUT_CUDA = Unknown(unknown.WITHOUT_CUDA)
"""CUDA's version of an installed torch."""

# A node's answers end up in commands that people paste: values with a format must match it.
Version = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9.+!_-]{0,99}\Z")]
InterfaceName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_][A-Za-z0-9_.:@+-]{0,14}\Z")]
# The kernel's limit is 63 characters.
DeviceName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}\Z")]
PciAddress = Annotated[str, Meta(pattern=r"\A[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\Z")]
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{1,64}\Z")]
# The module ipaddress accepts any text as a zone after `%`.
_ADDRESS = r"[0-9A-Fa-f.:]{2,45}"
Address = Annotated[str, Meta(pattern=rf"\A{_ADDRESS}(?:%[A-Za-z0-9_.:@+-]{{1,15}})?\Z")]
Network = Annotated[str, Meta(pattern=rf"\A{_ADDRESS}(?:/[0-9]{{1,3}})?\Z")]
_KERNELS = re.compile(r"(sm|compute)_(\d+)(\d)[af]?$")
Argument = Annotated[str, Meta(pattern=r"\A[A-Za-z_]\w{0,199}\Z")]


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """One network interface."""

    name: InterfaceName
    addresses: tuple[Network, ...] = ()  # IPv4 and global IPv6 addresses with prefix length, `10.0.0.1/24`
    up: bool = False  # whether it is up and has a carrier (operstate up, or unknown for virtual ones)
    mtu: int | None = None  # in bytes
    speed_gbit_per_s: float | None = None  # negotiated speed
    kind: str = "ethernet"  # `ethernet`, `loopback`, `bridge`, `wireless`, `virtual` or `infiniband`
    driver: str | None = None  # of a software interface: `veth`, `wireguard`, `tun`, `bond`, ..
    running: bool | None = None  # whether the kernel reports it as RUNNING, which NCCL checks
    duplex: str | None = None  # `full` or `half`, if reported
    nic_gbit_per_s: float | None = None  # maximum speed of the NIC, if reported
    errors: int | None = None  # frames lost to errors since boot, both directions
    packets: int | None = None  # frames transferred since boot, both directions

    def __post_init__(self) -> None:
        for address in self.addresses:
            ipaddress.ip_interface(address)

    @property
    def networks(self) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
        """The networks of its addresses."""
        return [ipaddress.ip_interface(address).network for address in self.addresses]


class RdmaPort(msgspec.Struct, frozen=True, kw_only=True):
    """A port of an RDMA NIC, from /sys/class/infiniband."""

    device: DeviceName  # `mlx5_0`
    port: int  # counted from 1
    state: str | None = None  # `ACTIVE`, `DOWN`, `INIT`, `ARMED`
    link_layer: str | None = None  # `InfiniBand` or `Ethernet` (RoCE)
    rate_gbit_per_s: float | None = None  # negotiated rate
    ifname: str | None = None  # the network interface of the same port
    gid_index: int | None = None  # of its RoCE v2 address, preferably IPv4; the value for NCCL_IB_GID_INDEX
    board: str | None = None  # the vendor's model number
    firmware: str | None = None  # its version
    # PCIe bridges between it and a GPU on its switch whose access control redirects their traffic to the CPU
    acs: tuple[PciAddress, ...] = ()
    iommu: str | None = None  # the unit that translates its addresses: `dmar1` (Intel), `ivhd0` (AMD), `smmu3...` (Arm)
    pci: PciAddress | None = None  # of the device, with its function
    pcie_gbit_per_s: float | None = None  # rate of its slot in each direction
    pcie_max_gbit_per_s: float | None = None  # maximum rate of its slot

    @property
    def carries_gbit_per_s(self) -> float | None:
        """Its rate, or that of its slot if lower: half of a split NIC may report the rate of the whole."""
        rate = self.rate_gbit_per_s
        return min(rate, self.pcie_gbit_per_s or rate) if rate is not None else None

    def shares_port(self, other: RdmaPort) -> bool:
        """Whether another device is a second PCIe connection of the same NIC to the same cable, as on NVIDIA's GB10.

        Two ports of one NIC are functions of one device; a second connection is another device with the same function.
        """
        mine, theirs = ((port.pci or "").rpartition(".") for port in (self, other))
        same = all(getattr(self, name) == getattr(other, name) for name in ("port", "board", "firmware", "link_layer"))
        return bool(self.board) and same and bool(mine[0]) and mine[0] != theirs[0] and mine[2] == theirs[2]


def carried_gbit_per_s(ports: Sequence[RdmaPort]) -> tuple[float | None, ...]:
    """What each of these ports carries while all are used: PCIe functions of one port share its rate."""

    def shared(port: RdmaPort) -> float | None:
        alone, rate = port.carries_gbit_per_s, port.rate_gbit_per_s
        group = [other.carries_gbit_per_s or 0.0 for other in ports if other is port or port.shares_port(other)]
        return alone if alone is None or rate is None else alone * min(1.0, rate / sum(group))

    return tuple(map(shared, ports))


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """The kernel's route to a peer."""

    peer: str  # the peer's address
    source: Address | Unknown  # our address that the kernel picks, if there is a route
    ifname: InterfaceName | None = None  # the interface of that address


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds memory of a GPU."""

    pid: Annotated[int, Meta(ge=1)]
    user: str | None = None  # its owner, if visible
    command: str | None = None  # its name, if visible
    memory_mib: float | None = None  # GPU memory that it holds
    run_id: str | None = None  # its multinode run, if visible


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU, or another accelerator, as listed by the vendor's tool, and the processes on it."""

    index: int
    name: str
    memory_total_mib: float | None = None
    memory_used_mib: float | None = None
    driver: str | None = None
    uuid: str | None = None
    mig: bool = False  # whether it is divided (MIG): the job gets a part of it
    processes: tuple[GpuProcess, ...] | Unknown = ()

    @property
    def is_lost(self) -> bool:
        """Whether nvidia-smi has an error in place of its name."""
        return self.name.startswith(("[", "ERR"))


def common_backend(nodes: Iterable[NodeFacts]) -> str:
    """The backend of torch's collectives if all nodes have GPUs of one vendor; otherwise gloo."""
    backends = {accelerator_named(node.accelerator).backend if or_empty(node.gpus) else "gloo" for node in nodes}
    return backends.pop() if len(backends) == 1 else "gloo"


def select_gpus(visible: str, gpus: Sequence[Gpu], *, by_place: bool = False) -> tuple[Gpu, ...]:
    """The GPUs that CUDA shows for this value of CUDA_VISIBLE_DEVICES, in its order; or another vendor's.

    CUDA takes the entries before the first one that names no GPU (CUDA C++ Programming Guide, "CUDA Environment
    Variables"). Numbers are nvidia-smi's, in PCI bus order, or the position in `gpus`. A MIG device is not one of
    nvidia-smi's GPUs.
    """
    selected: list[Gpu] = []
    for entry in map(str.strip, visible.split(",")):
        numbered = enumerate(gpus)
        gpu = next((gpu for place, gpu in numbered if _is_named(entry, gpu, place if by_place else gpu.index)), None)
        if gpu is None or gpu in selected:
            break
        selected.append(gpu)
    return tuple(selected)


def _is_named(entry: str, gpu: Gpu, number: int) -> bool:
    return entry == str(number) or (entry.startswith("GPU-") and (gpu.uuid or "").startswith(entry))


class TorchGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU as torch lists it."""

    name: str
    capability: tuple[int, int]  # CUDA's compute capability


class TorchDevices(msgspec.Struct, frozen=True, kw_only=True, tag_field="is", tag="devices"):
    """What the job's torch finds on the node, asked under the job's variables."""

    available: bool  # torch.cuda.is_available()
    reason: str | None = None  # what torch said about it
    kernels: tuple[str, ...] = ()  # torch.cuda.get_arch_list(): `sm_90`, `sm_90a`, `compute_90` (PTX)
    gpus: tuple[TorchGpu, ...] = ()

    def has_kernels_for(self, gpu: TorchGpu) -> bool:
        """Whether torch would run there: it has code for the same major version, or PTX that the driver compiles.

        True if it names no architecture of CUDA's, as on ROCm. torch/cuda/__init__.py `_check_cubins`; CUDA C++
        Programming Guide, "Application Compatibility".
        """
        built = self._built
        return not built or any(
            version[0] == gpu.capability[0] if kind == "sm" else version <= gpu.capability for kind, version in built
        )

    def is_older_than(self, gpu: TorchGpu) -> bool:
        """Whether all of its code is for GPUs before this one: a newer build may have it."""
        return all(version < gpu.capability for _, version in self._built)

    @property
    def _built(self) -> list[tuple[str, tuple[int, int]]]:
        matches = filter(None, map(_KERNELS.match, self.kernels))
        return [(match[1], (int(match[2]), int(match[3]))) for match in matches]


class RunProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process of one of our runs, found by its environment."""

    pid: Annotated[int, Meta(ge=1)]
    run_id: str  # the run's directory on the node, `<run_id>.<node_rank>`
    command: str | None = None  # its name
    supervised: bool = False  # whether the run still has a supervisor


class PathFact(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a path of the job exists on the node; relative ones start at cwd."""

    path: str  # as asked for
    kind: str | Unknown  # `file`, `directory` or `missing`
    writable: bool = False  # whether it can be written or created
    filesystem: str | None = None  # type of its file system, `ext4`, `nfs4`, as in /proc/self/mountinfo
    device: str | None = None  # source of the file system, `/dev/nvme0n1p2`, `server:/export`


class HungPath(msgspec.Struct, frozen=True, kw_only=True):
    """A path of the job that did not answer in time."""

    path: str  # as asked for
    place: str | None = None  # mount point of its likely file system; also `filesystem` and `device`
    filesystem: str | None = None
    device: str | None = None


class PortFact(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a TCP port can be bound on all of the node's addresses."""

    port: int
    taken: bool | Unknown
    user: str | None = None  # who listens there, if visible: `python3 (pid 123, user alice)`


class ContentFact(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a file, directory or git checkout of the job, in a form that can be compared between nodes."""

    path: str  # as asked for, or a file below it
    digest: Digest | Unknown  # of the content
    size_bytes: int | None = None


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about one node; keys that are not listed here are ignored."""

    node: str = ""  # its name in the hostfile
    hostname: str | Unknown = UNASKED  # its own name
    user: str | Unknown = UNASKED  # the user that SSH logged in as
    home: str | Unknown = UNASKED
    boot_id: str | Unknown = UNASKED  # the kernel's boot id; equal ids mean the same machine
    time_s: float | Unknown = UNASKED  # the node's wall clock when it answered, seconds since the epoch
    cores: int | Unknown = UNASKED  # CPUs that a job may use
    architecture: str | Unknown = UNASKED  # the kernel's name of the instruction set, `x86_64`, `aarch64`
    # the kernel's name of the CPU, `AMD EPYC 9B14 96-Core Processor`; Arm CPUs have none
    processor: str | Unknown = UNASKED
    memory_total_gib: float | Unknown = UNASKED  # physical memory
    disk_free_gib: float | Unknown = UNASKED  # free space in the directory of runs
    agent_python: str | Unknown = UNASKED  # version of the agent's interpreter
    python: str | Unknown = UNASKED  # absolute path of the job's interpreter
    python_version: str | Unknown = UNASKED
    # versions of torch, llamafactory, ... in the job's environment; missing keys are not installed.
    packages: Entries[Version] | Unknown = UNASKED
    # keys of the job's YAML that LLaMA-Factory does not know, each with the most similar argument, or None
    unknown_arguments: Entries[Argument | None] | Unknown = UNASKED
    cwd: str | Unknown = UNASKED  # the job's working directory
    interfaces: tuple[Interface, ...] | Unknown = ()
    routes: tuple[Route, ...] = ()  # to the peers asked for
    ssh_address: Address | Unknown = UNASKED  # the address that SSH connected to
    hostname_address: Address | Unknown = UNASKED  # what its hostname resolves to
    gpus: tuple[Gpu, ...] | Unknown = ()
    accelerator: str | None = None  # kind of `gpus`, one of `accelerators.ACCELERATORS`; None without GPUs
    gpu_query_s: float | Unknown = UNASKED  # duration of nvidia-smi, if it was waited for
    paths: tuple[PathFact, ...] = ()
    # paths of the job, including its directory and interpreter, that did not answer
    hung_paths: tuple[HungPath, ...] = ()
    # directories mounted noexec from which a job loads compiled code, by the variable that moves each
    noexec: Entries[str] | Unknown = UNASKED
    ports: tuple[PortFact, ...] = ()  # the ports asked for
    env: dict[str, str] = {}  # variables of the SSH environment that would change a run (RANK, PET_*, NCCL_*, ...)
    # /etc/machine-id, which distinguishes two containers of a machine from a machine listed twice
    machine_id: str | Unknown = UNASKED
    # the node's wall clock minus the controller's; computed when the answer arrives
    clock_offset_s: float | Unknown = UNASKED
    memory_available_gib: float | Unknown = UNASKED  # available without swapping, within `memory_limit_gib`
    # limit of the container or login session, if below the physical memory
    memory_limit_gib: float | Unknown = UNASKED
    shm_total_gib: float | Unknown = UNASKED  # size of /dev/shm
    shm_free_gib: float | Unknown = UNASKED  # free space in /dev/shm
    # soft limits by name: `open_files`, `processes`, `locked_memory_bytes`; None is unlimited
    limits: dict[str, int | None] = {}
    container: str | Unknown = UNASKED  # `docker`, `podman`, `lxc`, ..., if one is detected
    port_range: tuple[int, int] | Unknown = UNASKED  # the ephemeral ports, first and last
    absent_modules: tuple[str, ...] | Unknown = UNASKED  # modules asked for that the job's interpreter does not find
    tools: dict[str, str] = {}  # absolute paths of the programs asked for, on the job's PATH
    interactive: Entries[str] | Unknown = UNASKED  # programs found only by an interactive login shell
    nccl_files: dict[str, dict[str, str]] = {}  # values in NCCL's configuration files, by file
    deepspeed_env: dict[str, str] = {}  # values in ~/.deepspeed_env
    nccl_version: Version | Unknown = UNASKED  # NCCL of the job's torch
    nccl_inspector: str | Unknown = UNASKED  # path of NCCL's Inspector plugin
    cuda_version: Version | Unknown = UNASKED  # CUDA version of the job's torch
    # what the job's torch finds; asked only if it was built for the GPUs
    torch_devices: TorchDevices | Unknown = UNASKED
    rdma: tuple[RdmaPort, ...] = ()
    run_processes: tuple[RunProcess, ...] | Unknown = ()
    contents: tuple[ContentFact, ...] = ()
    model: Entries[Any] | Unknown = UNASKED  # config.json of the job's model

    @property
    def visible_gpus(self) -> tuple[Gpu, ...]:
        """GPUs that the session's environment makes visible, in CUDA's order; otherwise all."""
        gpus = or_empty(self.gpus)
        for number, name in enumerate(accelerator_named(self.accelerator).visible):
            visible = self.env.get(name)
            if visible is not None:
                # The second variable numbers the devices that the first shows.
                gpus = select_gpus(visible, gpus, by_place=number > 0)
        return gpus

    @property
    def model_config(self) -> dict[str, Any] | None:
        """The model's config.json; None if it is unknown."""
        return None if isinstance(self.model, Unknown) else self.model.values

    def __post_init__(self) -> None:
        if not isinstance(self.ssh_address, Unknown):
            ipaddress.ip_address(self.ssh_address)
