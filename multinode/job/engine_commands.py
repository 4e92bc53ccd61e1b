"""Engine: what starts the workers on a node, and the command and files of each node that follow from it.

Every engine gets the node's place in the job and makes its workers' ranks of it. The user's own variables win.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from typing import Any

import msgspec

from multinode.cluster.accelerators import NVIDIA, Accelerator
from multinode.cluster.quoting import Command, bracketed, is_ipv6
from multinode.errors import UsageError
from multinode.job.job import Job, LlamaFactoryJob, ScriptJob
from multinode.records.benchmark import Benchmark, DeviceTest
from multinode.records.plan import PlanFile
from multinode.strict_yaml import YamlError, dump_yaml, parse_yaml

ENGINES = ("torchrun", "llamafactory", "deepspeed", "accelerate", "exec")
JOB_FILE = "job.yaml"

# Left over in a profile, each of these changes a run behind the launcher's back (torchrun reads PET_* as its options).
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
    # With it LLaMA-Factory's own launcher starts an elastic rendezvous.
    "RDZV_ID",
    "PET_*",
    "TORCHELASTIC_*",
    # With it torchrun takes this node's number of workers for that of every node.
    "TORCH_ELASTIC_WORKER_IDENTICAL",
)
_FLIGHT_RECORDS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
# Below those of the rendezvous.
_RAS_PORTS = range(12000, 20000)
_ACCELERATE_FILE = "accelerate.yaml"
# Accelerate starts one process a node for these, and expects mpirun to have started the others.
_ALONE = frozenset({"NO", "MULTI_CPU"})
# torchrun, accelerate and DeepSpeed's launcher all take a module after `--module`; LLaMA-Factory's launcher is one that
# trains when a worker runs it.
_LLAMAFACTORY_WORKER = ("--module", "llamafactory.launcher")
# From this release on the node's rank is read from NODE_RANK; before it from RANK (LLaMA-Factory's launcher).
_NODE_RANK_SINCE = (0, 9, 1)


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """What starts the workers: one of `ENGINES`, and the user's configuration of accelerate, if any."""

    name: str
    accelerate: dict[str, Any] = {}


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """One node's part of a job.

    Attributes:
        workers: of each node, in node-rank order.
        master_addr: address of node 0, where the rendezvous is.
        ifname: this node's data-plane interface; None is unknown. Likewise `addr`, its address there.
        ifnames: the interfaces for NCCL's sockets, where the hostfile names several; likewise `hcas`, RDMA devices.
        devices: for its workers, as the accelerator's variable names them; None leaves the choice to the engine.
        accelerator: what kind they are.
        python: the job's interpreter on the node; None is `python3` of its PATH.
        packages: versions in the job's environment; None is unknown.
        code_dir: where the job runs, in a copy of the user's files; None is the node's own directory.
    """

    node_rank: int
    workers: tuple[int, ...]
    master_addr: str
    master_port: int
    ifname: str | None
    devices: tuple[str, ...] | None
    run_dir: str
    python: str | None
    packages: dict[str, str] | None
    agent: str | None = None
    code_dir: str | None = None
    addr: str | None = None
    ifnames: tuple[str, ...] = ()
    hcas: tuple[str, ...] = ()
    accelerator: Accelerator = NVIDIA

    @property
    def nnodes(self) -> int:
        """How many nodes."""
        return len(self.workers)

    @property
    def nproc(self) -> int:
        """Workers of this node."""
        return self.workers[self.node_rank]

    @property
    def ranks(self) -> range:
        """Of this node's workers: torchrun and DeepSpeed's launcher number the workers node by node."""
        first = sum(self.workers[: self.node_rank])
        return range(first, first + self.nproc)


