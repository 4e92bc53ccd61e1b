"""plan_launch: cluster + job + facts -> LaunchPlan. Pure: no clock, randomness, environment or network."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from multinode.cluster.accelerators import accelerator_named
from multinode.cluster.cluster import Cluster, Node
from multinode.cluster.dataplane import Endpoint, choose_endpoints, route_notes
from multinode.cluster.facts import NodeFacts, common_backend, select_gpus
from multinode.cluster.quoting import Command
from multinode.errors import UsageError
from multinode.job.engines.engine import OF_SCRIPT, Engine, choose_engine
from multinode.job.engines.place import JOB_FILE, Place
from multinode.job.job import Job, JobEnvironment, LlamaFactoryJob, argument_keys, describe_job, render_job
from multinode.job.job_files import outside_code, require_copied
from multinode.job.launch_options import LaunchOptions
from multinode.levers.lever import Workers
from multinode.levers.levers import NONE, Levers
from multinode.records.benchmark import Benchmark, CollectiveTest, describe_benchmark
from multinode.records.plan import LaunchPlan, NodePlan, PlanFile, TraceWindow
from multinode.records.run import node_run_id

if TYPE_CHECKING:
    from multinode.job.code_tree import CodeTree

# Below Linux's ephemeral ports (32768 to 60999), which any connection may take.
RENDEZVOUS_PORTS = range(20000, 30000)
_CANDIDATES = 16


def candidate_ports(run_id: str, master_port: int | None) -> tuple[int, ...]:
    """Ports to try, in order: the one asked for, or those derived from the run id."""
    if master_port is not None:
        return (master_port,)
    first = zlib.crc32(run_id.encode())
    return tuple(RENDEZVOUS_PORTS[(first + step) % len(RENDEZVOUS_PORTS)] for step in range(_CANDIDATES))


def choose_master_port(run_id: str, master_port: int | None, facts: NodeFacts | None) -> int:
    """The first candidate that is free on node 0 by its facts; the first if none is."""
    ports = candidate_ports(run_id, master_port)
    taken = facts.port_users if facts is not None else {}
    return next((port for port in ports if str(port) not in taken), ports[0])


_DEEPSPEED_FILE = "deepspeed.json"
_OUTPUT = "output"


def argument_names(job: Job | Benchmark | None, cluster: Cluster, options: LaunchOptions) -> tuple[str, ...]:
    """Arguments to look up in the nodes' LLaMA-Factory; a setup command may select another installation."""
    if options.environment.prelude is not None:
        return ()
    names = (name for node in cluster.nodes for name in node.env)
    return argument_keys(job, (*options.environment.env, *names))


class _Task(NamedTuple):
    job: Job | Benchmark
    engine: Engine
    environment: JobEnvironment
    levers: Levers = NONE
    workers: Workers = Workers()
    nccl_inspector: bool = False
    code: CodeTree | None = None


