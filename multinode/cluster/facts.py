"""NodeFacts: what a probe found on a node. Facts carry no judgement; None always comes with a reason in `missing`."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from multinode.cluster.accelerators import accelerator_named

# What a node says travels into commands that a person pastes elsewhere: what has a shape must keep it.
Version = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9.+!_-]{0,99}\Z")]
InterfaceName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_][A-Za-z0-9_.:@+-]{0,14}\Z")]
# The kernel's limit is 63 characters.
DeviceName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}\Z")]
PciAddress = Annotated[str, Meta(pattern=r"\A[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\Z")]
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{1,64}\Z")]
# A zone, behind `%`, may be any text to the module ipaddress.
_ADDRESS = r"[0-9A-Fa-f.:]{2,45}"
Address = Annotated[str, Meta(pattern=rf"\A{_ADDRESS}(?:%[A-Za-z0-9_.:@+-]{{1,15}})?\Z")]
Network = Annotated[str, Meta(pattern=rf"\A{_ADDRESS}(?:/[0-9]{{1,3}})?\Z")]
Argument = Annotated[str, Meta(pattern=r"\A[A-Za-z_]\w{0,199}\Z")]


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """One network interface.

    Attributes:
        addresses: its IPv4 and global IPv6 addresses with prefix length, `10.0.0.1/24`.
        up: whether it is up and has a carrier (operstate up, or unknown for virtual ones).
        mtu: in bytes.
        speed_gbit_per_s: what the card says it negotiated.
        kind: `ethernet`, `loopback`, `bridge`, `wireless`, `virtual` or `infiniband`.
        driver: the software that makes it, where it is not a card: `veth`, `wireguard`, `tun`, `bond`, ...
        running: whether the kernel calls it RUNNING, which is what NCCL asks.
        duplex: `full` or `half`, where it is told.
        card_gbit_per_s: the fastest that the card could do, where it is told.
        errors: frames lost to errors since the node started, both directions.
        packets: frames that went through since then, both directions.
    """

    name: InterfaceName
    addresses: tuple[Network, ...] = ()
    up: bool = False
    mtu: int | None = None
    speed_gbit_per_s: float | None = None
    kind: str = "ethernet"
    driver: str | None = None
    running: bool | None = None
    duplex: str | None = None
    card_gbit_per_s: float | None = None
    errors: int | None = None
    packets: int | None = None

    def __post_init__(self) -> None:
        for address in self.addresses:
            ipaddress.ip_interface(address)

    @property
    def networks(self) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
        """Those of its addresses."""
        return [ipaddress.ip_interface(address).network for address in self.addresses]


class RdmaPort(msgspec.Struct, frozen=True, kw_only=True):
    """A port of an RDMA card, from /sys/class/infiniband.

    Attributes:
        device: `mlx5_0`.
        port: from 1 on.
        state: `ACTIVE`, `DOWN`, `INIT`, `ARMED`.
        link_layer: `InfiniBand` or `Ethernet` (RoCE).
        rate_gbit_per_s: what it negotiated.
        ifname: the network interface of the same port.
        gid_index: by which RoCE v2 addresses it, that of an IPv4 address first; what NCCL_IB_GID_INDEX would name.
        board: the card's model, as its maker numbers it; `firmware` its version.
        acs: PCIe bridges between it and a GPU on its switch whose access control sends what they exchange to the CPU.
        iommu: what translates the addresses of what it sends, `dmar1` (Intel), `ivhd0` (AMD), `smmu3...` (Arm).
        pcie_gbit_per_s: what goes through its slot in each direction; `pcie_max_gbit_per_s` at the most.
    """

    device: DeviceName
    port: int
    state: str | None = None
    link_layer: str | None = None
    rate_gbit_per_s: float | None = None
    ifname: str | None = None
    gid_index: int | None = None
    board: str | None = None
    firmware: str | None = None
    acs: tuple[PciAddress, ...] = ()
    iommu: str | None = None
    pcie_gbit_per_s: float | None = None
    pcie_max_gbit_per_s: float | None = None

    @property
    def carries_gbit_per_s(self) -> float | None:
        """Its rate, or less where the slot carries less: half of a card may tell the rate of the whole."""
        rate = self.rate_gbit_per_s
        return min(rate, self.pcie_gbit_per_s or rate) if rate is not None else None


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """The way the kernel would send to a peer.

    Attributes:
        peer: the peer's address.
        source: our address that the kernel picks; None where there is no route.
        ifname: the interface of that address.
        error: why there is none.
    """

    peer: str
    source: Address | None = None
    ifname: InterfaceName | None = None
    error: str | None = None


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds memory of a GPU.

    Attributes:
        user: whose it is, where that can be seen.
        command: its name, likewise.
        memory_mib: what it holds of the GPU.
        run_id: the run of ours that it belongs to, where that can be seen.
    """

    pid: Annotated[int, Meta(ge=1)]
    user: str | None = None
    command: str | None = None
    memory_mib: float | None = None
    run_id: str | None = None


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU, or another accelerator, as its vendor's program lists it, and the processes on it."""

    index: int
    name: str
    memory_total_mib: float | None = None
    memory_used_mib: float | None = None
    driver: str | None = None
    uuid: str | None = None
    processes: tuple[GpuProcess, ...] = ()


