"""plan_launch: cluster + job + facts -> LaunchPlan. Pure: no clock, randomness, environment or network."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from multinode.cluster.accelerators import accelerator_named
from multinode.cluster.cluster import Cluster, Node
from multinode.cluster.dataplane import Endpoint, choose_endpoints, route_notes
from multinode.cluster.facts import NodeFacts, common_backend, select_gpus
from multinode.cluster.quoting import Command
from multinode.errors import UsageError
from multinode.job.code_tree import CodeTree, code_dir
from multinode.job.engine_commands import (
    JOB_FILE,
    Engine,
    Place,
    benchmark_command,
    choose_engine,
    engine_command,
    engine_files,
)
from multinode.job.job import Job, LlamaFactoryJob, argument_keys, describe_job, render_job
from multinode.job.job_environment import JobEnvironment
from multinode.job.job_files import outside_code, require_copied
from multinode.job.node_groups import node_groups_of, refuse_averaging
from multinode.job.rendezvous import choose_master_port
from multinode.job.synthetic import synthetic_environment, synthetic_files, synthetic_paths
from multinode.records.averaging import Averaging, averaging_environment
from multinode.records.benchmark import Benchmark, CollectiveTest, describe_benchmark
from multinode.records.plan import LaunchPlan, NodePlan, PlanFile, TraceWindow
from multinode.records.run import node_run_id

_DEEPSPEED_FILE = "deepspeed.json"
_FEWER = "--workers-per-node {}, or equal slots= in the hostfile"
_OUTPUT = "output"


class LaunchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a job is laid out over the nodes and started.

    Attributes:
        workers_per_node: None takes each node's own slots.
        master_port: of the rendezvous, on node 0; None takes one that the run id gives and that is free there.
        profile: whether the workers record where the time of their steps goes.
        trace_steps: how many steps torch.profiler records after the warm-up; None is none.
        trace_ranks: on these workers; empty takes the first one of each node.
        sample_interval_s: between two samples of a node's NICs, CPUs and GPUs.
        grad_compress: `fp16` or `bf16`, in which DDP sends its gradients; None sends them as they are.
        averaging: how nodes average, as LaunchPlan has it.
        environment: variables and setup commands of the job.
        agent: where the agent lies on a node, relative to the home directory; set for what is measured.
        engine: what starts the workers; None is the job's own.
        nccl_inspector: whether NCCL's Inspector plugin records each operation.
        code: files that are copied to every node, in which the job runs there; None runs it in the node's directory.
    """

    workers_per_node: int | None = None
    master_port: int | None = None
    profile: bool = True
    trace_steps: int | None = None
    trace_ranks: tuple[int, ...] = ()
    sample_interval_s: float = 1.0
    grad_compress: str | None = None
    averaging: Averaging | None = None
    agent: str | None = None
    engine: Engine | None = None
    environment: JobEnvironment = JobEnvironment()
    nccl_inspector: bool = False
    code: CodeTree | None = None


def argument_names(job: Job | Benchmark | None, cluster: Cluster, options: LaunchOptions) -> tuple[str, ...]:
    """Those that are looked for in the nodes' LLaMA-Factory; a setup may lead to another one than is found without."""
    if options.environment.prelude is not None:
        return ()
    names = (name for node in cluster.nodes for name in node.env)
    return argument_keys(job, (*options.environment.env, *names))


class _Task(NamedTuple):
    """What every node does alike."""

    job: Job | Benchmark
    engine: Engine
    environment: JobEnvironment
    grad_compress: str | None
    averaging: Averaging | None = None
    nccl_inspector: bool = False
    code: CodeTree | None = None


