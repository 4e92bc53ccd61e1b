"""The words and variables that all engines share: of the node's place in the job, and of its accelerators."""

from __future__ import annotations

import zlib

from multinode.cluster.accelerators import accelerator_named
from multinode.cluster.quoting import Command, is_ipv6
from multinode.job.job import Job, ScriptJob
from multinode.records.plan import Place, Rendezvous

JOB_FILE = "job.yaml"
"""The file of a training's keys, in the run's directory."""

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
# Below the ports of the rendezvous.
_RAS_PORTS = range(12000, 20000)


def program_words(place: Place, job: Job) -> tuple[str, ...]:
    """What each worker runs, behind the options of a launcher: a script, or a framework with the job's keys."""
    return job.words if isinstance(job, ScriptJob) else job.words(f"{place.run_dir}/{JOB_FILE}")


def node_command(
    rendezvous: Rendezvous, place: Place, argv: tuple[str, ...], variables: dict[str, str], env: dict[str, str]
) -> Command:
    """The command with all engines' variables, the engine's own, then the user's; leftovers are removed.

    Gloo takes the plain name of an interface, on any accelerator. If an interface has addresses of both families,
    gloo, NCCL and HCCL take IPv4 unless their variable says otherwise.
    """
    accelerator, endpoint, hidden = accelerator_named(place.accelerator), place.endpoint, tuple[str, ...]()
    common = dict(accelerator.order)
    if place.devices is not None:
        common[accelerator.visible[0]] = ",".join(place.devices)
        # Hidden devices are left out already; these variables would hide more of the chosen ones.
        hidden = accelerator.visible[1:]
        if accelerator.has_ras:
            common["NCCL_RAS_ADDR"] = f"127.0.0.1:{_ras_port(place)}"
    if endpoint.ifname is not None:
        # NCCL's `=` syntax takes lists; other variables take exactly one.
        names = ",".join(endpoint.ifnames or (endpoint.ifname,))
        common |= {
            name: form.format(names if form.startswith("=") else endpoint.ifname)
            for name, form in accelerator.sockets.items()
        }
        common["GLOO_SOCKET_IFNAME"] = endpoint.ifname
    if place.hcas:
        common["NCCL_IB_HCA"] = f"={','.join(place.hcas)}"
    if endpoint.addr is not None and is_ipv6(endpoint.addr) and accelerator.family is not None:
        common[accelerator.family] = "AF_INET6"
    if accelerator.backend == "nccl":
        common |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{place.run_dir}/nccl.%h.%p.log"}
        # Whether the flight recorder writes by default, and which name it reads, depends on the release.
        common |= dict.fromkeys(_FLIGHT_RECORDS, f"{place.run_dir}/nccl_trace_rank_")
    common |= {
        "MASTER_ADDR": rendezvous.addr,
        "MASTER_PORT": str(rendezvous.port),
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