def choose_engine(job: Job, asked: str | None = None, accelerate: dict[str, Any] | None = None) -> Engine:
    """The engine that was asked for, else the job's own: LLaMA-Factory for its YAML, torchrun for a script.

    Raises:
        UsageError: there is none of this name, or it does not run such a job.
    """
    own = "llamafactory" if isinstance(job, LlamaFactoryJob) else "torchrun"
    name = asked if asked is not None else own
    if name not in ENGINES:
        raise UsageError(f"unknown engine {name!r}", hint=f"one of {', '.join(ENGINES)}")
    if name == "llamafactory" and isinstance(job, ScriptJob):
        raise UsageError(
            "the engine llamafactory runs a YAML, and this is a script",
            hint="multinode launch train.yaml, or another --engine",
        )
    if name == "exec" and isinstance(job, LlamaFactoryJob):
        raise UsageError(
            "the engine exec starts a program of yours, and this is a LLaMA-Factory YAML",
            hint="leave --engine out, or put the program after --",
        )
    if accelerate is not None and name != "accelerate":
        raise UsageError(f"--accelerate-config is for --engine accelerate, and the engine is {name}")
    return Engine(name=name, accelerate=accelerate or {})


def engine_command(engine: Engine, place: Place, job: Job, env: dict[str, str], cwd: str | None) -> Command:
    """The command of one node; `env` is the user's and wins.

    Raises:
        UsageError: the engine cannot place the workers as the environment has it.
    """
    if engine.name == "llamafactory":
        return _llamafactory(place, env, cwd)
    if engine.name == "accelerate":
        return _accelerate(place, _program(engine, place, job), engine.accelerate, env, cwd)
    commands = {"torchrun": _torchrun, "deepspeed": _deepspeed, "exec": _any_program}
    return commands[engine.name](place, _program(engine, place, job), env, cwd)


def engine_files(engine: Engine, place: Place) -> tuple[PlanFile, ...]:
    """What the engine itself reads on the node."""
    return (_accelerate_file(place, engine.accelerate),) if engine.name == "accelerate" else ()


def benchmark_command(place: Place, test: Benchmark, env: dict[str, str]) -> Command:
    """A benchmark of one node: torchrun on the agent's own archive, with the request in the environment."""
    request = msgspec.json.encode(msgspec.to_builtins(test) | {"addr": place.addr}).decode()
    program = "devices" if isinstance(test, DeviceTest) else "collectives"
    return _torchrun(place, (place.agent or "agent.pyz", program), env | {"MULTINODE_REQUEST": request}, None)


def reads_rank(version: str | None) -> bool:
    """Whether this release of LLaMA-Factory reads the node's rank from RANK, or might (unknown version)."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version or "")
    return numbers is None or tuple(int(n) for n in numbers.groups()) < _NODE_RANK_SINCE


def parse_accelerate(text: str, source: str) -> dict[str, Any]:
    """The user's configuration, as `accelerate config` writes it. `source` is its path, for messages.

    Raises:
        UsageError: it is not YAML, or not for machines of one's own.
    """
    try:
        config = parse_yaml(text)
    except YamlError as wrong:
        raise UsageError(wrong.at(source)) from None
    if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
        raise UsageError(f"{source} is not an accelerate configuration", hint="accelerate config --config_file FILE")
    place = config.get("compute_environment", "LOCAL_MACHINE")
    if place != "LOCAL_MACHINE":
        raise UsageError(f"{source}: compute_environment is {place}, and only LOCAL_MACHINE runs on nodes of one's own")
    return config


def _program(engine: Engine, place: Place, job: Job) -> tuple[str, ...]:
    """The launcher's options, if any, the script and its arguments."""
    if isinstance(job, ScriptJob):
        return job.argv
    worker = (*_LLAMAFACTORY_WORKER, f"{place.run_dir}/{JOB_FILE}")
    # LLaMA-Factory takes its first argument for the YAML.
    return ("--no_local_rank", *worker) if engine.name == "deepspeed" else worker