def plan_launch(
    cluster: Cluster, job: Job | Benchmark, facts: Mapping[str, NodeFacts], run_id: str, options: LaunchOptions
) -> LaunchPlan:
    """Lay the job out over the nodes; `facts` may lack nodes (a dry run offline), and then says what it assumed.

    Raises:
        UsageError: fewer slots than workers were asked for, unequal ones where the job needs equal ones, no network in
            common, an address that a node does not have, gradients that cannot be compressed, or a script that is not
            among the files which are copied.
    """
    workers = workers_of_nodes(cluster, facts, options.workers_per_node)
    if isinstance(job, CollectiveTest):
        job = _settle_backend(cluster, facts, job)
        _check_workers(cluster, facts, job, workers)
    endpoints = choose_endpoints(cluster, facts)
    master_addr = endpoints[0].addr
    if master_addr is None:
        raise UsageError("node 0 has no address on the data plane", hint="name it in the hostfile: addr=")
    master_port = choose_master_port(run_id, options.master_port, facts.get(cluster.nodes[0].name))
    task = _task(job, options, len(cluster.nodes))
    if not isinstance(job, Benchmark):
        refuse_unequal(job, task.engine.accelerate, task.environment.env, cluster, workers)
    nodes = []
    for node_rank, (node, endpoint) in enumerate(zip(cluster.nodes, endpoints, strict=True)):
        found = facts.get(node.name)
        home = found.home if found and found.home else "~"
        known = _is_known(node, options.environment)
        place = Place(
            node_rank=node_rank,
            workers=workers,
            master_addr=master_addr,
            master_port=master_port,
            ifname=endpoint.ifname,
            addr=endpoint.addr,
            ifnames=endpoint.ifnames,
            hcas=_hcas(node, found),
            devices=_devices(
                node, found, None if task.engine.name == "exec" else workers[node_rank], options.environment.env
            ),
            accelerator=accelerator_named(found.accelerator if found else None),
            run_dir=f"{home}/.multinode/runs/{node_run_id(run_id, node_rank)}",
            code_dir=code_dir(task.code, run_id, home),
            agent=f"{home}/{options.agent}" if options.agent else None,
            python=(found.python if found and found.python else node.python) if known else None,
            packages=found.packages if found and known else None,
        )
        nodes.append(_plan_node(node, place, endpoint, task, found))
    return LaunchPlan(
        run_id=run_id,
        engine=task.engine.name,
        job=describe_benchmark(job) if isinstance(job, Benchmark) else describe_job(job),
        config_path=job.config_path if isinstance(job, LlamaFactoryJob) else "",
        master_addr=master_addr,
        master_port=master_port,
        nproc_per_node=max(workers),
        world_size=sum(workers),
        profile=options.profile,
        trace=_trace_window(options, nodes),
        sample_interval_s=options.sample_interval_s,
        grad_compress=task.grad_compress,
        averaging=task.averaging,
        test=job if isinstance(job, Benchmark) else None,
        code=task.code.copy() if task.code is not None else None,
        nodes=tuple(nodes),
        notes=(*route_notes(cluster, endpoints, facts), *_averaging_notes(task, options)),
    )


def _trace_window(options: LaunchOptions, nodes: Sequence[NodePlan]) -> TraceWindow | None:
    """The window that was asked for.

    Raises:
        UsageError: a rank that there is not, or the workers record nothing at all.
    """
    if options.trace_steps is None:
        return None
    if not options.profile:
        raise UsageError("--trace needs the instrumentation, and --no-profile leaves it out")
    last = nodes[-1].ranks[-1]
    wrong = next((rank for rank in options.trace_ranks if not 0 <= rank <= last), None)
    if wrong is not None:
        raise UsageError(f"there is no rank {wrong} to trace", hint=f"the ranks of this run are 0 to {last}")
    return TraceWindow(steps=options.trace_steps, ranks=options.trace_ranks or tuple(node.ranks[0] for node in nodes))


