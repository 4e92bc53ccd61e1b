"""Place: one node's part of a job, and the command line, environment and directory that every engine starts there."""

from __future__ import annotations

import zlib

import msgspec

from multinode.cluster.accelerators import NVIDIA, Accelerator
from multinode.cluster.quoting import Command, is_ipv6
from multinode.job.job import Job, ScriptJob

JOB_FILE = "job.yaml"

# Left over in a shell profile, each of these would change a run unseen (torchrun reads PET_* as its options).
STRAY_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "NNODES",
    "NPROC_PER_NODE",
    "MASTER_ADDR",
    "MASTER_PORT",
    # With it LLaMA-Factory's launcher starts an elastic rendezvous.
    "RDZV_ID",
    "PET_*",
    "TORCHELASTIC_*",
    # With it torchrun takes this node's number of workers for every node.
    "TORCH_ELASTIC_WORKER_IDENTICAL",
)
_FLIGHT_RECORDS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
# Below those of the rendezvous.
_RAS_PORTS = range(12000, 20000)
# torchrun, accelerate and DeepSpeed's launcher take a module after `--module`; LLaMA-Factory's launcher trains if a
# worker runs it.
_LLAMAFACTORY_WORKER = ("--module", "llamafactory.launcher")


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """One node's part of a job."""

    node_rank: int
    workers: tuple[int, ...]  # of each node, in node-rank order
    master_addr: str  # address of node 0, where the rendezvous is
    master_port: int
    ifname: str | None  # this node's data-plane interface; None is unknown. Likewise `addr`, its address there.
    # for its workers, as the accelerator's variable names them; None leaves the choice to the engine
    devices: tuple[str, ...] | None
    run_dir: str
    python: str | None  # the job's interpreter on the node; None is `python3` of its PATH
    packages: dict[str, str] | None  # versions in the job's environment; None is unknown
    agent: str | None = None
    code_dir: str | None = None  # where the job runs, in a copy of the user's files; None is the node's own directory
    addr: str | None = None
    # the interfaces for NCCL's sockets, where the hostfile names several; likewise `hcas`, RDMA devices
    ifnames: tuple[str, ...] = ()
    hcas: tuple[str, ...] = ()
    accelerator: Accelerator = NVIDIA  # what kind they are

    @property
    def nnodes(self) -> int:
        """Number of nodes."""
        return len(self.workers)

    @property
    def nproc(self) -> int:
        """Workers of this node."""
        return self.workers[self.node_rank]

    @property
    def ranks(self) -> range:
        """Ranks of this node's workers: torchrun and DeepSpeed's launcher number the workers node by node."""
        first = sum(self.workers[: self.node_rank])
        return range(first, first + self.nproc)


def program_words(place: Place, job: Job) -> tuple[str, ...]:
    """What each worker runs, behind the options of a launcher: a script, or LLaMA-Factory with the job's YAML."""
    return job.words if isinstance(job, ScriptJob) else (*_LLAMAFACTORY_WORKER, f"{place.run_dir}/{JOB_FILE}")


def node_command(
    place: Place, argv: tuple[str, ...], variables: dict[str, str], env: dict[str, str], cwd: str | None
) -> Command:
    """The command with all engines' variables, the engine's own, then the user's; leftovers are removed.

    Gloo takes the plain name of an interface, on any accelerator. If an interface has addresses of both families,
    gloo, NCCL and HCCL take IPv4 unless their variable says otherwise.
    """
    accelerator, hidden = place.accelerator, tuple[str, ...]()
    common = dict(accelerator.order)
    if place.devices is not None:
        common[accelerator.visible[0]] = ",".join(place.devices)
        # Hidden devices are left out already; these variables would hide more of the chosen ones.
        hidden = accelerator.visible[1:]
        if accelerator.has_ras:
            common["NCCL_RAS_ADDR"] = f"127.0.0.1:{_ras_port(place)}"
    if place.ifname is not None:
        # NCCL's `=` syntax takes lists; other variables take exactly one.
        names = ",".join(place.ifnames or (place.ifname,))
        common |= {
            name: form.format(names if form.startswith("=") else place.ifname)
            for name, form in accelerator.sockets.items()
        }
        common["GLOO_SOCKET_IFNAME"] = place.ifname
    if place.hcas:
        common["NCCL_IB_HCA"] = f"={','.join(place.hcas)}"
    if place.addr is not None and is_ipv6(place.addr) and accelerator.family is not None:
        common[accelerator.family] = "AF_INET6"
    if accelerator.backend == "nccl":
        common |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{place.run_dir}/nccl.%h.%p.log"}
        # Whether the flight recorder writes by default, and which name it reads, depends on the release.
        common |= dict.fromkeys(_FLIGHT_RECORDS, f"{place.run_dir}/nccl_trace_rank_")
    common |= {
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
        "PYTHONUNBUFFERED": "1",
    }
    ours = common | variables
    python = place.python
    return Command(
        argv=argv,
        env=ours | env,
        unset=tuple(name for name in (*STRAY_VARIABLES, *hidden) if name not in ours),
        # The directory of the interpreter's programs; a bare name has none.
        path_first=python.rsplit("/", 1)[0] if python is not None and "/" in python else None,
        cwd=cwd,
    )


def _ras_port(place: Place) -> int:
    """Port of NCCL's RAS service: this run's own, so that a hang does not query another job.

    Below the ephemeral ports. `localhost` might resolve to an IPv6 address on a node without IPv6. If the port is
    taken, NCCL continues without the service.
    """
    return _RAS_PORTS.start + zlib.crc32(place.run_dir.encode()) % len(_RAS_PORTS)


def run_module(place: Place, name: str, *words: str) -> tuple[str, ...]:
    """Run by the full path of the interpreter, so that PATH does not matter."""
    return (place.python or "python3", "-m", name, *words)