def _command(
    place: Place, argv: tuple[str, ...], variables: dict[str, str], env: dict[str, str], cwd: str | None
) -> Command:
    """With the variables of every engine, the engine's own and then the user's, and without those that are left over.

    Gloo takes the plain name of an interface, on any accelerator. Of an interface with addresses of both kinds, gloo
    takes IPv4, and so do NCCL and HCCL unless their variable says otherwise.
    """
    accelerator, hidden = place.accelerator, tuple[str, ...]()
    common = dict(accelerator.order)
    if place.devices is not None:
        common[accelerator.visible[0]] = ",".join(place.devices)
        # What they hid is left out already; of the devices that are chosen they would hide more.
        hidden = accelerator.visible[1:]
        if accelerator.has_ras:
            common["NCCL_RAS_ADDR"] = f"127.0.0.1:{_ras_port(place)}"
    if place.ifname is not None:
        # NCCL's syntax, which `=` begins, has lists; of anything else one is sure to be read.
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
        # Where torch's flight recorder writes by itself differs from release to release; so does which name it reads.
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
        # Where the interpreter's own programs are; a bare name tells no directory.
        path_first=python.rsplit("/", 1)[0] if python is not None and "/" in python else None,
        cwd=cwd,
    )


def _ras_port(place: Place) -> int:
    """Where NCCL's RAS service listens on the node: a port of this run alone, or a hang would ask another job's.

    Below the ephemeral ports. Of `localhost` NCCL would take the first address, which may be IPv6's on a node
    without. Should it be taken all the same, NCCL goes on without the service.
    """
    return _RAS_PORTS.start + zlib.crc32(place.run_dir.encode()) % len(_RAS_PORTS)


def _module(place: Place, name: str, *words: str) -> tuple[str, ...]:
    """A launcher, by the interpreter in full: which of several programs PATH finds is then no question."""
    return (place.python or "python3", "-m", name, *words)


def _torchrun(place: Place, program: tuple[str, ...], env: dict[str, str], cwd: str | None) -> Command:
    """A script under torch.distributed.run with a static rendezvous.

    Static with an IP: c10d with an IP endpoint fails where the hostname maps to loopback (docs/adr/0005). torchrun puts
    address and port together, so an IPv6 address stands in brackets; in MASTER_ADDR it does not.
    """
    argv = _module(
        place,
        "torch.distributed.run",
        f"--nnodes={place.nnodes}",
        f"--node-rank={place.node_rank}",
        f"--nproc-per-node={place.nproc}",
        f"--master-addr={bracketed(place.master_addr)}",
        f"--master-port={place.master_port}",
        *program,
    )
    return _command(place, argv, {}, env, cwd)


def _any_program(place: Place, program: tuple[str, ...], env: dict[str, str], cwd: str | None) -> Command:
    """Any program, started once on each node, with its place in the cluster in the environment.

    Names are torchrun's. RANK, LOCAL_RANK and WORLD_SIZE are a worker's, and whoever starts the workers sets them.
    """
    variables = {
        "NNODES": str(place.nnodes),
        "NODE_RANK": str(place.node_rank),
        "NPROC_PER_NODE": str(place.nproc),
    }
    return _command(place, program, variables, env, cwd)


def _llamafactory(place: Place, env: dict[str, str], cwd: str | None) -> Command:
    """`llamafactory-cli train`, which starts a bare `torchrun` itself, from the variables set here.

    FORCE_TORCHRUN is always set: with one GPU a node, LLaMA-Factory otherwise ignores NNODES without a word and every
    node trains alone (LlamaFactory#8729).
    """
    names = ["NODE_RANK", *(["RANK"] if reads_rank((place.packages or {}).get("llamafactory")) else [])]
    variables = {
        "NNODES": str(place.nnodes),
        **dict.fromkeys(names, str(place.node_rank)),
        "NPROC_PER_NODE": str(place.nproc),
        "FORCE_TORCHRUN": "1",
    }
    return _command(place, ("llamafactory-cli", "train", f"{place.run_dir}/{JOB_FILE}"), variables, env, cwd)