def workers_of_nodes(cluster: Cluster, facts: Mapping[str, NodeFacts], asked: int | None) -> tuple[int, ...]:
    """Workers of each node, in order: what was asked, else its slots, else the GPUs found, else one.

    Raises:
        UsageError: a node has fewer slots than were asked for.
    """
    slots = {node.name: _slots(node, facts.get(node.name)) for node in cluster.nodes}
    fewest = min(slots.values())
    if asked is not None:
        for node in cluster.nodes:
            if slots[node.name] < asked and (node.slots is not None or node.gpus is not None):
                raise UsageError(
                    f"{asked} workers were asked for, and it has {slots[node.name]} slots",
                    node=node.name,
                    hint=f"--workers-per-node {fewest}, or more slots= or gpus= in the hostfile",
                )
        return (asked,) * len(cluster.nodes)
    return tuple(slots.values())


def with_workers(cluster: Cluster, options: LaunchOptions, workers: Sequence[int]) -> tuple[Cluster, LaunchOptions]:
    """The same nodes and options with so many workers on each: `--workers-per-node`, or slots where these differ."""
    if len(set(workers)) == 1:
        return cluster, msgspec.structs.replace(options, workers_per_node=workers[0])
    nodes = tuple(
        msgspec.structs.replace(node, slots=count, gpus=None if node.gpus is None else node.gpus[:count])
        for node, count in zip(cluster.nodes, workers, strict=True)
    )
    return msgspec.structs.replace(cluster, nodes=nodes), msgspec.structs.replace(options, workers_per_node=None)


def _list_workers(cluster: Cluster, workers: Sequence[int]) -> str:
    return ", ".join(f"{node.name} has {count}" for node, count in zip(cluster.nodes, workers, strict=True))


def refuse_unequal(
    job: Job, accelerate: Mapping[str, Any], env: Mapping[str, str], cluster: Cluster, workers: Sequence[int]
) -> None:
    """Refuse unequal numbers of workers where the job groups the workers of a node.

    Raises:
        UsageError: it does.
    """
    setting = node_groups_of(job, accelerate, env) if len(set(workers)) > 1 else None
    if setting is not None:
        raise UsageError(
            f"{setting} groups the workers of a node, and the nodes have unequal numbers of them "
            f"({_list_workers(cluster, workers)})",
            hint=_FEWER.format(min(workers)),
        )


def _settle_backend(cluster: Cluster, facts: Mapping[str, NodeFacts], test: CollectiveTest) -> CollectiveTest:
    """One backend for all: workers that chose for themselves could choose differently, and would hang."""
    if test.backend is not None or any(node.name not in facts for node in cluster.nodes):
        return test
    return msgspec.structs.replace(test, backend=common_backend(facts[node.name] for node in cluster.nodes))


def _check_workers(
    cluster: Cluster, facts: Mapping[str, NodeFacts], test: CollectiveTest, workers: Sequence[int]
) -> None:
    """A collective needs two workers, and NCCL a GPU for each.

    Raises:
        UsageError: there are not as many.
    """
    if sum(workers) < 2:  # noqa: PLR2004 - who is alone exchanges nothing
        raise UsageError(
            "a collective needs two workers, and this is one node with one",
            hint="a hostfile with two nodes, or --workers-per-node 2",
        )
    for node, nproc in zip(cluster.nodes, workers, strict=True):
        found = facts.get(node.name)
        gpus = len(node.gpus) if node.gpus is not None else len(found.visible_gpus) if found else 0
        # A node without any is told by a check, with the reason that it gives.
        if gpus and gpus < nproc and test.backend != "gloo":
            raise UsageError(
                f"{nproc} workers were asked for, and it has {gpus} {'GPU' if gpus == 1 else 'GPUs'}",
                node=node.name,
                hint="fewer workers a node, or --backend gloo to measure without GPUs",
            )


def _slots(node: Node, found: NodeFacts | None) -> int:
    if node.slots is not None:
        return node.slots
    if node.gpus is not None:
        return len(node.gpus)
    return len(found.visible_gpus) or 1 if found else 1


