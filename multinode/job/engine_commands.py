"""Engine: what starts the workers on a node, with the command and files of each node.

Every engine gets the node's rank in the job and derives its workers' ranks. The user's own variables win.
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

ENGINES = ("torchrun", "llamafactory", "deepspeed", "accelerate", "exec")
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
_ACCELERATE_FILE = "accelerate.yaml"
# Accelerate starts one process per node for these, and expects mpirun to have started the others.
_ALONE = frozenset({"NO", "MULTI_CPU"})
# torchrun, accelerate and DeepSpeed's launcher take a module after `--module`; LLaMA-Factory's launcher trains if a
# worker runs it.
_LLAMAFACTORY_WORKER = ("--module", "llamafactory.launcher")
_TORCHRUN = "torch.distributed.run"
# From this release on the node's rank is read from NODE_RANK; before, from RANK (LLaMA-Factory's launcher).
_NODE_RANK_SINCE = (0, 9, 1)


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """What starts the workers: one of `ENGINES`, and the user's accelerate configuration, if any."""

    name: str
    accelerate: dict[str, Any] = {}
    passes_local_rank: bool = False  # torchrun gives scripts `--local-rank=N`, as torch.distributed.launch does


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


def choose_engine(
    job: Job,
    engine: str | None = None,
    accelerate: dict[str, Any] | None = None,
    *,
    passes_local_rank: bool = False,
) -> Engine:
    """The engine that was asked for, or the job's default: LLaMA-Factory for its YAML, torchrun for a script.

    Raises:
        UsageError: the engine is unknown, or cannot run such a job.
    """
    own = "llamafactory" if isinstance(job, LlamaFactoryJob) else "torchrun"
    name = engine if engine is not None else own
    if name not in ENGINES:
        raise UsageError(f"unknown engine {name!r}", hint=f"one of {', '.join(ENGINES)}")
    if name == "llamafactory" and isinstance(job, ScriptJob):
        raise UsageError(
            "the llamafactory engine needs a YAML; this is a script",
            hint="use multinode launch train.yaml, or another --engine",
        )
    if name == "exec" and isinstance(job, LlamaFactoryJob):
        raise UsageError(
            "the exec engine runs a program; this is a LLaMA-Factory YAML",
            hint="remove --engine, or put the program after --",
        )
    if accelerate is not None and name != "accelerate":
        raise UsageError(f"--accelerate-config needs --engine accelerate; the engine is {name}")
    return Engine(name=name, accelerate=accelerate or {}, passes_local_rank=passes_local_rank)


def engine_command(engine: Engine, place: Place, job: Job, env: dict[str, str], cwd: str | None) -> Command:
    """The command of one node; `env` is the user's and wins."""
    if engine.name == "llamafactory":
        return _llamafactory(place, env, cwd)
    if engine.name == "accelerate":
        return _accelerate(place, _program(engine, place, job), engine.accelerate, env, cwd)
    if engine.name == "torchrun":
        module = "torch.distributed.launch" if engine.passes_local_rank else _TORCHRUN
        return _torchrun(place, _program(engine, place, job), env, cwd, module)
    commands = {"deepspeed": _deepspeed, "exec": _any_program}
    return commands[engine.name](place, _program(engine, place, job), env, cwd)


def engine_files(engine: Engine, place: Place) -> tuple[PlanFile, ...]:
    """Files that the engine itself reads on the node."""
    return (_accelerate_file(place, engine.accelerate),) if engine.name == "accelerate" else ()


def benchmark_command(place: Place, test: Benchmark, env: dict[str, str]) -> Command:
    """A benchmark on one node: torchrun on the agent's own archive, with the request in the environment."""
    request = msgspec.json.encode(msgspec.to_builtins(test) | {"addr": place.addr}).decode()
    program = "devices" if isinstance(test, DeviceTest) else "collectives"
    return _torchrun(place, (place.agent or "agent.pyz", program), env | {"MULTINODE_REQUEST": request}, None)