def common_backend(nodes: Iterable[NodeFacts]) -> str:
    """What torch's collectives go over where all nodes have GPUs of one vendor; else gloo, which all have."""
    backends = {accelerator_named(node.accelerator).backend if node.gpus else "gloo" for node in nodes}
    return backends.pop() if len(backends) == 1 else "gloo"


def select_gpus(visible: str, gpus: Sequence[Gpu], *, by_place: bool = False) -> tuple[Gpu, ...]:
    """The GPUs that CUDA shows under this value of CUDA_VISIBLE_DEVICES, in its order; other vendors' likewise.

    CUDA takes the entries before the first one that names no GPU (CUDA C++ Programming Guide, "CUDA Environment
    Variables"). Numbers count as nvidia-smi does, in PCI bus order, or where they stand among `gpus`. A MIG device is
    not one of nvidia-smi's GPUs.
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
    """By its number or by its UUID, which may be shortened."""
    return entry == str(number) or (entry.startswith("GPU-") and (gpu.uuid or "").startswith(entry))


class RunProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process of one of our runs, found by its environment.

    Attributes:
        run_id: the run's directory on the node, `<run_id>.<node_rank>`.
        command: its name.
        supervised: whether a supervisor that lives still looks after the run.
    """

    pid: Annotated[int, Meta(ge=1)]
    run_id: str
    command: str | None = None
    supervised: bool = False