def _task(job: Job | Benchmark, options: LaunchOptions, nodes: int) -> _Task:
    if isinstance(job, Benchmark):
        return _Task(job, Engine(name="torchrun"), options.environment, None)
    engine, kind = options.engine or choose_engine(job), options.grad_compress
    if options.nccl_inspector and not options.profile:
        raise UsageError("--nccl-inspector needs the instrumentation, and --no-profile leaves it out")
    if kind is not None:
        _refuse_compression(kind, job, engine, profile=options.profile)
    averaging = options.averaging
    if averaging is not None:
        sender = gradient_sender(job, engine)
        refuse_averaging(averaging, job, sender=sender, grad_compress=kind, profile=options.profile)
        if engine.accelerate.get("mixed_precision") == "fp16":
            raise UsageError(f"{averaging.option}: a node whose fp16 gradients overflow would leave out a step alone")
    if options.code is not None:
        require_copied(job, options.code)
    # On one node there is nothing between nodes.
    averaging = averaging if nodes > 1 else None
    return _Task(job, engine, options.environment, kind, averaging, options.nccl_inspector, options.code)


def _averaging_notes(task: _Task, options: LaunchOptions) -> tuple[str, ...]:
    if options.averaging is None or task.averaging is not None:
        return ()
    return (f"{options.averaging.option} does nothing on one node: its workers average gradients at every step",)


def _is_known(node: Node, environment: JobEnvironment) -> bool:
    """Whether the job's interpreter can be known before it starts; a prelude may be what puts it on PATH."""
    return environment.prelude is None or node.python is not None


def _plan_node(node: Node, place: Place, endpoint: Endpoint, task: _Task, found: NodeFacts | None) -> NodePlan:
    cwd = found.cwd if found and found.cwd else node.workdir
    command = _command(task, place, node.env | task.environment.env, place.code_dir or cwd)
    there = {path.path for path in found.paths if path.kind != "missing"} if found else set[str]()
    outside = {}
    if task.code is not None and isinstance(task.job, LlamaFactoryJob):
        outside = outside_code(task.job, task.code, cwd or "~", there)
    if task.nccl_inspector:
        command = msgspec.structs.replace(command, env=_inspector_environment(node, place, found) | command.env)
    return NodePlan(
        node=node.name,
        node_rank=place.node_rank,
        ranks=tuple(place.ranks),
        addr=endpoint.addr,
        ifname=endpoint.ifname,
        link_gbit_per_s=endpoint.link_gbit_per_s,
        ifnames=endpoint.ifnames,
        gpus=_gpu_ids(command.env.get(place.accelerator.visible[0]), place.nproc, found),
        run_dir=place.run_dir,
        command=command,
        files=_job_files(task.job, place, outside) + engine_files(task.engine, place),
        assumed=endpoint.assumed + _assumed(node, found, task),
        output_cwd=cwd if task.code is not None and isinstance(task.job, LlamaFactoryJob) else None,
    )


def _hcas(node: Node, found: NodeFacts | None) -> tuple[str, ...]:
    """The RDMA devices that the hostfile names.

    Raises:
        UsageError: the node's workers do not speak NCCL.
    """
    accelerator = accelerator_named(found.accelerator if found else None)
    if node.hcas and accelerator.backend != "nccl":
        raise UsageError(
            f"hca= is NCCL's, and the node's workers speak {accelerator.backend}",
            node=node.name,
            hint="leave hca= out",
        )
    return node.hcas


def _devices(node: Node, found: NodeFacts | None, count: int | None, env: dict[str, str]) -> tuple[str, ...] | None:
    """The node's GPUs for `count` workers, all of them for None, and never one that its sessions do not show.

    By number, which every program takes: DeepSpeed from 0.18.9 on reads whole numbers alone (`_get_nvml_gpu_id` of its
    CUDA accelerator). By UUID where numbers could mean other devices than the vendor's program numbers so.
    """
    known = found.gpus if found else ()
    if node.gpus is not None:
        by_index = {gpu.index: gpu for gpu in known}
        if not all(index in by_index for index in node.gpus):
            return tuple(map(str, node.gpus[:count]))
        chosen = tuple(by_index[index] for index in node.gpus)
    else:
        chosen = found.visible_gpus if found else ()
    if not chosen or (count is not None and len(chosen) < count):
        return None
    accelerator = accelerator_named(found.accelerator if found else None)
    uuids = [gpu.uuid for gpu in chosen[:count] if gpu.uuid is not None]
    if accelerator.by_uuid and not accelerator.counts_alike(node.env | env) and len(uuids) == len(chosen[:count]):
        return tuple(uuids)
    return tuple(str(gpu.index) for gpu in chosen[:count])