def reads_rank(version: str | None) -> bool:
    """Whether this release of LLaMA-Factory reads the node's rank from RANK, or might (unknown version)."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version or "")
    return numbers is None or tuple(int(n) for n in numbers.groups()) < _NODE_RANK_SINCE


def parse_accelerate(text: str, source: str) -> dict[str, Any]:
    """The user's configuration, as written by `accelerate config`. `source` is its path, for messages.

    Raises:
        UsageError: it is not YAML, or is for another kind of machine.
    """
    from multinode.strict_yaml import YamlError, parse_yaml

    try:
        config = parse_yaml(text)
    except YamlError as wrong:
        raise UsageError(wrong.at(source)) from None
    if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
        raise UsageError(f"{source} is not an accelerate configuration", hint="accelerate config --config_file FILE")
    place = config.get("compute_environment", "LOCAL_MACHINE")
    if place != "LOCAL_MACHINE":
        raise UsageError(f"{source}: compute_environment is {place}; only LOCAL_MACHINE runs on your own nodes")
    return config


def _program(engine: Engine, place: Place, job: Job) -> tuple[str, ...]:
    if isinstance(job, ScriptJob):
        return job.argv if engine.name == "exec" else job.words
    worker = (*_LLAMAFACTORY_WORKER, f"{place.run_dir}/{JOB_FILE}")
    # LLaMA-Factory takes its first argument as the YAML.
    return ("--no_local_rank", *worker) if engine.name == "deepspeed" else worker


def _command(
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


def _module(place: Place, name: str, *words: str) -> tuple[str, ...]:
    """Run by the full path of the interpreter, so that PATH does not matter."""
    return (place.python or "python3", "-m", name, *words)


def _torchrun(
    place: Place, program: tuple[str, ...], env: dict[str, str], cwd: str | None, module: str = _TORCHRUN
) -> Command:
    """A script under torch.distributed.run with a static rendezvous.

    Static, by IP: c10d with an IP endpoint fails if the hostname resolves to loopback (docs/adr/0005). torchrun joins
    address and port, so an IPv6 address needs brackets; in MASTER_ADDR it does not.
    """
    argv = _module(
        place,
        module,
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

    The names are torchrun's. RANK, LOCAL_RANK and WORLD_SIZE belong to a worker: whoever starts the workers sets
    them.
    """
    variables = {
        "NNODES": str(place.nnodes),
        "NODE_RANK": str(place.node_rank),
        "NPROC_PER_NODE": str(place.nproc),
    }
    return _command(place, program, variables, env, cwd)


def _llamafactory(place: Place, env: dict[str, str], cwd: str | None) -> Command:
    """`llamafactory-cli train`, which starts a bare `torchrun` itself, from the variables set here.

    FORCE_TORCHRUN is always set: with one GPU per node, LLaMA-Factory otherwise silently ignores NNODES and every node
    trains alone (LlamaFactory#8729).
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
    """DeepSpeed's per-node launcher with our ranks; its runner, which starts nodes through pdsh or ssh, is not used.

    As under `deepspeed`, the script gets `--local_rank=N` first; `--no_local_rank` before it turns that off.
    """
    # Node names and the devices of each, in node-rank order. The launcher sets CUDA_VISIBLE_DEVICES for its own node
    # and only counts those of the others.
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
    named = [name.strip() for name in visible.split(",") if name.strip()]
    variable = place.accelerator.visible[0]
    if len(named) < place.nproc:
        raise UsageError(
            f"{variable} names {len(named)} devices on node rank {place.node_rank}, but {place.nproc} workers run "
            "there",
            hint=f"--workers-per-node {len(named)}" if named else "DeepSpeed's launcher needs one device per worker",
        )
    return named[: place.nproc]


def _accelerate(
    place: Place, program: tuple[str, ...], base: dict[str, Any], env: dict[str, str], cwd: str | None
) -> Command:
    """`accelerate launch` with a configuration for each node, on top of the user's own.

    Accelerate then starts the workers through torchrun with a static rendezvous, as our torchrun engine does.
    """
    # Of accelerate's two ways to start workers, the one with torchrun does not pass on the CPU setting.
    variables = {"ACCELERATE_USE_CPU": "true"} if base.get("use_cpu") is True else {}
    config = ("--config_file", f"{place.run_dir}/{_ACCELERATE_FILE}")
    return _command(place, _module(place, "accelerate.commands.launch", *config, *program), variables, env, cwd)


def _accelerate_file(place: Place, base: dict[str, Any]) -> PlanFile:
    from multinode.strict_yaml import dump_yaml

    kind = base.get("distributed_type", "NO")
    config = base | {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if kind in _ALONE else kind,
        "machine_rank": place.node_rank,
        "num_machines": place.nnodes,
        # The total over all nodes; accelerate divides it by the number of machines.
        "num_processes": place.nproc * place.nnodes,
        "main_process_ip": place.master_addr,
        "main_process_port": place.master_port,
        "rdzv_backend": "static",
        # Without it accelerate uses a rendezvous endpoint, whose host torchrun looks up among its own names.
        "same_network": True,
        # The variable of visible devices has already selected them.
        "gpu_ids": "all",
    }
    deepspeed = config.get("deepspeed_config")
    if kind == "DEEPSPEED" or isinstance(deepspeed, dict):
        # Its default is pdsh, from the first node.
        own = deepspeed if isinstance(deepspeed, dict) else {}
        config["deepspeed_config"] = own | {"deepspeed_multinode_launcher": "standard"}
    return PlanFile(path=_ACCELERATE_FILE, text=dump_yaml(config))