def _deepspeed(place: Place, program: tuple[str, ...], env: dict[str, str], cwd: str | None) -> Command:
    """DeepSpeed's per-node launcher, with our ranks; its runner, which starts nodes through pdsh or ssh, is left out.

    As under `deepspeed`, the script is given `--local_rank=N` first; `--no_local_rank` before it switches that off.

    Raises:
        UsageError: the user's own CUDA_VISIBLE_DEVICES has too few devices.
    """
    # Node names and the devices of each, in node-rank order. The launcher sets CUDA_VISIBLE_DEVICES to the devices of
    # its own node and counts those of the others, nothing more.
    world: dict[str, list[int] | list[str]] = {
        f"node-{rank}": list(range(count)) for rank, count in enumerate(place.workers)
    }
    given = None if place.devices is None else ",".join(place.devices)
    if (devices := env.get(place.accelerator.visible[0], given)) is not None:
        world[f"node-{place.node_rank}"] = _devices(place, devices)
    argv = _module(
        place,
        "deepspeed.launcher.launch",
        f"--world_info={base64.urlsafe_b64encode(json.dumps(world).encode()).decode()}",
        f"--node_rank={place.node_rank}",
        f"--master_addr={place.master_addr}",
        f"--master_port={place.master_port}",
        *program,
    )
    return _command(place, argv, {}, env, cwd)


def _devices(place: Place, visible: str) -> list[str]:
    """As many of the devices that the environment names, which may be UUIDs, as there are workers."""
    named = [name.strip() for name in visible.split(",") if name.strip()]
    variable = place.accelerator.visible[0]
    if len(named) < place.nproc:
        raise UsageError(
            f"{variable} names {len(named)} devices on node rank {place.node_rank}, which has {place.nproc} workers",
            hint=f"--workers-per-node {len(named)}" if named else "DeepSpeed's launcher wants a device for each worker",
        )
    return named[: place.nproc]


def _accelerate(
    place: Place, program: tuple[str, ...], base: dict[str, Any], env: dict[str, str], cwd: str | None
) -> Command:
    """`accelerate launch` with a configuration made for each node, on top of the user's own.

    Accelerate then starts the workers by torchrun with a static rendezvous, as our own engine of that name does.
    """
    # Of the two ways in which accelerate starts workers, the one with torchrun does not tell them of the CPU.
    variables = {"ACCELERATE_USE_CPU": "true"} if base.get("use_cpu") is True else {}
    config = ("--config_file", f"{place.run_dir}/{_ACCELERATE_FILE}")
    return _command(place, _module(place, "accelerate.commands.launch", *config, *program), variables, env, cwd)


def _accelerate_file(place: Place, base: dict[str, Any]) -> PlanFile:
    """The configuration of one node: the user's, with the keys that place it in the cluster set anew."""
    kind = base.get("distributed_type", "NO")
    config = base | {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if kind in _ALONE else kind,
        "machine_rank": place.node_rank,
        "num_machines": place.nnodes,
        # The total over all nodes. Accelerate divides it by the machines again to get the workers of this one.
        "num_processes": place.nproc * place.nnodes,
        "main_process_ip": place.master_addr,
        "main_process_port": place.master_port,
        "rdzv_backend": "static",
        # Without it accelerate rendezvouses through an endpoint, whose host torchrun then looks for among its names.
        "same_network": True,
        # The variable of visible devices has chosen already.
        "gpu_ids": "all",
    }
    if isinstance(config.get("deepspeed_config"), dict):
        # Its default is pdsh, from the first node.
        config["deepspeed_config"] = config["deepspeed_config"] | {"deepspeed_multinode_launcher": "standard"}
    return PlanFile(path=_ACCELERATE_FILE, text=dump_yaml(config))