def _gpu_ids(visible: str | None, nproc: int, found: NodeFacts | None) -> tuple[int, ...] | None:
    """Numbers of those that the workers will use, as the vendor's program counts."""
    if visible is None:
        return tuple(gpu.index for gpu in found.visible_gpus[:nproc]) or None if found else None
    if found is not None and found.gpus:
        return tuple(gpu.index for gpu in select_gpus(visible, found.gpus)[:nproc]) or None
    names = visible.split(",")[:nproc]
    return tuple(map(int, names)) if all(name.isascii() and name.isdigit() for name in names) else None


def _command(task: _Task, place: Place, env: dict[str, str], cwd: str | None) -> Command:
    if isinstance(task.job, Benchmark):
        command = benchmark_command(place, task.job, env)
    else:
        own = synthetic_environment(task.job, place.run_dir) if isinstance(task.job, LlamaFactoryJob) else {}
        command = engine_command(task.engine, place, task.job, own | env, cwd)
    environment = task.environment
    env = command.env | _compression_environment(task.grad_compress)
    env |= averaging_environment(task.averaging, place.workers)
    return msgspec.structs.replace(command, env=env, forwarded=environment.forwarded, prelude=environment.prelude)


def _job_files(job: Job | Benchmark, place: Place, outside: dict[str, str]) -> tuple[PlanFile, ...]:
    """The YAML and what it names that travels with it, which then is named by its place on the node, as its output.

    `outside` has the keys of what is not in the copy that the job runs in.
    """
    if not isinstance(job, LlamaFactoryJob):
        return ()
    run_dir, deepspeed = place.run_dir, job.deepspeed_text
    paths = outside | ({} if deepspeed is None else {"deepspeed": f"{run_dir}/{_DEEPSPEED_FILE}"})
    paths |= {} if job.keeps_output else {"output_dir": f"{run_dir}/{_OUTPUT}"}
    paths |= synthetic_paths(job, run_dir)
    return (
        PlanFile(path=JOB_FILE, text=render_job(job, paths)),
        *([] if deepspeed is None else [PlanFile(path=_DEEPSPEED_FILE, text=deepspeed)]),
        *synthetic_files(job, sum(place.workers)),
    )


def _assumed(node: Node, found: NodeFacts | None, task: _Task) -> tuple[str, ...]:
    assumed = []
    if found is None:
        assumed.append("home: ~ stands for the user's home directory on the node")
        if node.workdir is None:
            assumed.append("workdir: this directory where the node has it, else the home directory")
    if found is None and task.nccl_inspector and _PLUGIN not in node.env:
        assumed.append(f"{_PLUGIN}: the plugin by its name alone; a launch finds its path on the node")
    if not _is_known(node, task.environment):
        assumed.append("python: python3 as the setup leaves PATH; its packages are not checked")
    elif node.python is None and found is None:
        assumed.append("python: the first python3 on PATH; python= in the hostfile settles it")
    if found is None and task.engine.name == "llamafactory":
        assumed.append("versions: unknown, so RANK is set beside NODE_RANK for LLaMA-Factory before 0.9.1")
    return tuple(assumed)


_PLUGIN = "NCCL_PROFILER_PLUGIN"
_PLUGIN_SINCE = (2, 28)
# Often enough for the ring of 1024 operations a communicator that it has since 2.30.3, and to match records with the
# measured steps.
_WRITE_EVERY_US = 500_000