class PathFact(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a path of the job exists on the node; relative ones start at cwd.

    Attributes:
        path: as it was asked for.
        kind: `file`, `directory` or `missing`.
        writable: whether it, or where it would be made, can be written.
        filesystem: type of the file system it lies on, `ext4`, `nfs4`, as in /proc/self/mountinfo.
        device: that file system's source, `/dev/nvme0n1p2`, `server:/export`.
    """

    path: str
    kind: str
    writable: bool = False
    filesystem: str | None = None
    device: str | None = None


class HungPath(msgspec.Struct, frozen=True, kw_only=True):
    """A path of the job that did not answer in time.

    Attributes:
        path: as it was asked for.
        place: where the file system is mounted that it seems to lie on; likewise `filesystem` and `device`.
    """

    path: str
    place: str | None = None
    filesystem: str | None = None
    device: str | None = None


class ContentFact(msgspec.Struct, frozen=True, kw_only=True):
    """What a file, a directory or a git checkout of the job holds, in a form that nodes can compare.

    Attributes:
        path: as it was asked for, or a file below it.
        digest: of the content; None where it was not read.
        reason: why there is no digest.
    """

    path: str
    digest: Digest | None = None
    size_bytes: int | None = None
    reason: str | None = None


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What one node is. Unknown keys from a newer agent are ignored; every missing value has a reason.

    Attributes:
        node: the node's name in the hostfile.
        hostname: what the node calls itself.
        user: the user that SSH logged in as.
        boot_id: the kernel's boot id; equal ids mean the same machine.
        time_s: the node's wall clock when it answered, seconds since the epoch.
        cores: processors that a job may use.
        processor: what the kernel calls its processors, `AMD EPYC 9B14 96-Core Processor`; ARM's have no name.
        memory_total_gib: physical memory, whatever part of it may be used.
        disk_free_gib: free space where runs are kept.
        agent_python: version of the interpreter that runs the agent.
        python: absolute path of the job's interpreter.
        packages: versions of torch, llamafactory, ... in the job's environment; an absent key is not installed.
        unknown_arguments: keys of the job's YAML that its LLaMA-Factory has no argument for, each with the argument
            whose name is nearest; None is none near.
        cwd: the directory in which the job would run.
        hung_paths: those of the job's paths, its directory and its interpreter that did not answer.
        noexec: directories mounted noexec from which a job loads what it compiles, by the variable that moves each.
        routes: the ways to the peers that were asked for.
        ssh_address: the node's address that SSH connected to.
        hostname_address: what the node's own name resolves to.
        port_users: ports that were asked for and are taken, with who holds them where that can be seen.
        env: variables of the SSH environment that would change a run (RANK, PET_*, NCCL_*, ...).
        machine_id: /etc/machine-id, which tells two containers of one machine from one machine named twice.
        clock_offset_s: the node's wall clock less the controller's; made by the controller when the answer came.
        memory_available_gib: what could be had without swapping, within `memory_limit_gib`.
        memory_limit_gib: what the container or the login session may use, where that is less than the machine has.
        shm_total_gib: size of /dev/shm; likewise `shm_free_gib`.
        limits: soft limits by name: `open_files`, `processes`, `locked_memory_bytes`; None is unlimited.
        container: what kind of container the node is, `docker`, `podman`, `lxc`, ...; None is none that shows.
        port_range: the ephemeral ports, first and last.
        tools: absolute paths of the programs that were asked for, on the PATH that a job gets.
        interactive: those that were not found so and that an interactive login shell finds.
        nccl_files: values by file, of the NCCL configuration files that the node has.
        deepspeed_env: values of ~/.deepspeed_env.
        accelerator: what kind `gpus` are, of `accelerators.ACCELERATORS`; None where an agent knows of NVIDIA's alone.
        gpu_query_s: how long nvidia-smi took; None where it answered before it was waited for.
        nccl_version: NCCL of the job's torch.
        nccl_inspector: path of NCCL's Inspector plugin; None is not found.
        cuda_version: CUDA that the job's torch was built with.
        model: config.json of the job's model, where it was asked for.
        missing: reason by name of every fact that could not be had.
    """

    node: str = ""
    hostname: str | None = None
    user: str | None = None
    home: str | None = None
    boot_id: str | None = None
    time_s: float | None = None
    cores: int | None = None
    processor: str | None = None
    memory_total_gib: float | None = None
    disk_free_gib: float | None = None
    agent_python: str | None = None
    python: str | None = None
    python_version: str | None = None
    packages: dict[str, Version] = {}
    unknown_arguments: dict[str, Argument | None] = {}
    cwd: str | None = None
    interfaces: tuple[Interface, ...] = ()
    routes: tuple[Route, ...] = ()
    ssh_address: Address | None = None
    hostname_address: Address | None = None
    gpus: tuple[Gpu, ...] = ()
    accelerator: str | None = None
    gpu_query_s: float | None = None
    paths: tuple[PathFact, ...] = ()
    hung_paths: tuple[HungPath, ...] = ()
    noexec: dict[str, str] = {}
    port_users: dict[str, str] = {}
    env: dict[str, str] = {}
    machine_id: str | None = None
    clock_offset_s: float | None = None
    memory_available_gib: float | None = None
    memory_limit_gib: float | None = None
    shm_total_gib: float | None = None
    shm_free_gib: float | None = None
    limits: dict[str, int | None] = {}
    container: str | None = None
    port_range: tuple[int, int] | None = None
    tools: dict[str, str] = {}
    interactive: dict[str, str] = {}
    nccl_files: dict[str, dict[str, str]] = {}
    deepspeed_env: dict[str, str] = {}
    nccl_version: Version | None = None
    nccl_inspector: str | None = None
    cuda_version: Version | None = None
    rdma: tuple[RdmaPort, ...] = ()
    run_processes: tuple[RunProcess, ...] = ()
    contents: tuple[ContentFact, ...] = ()
    model: dict[str, Any] | None = None
    missing: dict[str, str] = {}

    @property
    def visible_gpus(self) -> tuple[Gpu, ...]:
        """Those that the environment of the node's sessions lets a program use, in CUDA's order; else all."""
        gpus = self.gpus
        for number, name in enumerate(accelerator_named(self.accelerator).visible):
            visible = self.env.get(name)
            if visible is not None:
                # What stands second counts those that the first shows.
                gpus = select_gpus(visible, gpus, by_place=number > 0)
        return gpus

    def __post_init__(self) -> None:
        if self.ssh_address is not None:
            ipaddress.ip_address(self.ssh_address)