def plan_launch(
    cluster: Cluster, job: Job | Benchmark, facts: Mapping[str, NodeFacts], run_id: str, options: LaunchOptions
) -> LaunchPlan:
    """Lay the job out over the nodes; `facts` may lack nodes (offline dry run), and the plan then says what it assumed.

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
        raise UsageError("node 0 has no data-plane address", hint="set addr= in the hostfile")
    master_port = choose_master_port(run_id, options.master_port, facts.get(cluster.nodes[0].name))
    task = _task(job, options, cluster, workers)
    if not isinstance(job, Benchmark) and len(set(workers)) > 1:
        from multinode.job.restrictions import refuse_unequal

        refuse_unequal(job, task.engine.accelerate, task.environment.env, cluster, workers)
    nodes = []
    for node_rank, (node, endpoint) in enumerate(zip(cluster.nodes, endpoints, strict=True)):
        node_facts = facts.get(node.name)
        home = node_facts.home if node_facts and node_facts.home else "~"
        is_known = _is_known(node, options.environment)
        place = Place(
            node_rank=node_rank,
            workers=workers,
            master_addr=master_addr,
            master_port=master_port,
            ifname=endpoint.ifname,
            addr=endpoint.addr,
            ifnames=endpoint.ifnames,
            hcas=_hcas(node, node_facts),
            devices=_devices(
                node,
                node_facts,
                workers[node_rank] if task.engine.kind.starts_workers else None,
                options.environment.env,
            ),
            accelerator=accelerator_named(node_facts.accelerator if node_facts else None),
            run_dir=f"{home}/.multinode/runs/{node_run_id(run_id, node_rank)}",
            code_dir=task.code.place(run_id, home) if task.code is not None else None,
            agent=f"{home}/{options.agent}" if options.agent else None,
            python=(node_facts.python if node_facts and node_facts.python else node.python) if is_known else None,
            packages=node_facts.packages if node_facts and is_known else None,
        )
        nodes.append(_plan_node(node, place, endpoint, task, node_facts))
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
        levers=task.levers,
        test=job if isinstance(job, Benchmark) else None,
        code=task.code.copy() if task.code is not None else None,
        command=options.command,
        nodes=tuple(nodes),
        notes=(*route_notes(cluster, endpoints, facts), *options.levers.notes(task.workers)),
    )


def _trace_window(options: LaunchOptions, nodes: Sequence[NodePlan]) -> TraceWindow | None:
    if options.trace_steps is None:
        return None
    last = nodes[-1].ranks[-1]
    wrong = next((rank for rank in options.trace_ranks if not 0 <= rank <= last), None)
    if wrong is not None:
        raise UsageError(f"cannot trace rank {wrong}: no such rank", hint=f"the ranks of this run are 0 to {last}")
    return TraceWindow(steps=options.trace_steps, ranks=options.trace_ranks or tuple(node.ranks[0] for node in nodes))


def workers_of_nodes(cluster: Cluster, facts: Mapping[str, NodeFacts], workers_per_node: int | None) -> tuple[int, ...]:
    """Workers of each node, in order: the number asked for, or its slots, or its GPUs, or one.

    Raises:
        UsageError: a node has fewer slots than were asked for.
    """
    slots = {node.name: _slots(node, facts.get(node.name)) for node in cluster.nodes}
    fewest = min(slots.values())
    if workers_per_node is not None:
        for node in cluster.nodes:
            if slots[node.name] < workers_per_node and (node.slots is not None or node.gpus is not None):
                raise UsageError(
                    f"{workers_per_node} workers are requested, but it has {slots[node.name]} slots",
                    node=node.name,
                    hint=f"use --workers-per-node {fewest}, or raise slots= or gpus= in the hostfile",
                )
        return (workers_per_node,) * len(cluster.nodes)
    return tuple(slots.values())


def with_workers(cluster: Cluster, options: LaunchOptions, workers: Sequence[int]) -> tuple[Cluster, LaunchOptions]:
    """Set the number of workers of each node: `--workers-per-node`, or slots where the numbers differ."""
    if len(set(workers)) == 1:
        return cluster, msgspec.structs.replace(options, workers_per_node=workers[0])
    nodes = tuple(
        msgspec.structs.replace(node, slots=count, gpus=None if node.gpus is None else node.gpus[:count])
        for node, count in zip(cluster.nodes, workers, strict=True)
    )
    return msgspec.structs.replace(cluster, nodes=nodes), msgspec.structs.replace(options, workers_per_node=None)


def _settle_backend(cluster: Cluster, facts: Mapping[str, NodeFacts], test: CollectiveTest) -> CollectiveTest:
    """One backend for all: workers that choose by themselves could differ and hang."""
    if test.backend is not None or any(node.name not in facts for node in cluster.nodes):
        return test
    return msgspec.structs.replace(test, backend=common_backend(facts[node.name] for node in cluster.nodes))


def _check_workers(
    cluster: Cluster, facts: Mapping[str, NodeFacts], test: CollectiveTest, workers: Sequence[int]
) -> None:
    """A collective needs two workers, and NCCL a GPU for each."""
    if sum(workers) < 2:  # noqa: PLR2004 - who is alone exchanges nothing
        raise UsageError(
            "a collective needs at least two workers; there is one",
            hint="use a hostfile with two nodes, or --workers-per-node 2",
        )
    for node, nproc in zip(cluster.nodes, workers, strict=True):
        node_facts = facts.get(node.name)
        gpus = len(node.gpus) if node.gpus is not None else len(node_facts.visible_gpus) if node_facts else 0
        # A check reports a node without GPUs, with the reason.
        if gpus and gpus < nproc and test.backend != "gloo":
            raise UsageError(
                f"{nproc} workers are requested, but it has {gpus} {'GPU' if gpus == 1 else 'GPUs'}",
                node=node.name,
                hint="use fewer workers per node, or --backend gloo to measure without GPUs",
            )


def _slots(node: Node, facts: NodeFacts | None) -> int:
    if node.slots is not None:
        return node.slots
    if node.gpus is not None:
        return len(node.gpus)
    return len(facts.visible_gpus) or 1 if facts else 1


def _task(job: Job | Benchmark, options: LaunchOptions, cluster: Cluster, counts: Sequence[int]) -> _Task:
    if isinstance(job, Benchmark):
        return _Task(job, Engine(name=OF_SCRIPT), options.environment)
    engine, settings = options.engine or choose_engine(job), job.settings if isinstance(job, LlamaFactoryJob) else None
    workers = Workers(
        nodes=tuple(node.name for node in cluster.nodes),
        counts=tuple(counts),
        batch=settings.per_device_train_batch_size if settings is not None else None,
        accumulation=settings.gradient_accumulation_steps if settings is not None else None,
    )
    if options.nccl_inspector or options.trace_steps is not None or options.levers != NONE:
        from multinode.job.restrictions import refuse_options

        refuse_options(options, job, engine)
        options.levers.check(workers)
    if options.code is not None:
        require_copied(job, options.code)
    return _Task(
        job,
        engine,
        options.environment,
        options.levers.on(len(cluster.nodes)),
        workers,
        options.nccl_inspector,
        options.code,
    )


def _is_known(node: Node, environment: JobEnvironment) -> bool:
    return environment.prelude is None or node.python is not None


def _plan_node(node: Node, place: Place, endpoint: Endpoint, task: _Task, facts: NodeFacts | None) -> NodePlan:
    cwd = facts.cwd if facts and facts.cwd else node.workdir
    command = _command(task, place, node.env | task.environment.env, place.code_dir or cwd)
    there = {path.path for path in facts.paths if path.kind != "missing"} if facts else set[str]()
    outside = {}
    if task.code is not None and isinstance(task.job, LlamaFactoryJob):
        outside = outside_code(task.job, task.code, cwd or "~", there)
    if task.nccl_inspector:
        from multinode.job.nccl_inspector import inspector_environment

        command = msgspec.structs.replace(command, env=inspector_environment(node, place, facts) | command.env)
    return NodePlan(
        node=node.name,
        node_rank=place.node_rank,
        ranks=tuple(place.ranks),
        addr=endpoint.addr,
        ifname=endpoint.ifname,
        link_gbit_per_s=endpoint.link_gbit_per_s,
        ifnames=endpoint.ifnames,
        gpus=_gpu_ids(command.env.get(place.accelerator.visible[0]), place.nproc, facts),
        run_dir=place.run_dir,
        command=command,
        files=_job_files(task.job, place, outside) + task.engine.files(place),
        assumed=endpoint.assumed + _assumed(node, facts, task),
        output_cwd=cwd if task.code is not None and isinstance(task.job, LlamaFactoryJob) else None,
    )


def _hcas(node: Node, facts: NodeFacts | None) -> tuple[str, ...]:
    accelerator = accelerator_named(facts.accelerator if facts else None)
    if node.hcas and accelerator.backend != "nccl":
        raise UsageError(
            f"hca= is for NCCL, but the node's workers use {accelerator.backend}",
            node=node.name,
            hint="remove hca=",
        )
    return node.hcas


def _devices(node: Node, facts: NodeFacts | None, count: int | None, env: dict[str, str]) -> tuple[str, ...] | None:
    """The node's GPUs for `count` workers (all for None), among those that its sessions see.

    By number, which every program accepts: DeepSpeed from 0.18.9 on reads only integers (`_get_nvml_gpu_id` of its
    CUDA accelerator). By UUID if numbers could mean other devices than in nvidia-smi.
    """
    gpus = facts.gpus if facts else ()
    if node.gpus is not None:
        by_index = {gpu.index: gpu for gpu in gpus}
        if not all(index in by_index for index in node.gpus):
            return tuple(map(str, node.gpus[:count]))
        chosen = tuple(by_index[index] for index in node.gpus)
    else:
        chosen = facts.visible_gpus if facts else ()
    if not chosen or (count is not None and len(chosen) < count):
        return None
    accelerator = accelerator_named(facts.accelerator if facts else None)
    uuids = [gpu.uuid for gpu in chosen[:count] if gpu.uuid is not None]
    if accelerator.by_uuid and not accelerator.counts_alike(node.env | env) and len(uuids) == len(chosen[:count]):
        return tuple(uuids)
    return tuple(str(gpu.index) for gpu in chosen[:count])


def _gpu_ids(visible: str | None, nproc: int, facts: NodeFacts | None) -> tuple[int, ...] | None:
    if visible is None:
        return tuple(gpu.index for gpu in facts.visible_gpus[:nproc]) or None if facts else None
    if facts is not None and facts.gpus:
        return tuple(gpu.index for gpu in select_gpus(visible, facts.gpus)[:nproc]) or None
    names = visible.split(",")[:nproc]
    return tuple(map(int, names)) if all(name.isascii() and name.isdigit() for name in names) else None


def _command(task: _Task, place: Place, env: dict[str, str], cwd: str | None) -> Command:
    if isinstance(task.job, Benchmark):
        from multinode.job.engines.torchrun import benchmark_command

        command = benchmark_command(place, task.job, env)
    else:
        if isinstance(task.job, LlamaFactoryJob) and task.job.synthetic is not None:
            from multinode.job.synthetic import synthetic_environment

            env = synthetic_environment(place.run_dir) | env
        command = task.engine.command(place, task.job, env, cwd)
    environment = task.environment
    env = command.env | task.levers.environment(task.workers)
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
    data: tuple[PlanFile, ...] = ()
    if job.synthetic is not None:
        from multinode.job.synthetic import synthetic_files, synthetic_paths

        paths |= synthetic_paths(run_dir)
        data = synthetic_files(job, job.synthetic, sum(place.workers))
    return (
        PlanFile(path=JOB_FILE, text=render_job(job, paths)),
        *([] if deepspeed is None else [PlanFile(path=_DEEPSPEED_FILE, text=deepspeed)]),
        *data,
    )


def _assumed(node: Node, facts: NodeFacts | None, task: _Task) -> tuple[str, ...]:
    assumed = []
    if facts is None:
        assumed.append("home: ~ is the user's home directory on the node")
        if node.workdir is None:
            assumed.append("workdir: this directory if the node has it, otherwise the home directory")
    if facts is None and task.nccl_inspector:
        from multinode.job.nccl_inspector import PLUGIN

        if PLUGIN not in node.env:
            assumed.append(f"{PLUGIN}: only the plugin's name; a launch finds its path on the node")
    if not _is_known(node, task.environment):
        assumed.append("python: python3 on the PATH that the setup leaves; its packages are not checked")
    elif node.python is None and facts is None:
        assumed.append("python: .venv/bin/python, else python3 on PATH; set python= in the hostfile to choose")
    if facts is None and task.engine.kind.assumed is not None:
        assumed.append(task.engine.kind.assumed)
    return tuple(assumed)