def _inspector_environment(node: Node, place: Place, found: NodeFacts | None) -> dict[str, str]:
    """Variables that have NCCL load its Inspector plugin and write below the run's directory; the user's own win.

    Raises:
        UsageError: the node has no plugin, no NCCL, or one that knows of none.
    """
    given = node.env.get(_PLUGIN)
    if found is not None:
        if place.accelerator.backend != "nccl" or not found.gpus:
            raise UsageError("--nccl-inspector is NCCL's, and the node's workers do not speak NCCL", node=node.name)
        version = tuple(map(int, re.findall(r"\d+", found.nccl_version or "")[:2]))
        if version and version < _PLUGIN_SINCE:
            raise UsageError(
                f"NCCL {found.nccl_version} has no Inspector plugin, which came with 2.28",
                node=node.name,
                hint="a torch with NCCL 2.28 or newer; or leave --nccl-inspector out",
            )
        if given is None and found.nccl_inspector is None:
            raise UsageError(
                "NCCL's Inspector plugin is not there (libnccl-profiler-inspector.so)",
                node=node.name,
                hint="build it from plugins/profiler/inspector of NCCL 2.30.3 or newer, whichever NCCL runs; then in "
                f"the hostfile: env.{_PLUGIN}=PATH",
            )
    return {
        _PLUGIN: given or (found.nccl_inspector if found and found.nccl_inspector else "libnccl-profiler-inspector.so"),
        "NCCL_INSPECTOR_ENABLE": "1",
        "NCCL_INSPECTOR_DUMP_DIR": f"{place.run_dir}/nccl-inspector",
        "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": str(_WRITE_EVERY_US),
    }


_KINDS = ("fp16", "bf16")
_POWER_SGD = re.compile(r"powersgd(?::([1-9]\d{0,2})(?::\d{1,6})?)?", re.ASCII)
_USUAL_RANK = 4
# Read by the instrumentation.
_VARIABLE = "MULTINODE_GRAD_COMPRESS"
# What accelerate's configuration calls the ways in which not DDP sends the gradients.
_NOT_DDP = frozenset({"DEEPSPEED", "FSDP", "MEGATRON_LM"})


def power_sgd_rank(kind: str) -> int | None:
    """The rank of `powersgd[:RANK[:START]]`; None of another compression."""
    found = _POWER_SGD.fullmatch(kind)
    return None if found is None else int(found[1] or _USUAL_RANK)


def _compression_environment(kind: str | None) -> dict[str, str]:
    """Variables that tell a node's workers; none where nothing is to be compressed."""
    return {} if kind is None else {_VARIABLE: kind}


def _refuse_compression(kind: str, job: Job, engine: Engine, *, profile: bool) -> None:
    """Refuse what is known beforehand not to work; what shows in the workers alone, their notes say.

    Raises:
        UsageError: there is no such compression, or not DDP sends the gradients, or nobody could ask it to.
    """
    option = f"--grad-compress {kind}"
    if kind not in _KINDS and power_sgd_rank(kind) is None:
        known = f"one of {', '.join(_KINDS)}, powersgd, powersgd:RANK, powersgd:RANK:START"
        raise UsageError(f"{option}: there is no such compression", hint=known)
    if not profile:
        raise UsageError(
            f"{option} needs the instrumentation, which --no-profile leaves out",
            hint="leave --no-profile out: what it records also shows whether gradients were compressed",
        )
    sender = gradient_sender(job, engine)
    if sender is not None:
        raise UsageError(
            f"{option}: it works on DDP's gradients, and {sender} sends those of this job",
            hint="DeepSpeed has communication_data_type in its JSON, FSDP the reduce dtype of its mixed precision; or "
            "train under DDP: --set deepspeed=null, --set fsdp=null",
        )


def gradient_sender(job: Job, engine: Engine) -> str | None:
    """What sends the gradients in DDP's place, by the job's own files; None where these name nothing else."""
    if isinstance(job, LlamaFactoryJob):
        if job.config.get("deepspeed"):
            return "DeepSpeed"
        if job.config.get("fsdp"):
            return "FSDP"
    kind = engine.accelerate.get("distributed_type")
    return f"accelerate with {kind}" if kind in _NOT_DDP else None
