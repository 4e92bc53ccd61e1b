"""plan_launch: cluster + job + facts -> LaunchPlan. Pure: no clock, randomness, environment or network."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from multinode.cluster.accelerators import accelerator_named
from multinode.cluster.cluster import Cluster, Node
from multinode.cluster.dataplane import choose_endpoints
from multinode.cluster.facts import NodeFacts, common_backend, select_gpus
from multinode.cluster.quoting import Command
from multinode.errors import UsageError
from multinode.findings.finding import Finding
from multinode.job.engines.engine import OF_SCRIPT, Engine, choose_engine
from multinode.job.engines.place import JOB_FILE
from multinode.job.job import Job, TrainingJob, argument_keys, change_arguments, describe_job, render_job
from multinode.job.job_files import outside_code, require_copied
from multinode.job.launch_options import LaunchOptions
from multinode.levers.lever import Workers
from multinode.levers.levers import NONE
from multinode.records.benchmark import Benchmark, CollectiveTest, describe_benchmark
from multinode.records.plan import LaunchPlan, NodePlan, Observation, Place, PlanFile, Rendezvous
from multinode.records.run import node_run_id
from multinode.secret_values import redact_file
from multinode.stats.unknown import entries, or_empty, or_none
from multinode.units import format_count

# Below Linux's ephemeral ports (32768 to 60999), which any connection may take.
RENDEZVOUS_PORTS = range(20000, 30000)
_CANDIDATES = 16

_Options = TypeVar("_Options", bound=LaunchOptions)


def candidate_ports(run_id: str, master_port: int | None) -> tuple[int, ...]:
    """Ports to try, in order: the one asked for, or those derived from the run id."""
    if master_port is not None:
        return (master_port,)
    first = zlib.crc32(run_id.encode())
    return tuple(RENDEZVOUS_PORTS[(first + step) % len(RENDEZVOUS_PORTS)] for step in range(_CANDIDATES))


def choose_master_port(run_id: str, master_port: int | None, facts: NodeFacts | None) -> int:
    """The first candidate that is free on node 0 by its facts; the first if none is."""
    ports = candidate_ports(run_id, master_port)
    taken = {fact.port for fact in facts.ports if fact.taken is True} if facts is not None else set[int]()
    return next((port for port in ports if port not in taken), ports[0])


_DEEPSPEED_FILE = "deepspeed.json"
_OUTPUT = "output"


def argument_names(job: Job | Benchmark | None, cluster: Cluster, options: LaunchOptions) -> tuple[str, ...]:
    """Keys to look up in the framework on the nodes; a setup command may select another installation."""
    if options.environment.prelude is not None:
        return ()
    names = (name for node in cluster.nodes for name in node.env)
    return argument_keys(job, (*options.environment.env, *names))


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
    addr = endpoints[0].addr
    if addr is None:
        raise UsageError("node 0 has no data-plane address", hint="set addr= in the hostfile")
    port = choose_master_port(run_id, options.master_port, facts.get(cluster.nodes[0].name))
    rendezvous = Rendezvous(addr=addr, port=port, workers=workers)
    of_levers = Workers() if isinstance(job, Benchmark) else _workers_of_levers(job, cluster, workers)
    notes: tuple[Finding, ...] = ()
    if len(cluster.nodes) > 1 or options.levers != NONE:
        from multinode.job.plan_notes import lever_notes, route_notes

        notes = (*route_notes(cluster, endpoints, facts), *lever_notes(options.levers, of_levers))
    engine, options = _engine(job, options), _settle(job, options, of_levers)
    if not isinstance(job, Benchmark) and len(set(workers)) > 1:
        from multinode.job.restrictions import refuse_unequal

        refuse_unequal(job, engine.accelerate, options.environment.env, cluster, workers)
    nodes = []
    for node_rank, (node, endpoint) in enumerate(zip(cluster.nodes, endpoints, strict=True)):
        known = facts.get(node.name)
        home = (or_none(known.home) if known else None) or "~"
        own = _on_node(options, node, of_levers, home)
        is_known = own.environment.prelude is None or node.python is not None
        packages = entries(known.packages) if known and is_known else {}
        place = Place(
            node=node.name,
            node_rank=node_rank,
            ranks=rendezvous.ranks(node_rank),
            endpoint=endpoint,
            hcas=_hcas(node, known),
            accelerator=known.accelerator if known else None,
            devices=_devices(
                node, known, workers[node_rank] if engine.kind.starts_workers else None, own.environment.env
            ),
            python=((or_none(known.python) if known else None) or node.python) if is_known else None,
            packages={name: packages[name] for name in engine.kind.packages if name in packages},
            run_dir=f"{home}/.multinode/runs/{node_run_id(run_id, node_rank)}",
            cwd=(or_none(known.cwd) if known else None) or node.workdir,
            code_dir=own.code.place(run_id, home) if own.code is not None else None,
        )
        nodes.append(_plan_node(rendezvous, place, job, own, known))
    return LaunchPlan(
        run_id=run_id,
        engine=engine.name,
        job=describe_benchmark(job) if isinstance(job, Benchmark) else describe_job(job),
        framework=job.framework if isinstance(job, TrainingJob) else "",
        verb=job.verb if isinstance(job, TrainingJob) else "",
        config_path=job.config_path if isinstance(job, TrainingJob) else "",
        rendezvous=rendezvous,
        observation=_observation(options.observation, nodes),
        levers=options.levers,
        test=job if isinstance(job, Benchmark) else None,
        code=options.code.copy() if options.code is not None else None,
        command=options.command,
        nodes=tuple(nodes),
        notes=notes,
    )


def _observation(asked: Observation, nodes: Sequence[NodePlan]) -> Observation:
    """What is recorded, with the ranks that are traced."""
    if asked.trace is None:
        return asked
    last = nodes[-1].place.ranks[-1]
    wrong = next((rank for rank in asked.trace.ranks if not 0 <= rank <= last), None)
    if wrong is not None:
        raise UsageError(f"cannot trace rank {wrong}: no such rank", hint=f"the ranks of this run are 0 to {last}")
    ranks = asked.trace.ranks or tuple(node.place.ranks[0] for node in nodes)
    return msgspec.structs.replace(asked, trace=msgspec.structs.replace(asked.trace, ranks=ranks))


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
                    f"{workers_per_node} workers are requested, but it has {format_count(slots[node.name], 'slot')}",
                    node=node.name,
                    hint=f"use --workers-per-node {fewest}, or add slots (slots=) or GPUs (gpus=) in the hostfile",
                )
        return (workers_per_node,) * len(cluster.nodes)
    return tuple(slots.values())


def with_workers(cluster: Cluster, options: _Options, workers: Sequence[int]) -> tuple[Cluster, _Options]:
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
                f"{nproc} workers are requested, but it has {format_count(gpus, 'GPU')}",
                node=node.name,
                hint="use fewer workers per node, or --backend gloo to measure without GPUs",
            )


def _slots(node: Node, facts: NodeFacts | None) -> int:
    if node.slots is not None:
        return node.slots
    if node.gpus is not None:
        return len(node.gpus)
    return len(facts.visible_gpus) or 1 if facts else 1


def _workers_of_levers(job: Job, cluster: Cluster, counts: Sequence[int]) -> Workers:
    return Workers(
        nodes=tuple(node.name for node in cluster.nodes),
        counts=tuple(counts),
        batch=job.settings.per_device_train_batch_size,
        accumulation=job.settings.gradient_accumulation_steps,
    )


def _engine(job: Job | Benchmark, options: LaunchOptions) -> Engine:
    if isinstance(job, Benchmark):
        return Engine(name=OF_SCRIPT)
    return options.engine or choose_engine(job)


def _settle(job: Job | Benchmark, options: LaunchOptions, workers: Workers) -> LaunchOptions:
    """The options as they hold: without what has no effect on this job or on so many nodes."""
    observation = options.observation
    if isinstance(job, Benchmark):
        observation = msgspec.structs.replace(observation, nccl_inspector=False)
        return msgspec.structs.replace(options, observation=observation, levers=NONE, code=None)
    if observation.nccl_inspector or observation.trace is not None or options.levers != NONE:
        from multinode.job.restrictions import refuse_options

        refuse_options(options, job, _engine(job, options))
        options.levers.check(workers)
    if options.code is not None:
        require_copied(job, options.code)
    return msgspec.structs.replace(options, levers=options.levers.on(len(workers.nodes)))


def _on_node(options: LaunchOptions, node: Node, workers: Workers, home: str) -> LaunchOptions:
    """The options of one node: its variables, the user's, which win, and those of the levers; the path of its agent."""
    env = node.env | options.environment.env | options.levers.environment(workers)
    return msgspec.structs.replace(
        options,
        environment=msgspec.structs.replace(options.environment, env=env),
        agent=f"{home}/{options.agent}" if options.agent else None,
    )


def _plan_node(
    rendezvous: Rendezvous, place: Place, job: Job | Benchmark, options: LaunchOptions, facts: NodeFacts | None
) -> NodePlan:
    """The plan of one node; `options` are its own."""
    there = {path.path for path in facts.paths if path.kind in {"file", "directory"}} if facts else set[str]()
    if isinstance(job, TrainingJob):
        outside = outside_code(job, options.code, place.cwd or "~", there) if options.code is not None else {}
        job = _placed(job, place, outside)
    engine, command = _engine(job, options), _command(rendezvous, place, job, options)
    if options.observation.nccl_inspector:
        from multinode.job.nccl_inspector import inspector_environment

        given = options.environment.env
        command = msgspec.structs.replace(command, env=inspector_environment(place, given, facts) | command.env)
    visible = command.env.get(accelerator_named(place.accelerator).visible[0])
    files = _job_files(job, rendezvous.world_size) + engine.files(rendezvous, place)
    return NodePlan(
        place=place,
        gpus=_gpu_ids(visible, place.nproc, facts),
        command=command,
        files=tuple(_with_care(file) for file in files),
        assumed=_assumed(place, engine, options, facts),
        serves=engine.kind.serves(place, job) if not isinstance(job, Benchmark) else None,
        output_cwd=place.cwd if options.code is not None and isinstance(job, TrainingJob) else None,
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
    gpus = or_empty(facts.gpus) if facts else ()
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
    if facts is not None and (gpus := or_empty(facts.gpus)):
        return tuple(gpu.index for gpu in select_gpus(visible, gpus)[:nproc]) or None
    names = visible.split(",")[:nproc]
    return tuple(map(int, names)) if all(name.isascii() and name.isdigit() for name in names) else None


def _command(rendezvous: Rendezvous, place: Place, job: Job | Benchmark, options: LaunchOptions) -> Command:
    environment = options.environment
    env, cwd = environment.env, place.code_dir or place.cwd
    if isinstance(job, Benchmark):
        from multinode.job.engines.torchrun import benchmark_command

        command, cwd = benchmark_command(rendezvous, place, job, options.agent, env), None
    else:
        if isinstance(job, TrainingJob) and job.synthetic is not None:
            from multinode.job.synthetic import synthetic_environment

            env = synthetic_environment(place.run_dir) | env
        if isinstance(job, TrainingJob):
            env = job.kind.variables(job.config) | env
        command = _engine(job, options).command(rendezvous, place, job, env)
    return msgspec.structs.replace(command, cwd=cwd, forwarded=environment.forwarded, prelude=environment.prelude)


def _placed(job: TrainingJob, place: Place, outside: dict[str, str]) -> TrainingJob:
    """The job as it runs on a node: what travels with it is named by its place there, as its output is.

    `outside` has the arguments of what is not in the copy that the job runs in.
    """
    paths = dict(outside)
    if job.deepspeed_text is not None:
        paths["deepspeed"] = f"{place.run_dir}/{_DEEPSPEED_FILE}"
    if not job.keeps_output:
        paths["output_dir"] = f"{place.run_dir}/{_OUTPUT}"
    if job.synthetic is not None:
        from multinode.job.synthetic import synthetic_paths

        paths |= synthetic_paths(place.run_dir)
    return change_arguments(job, paths)


def _job_files(job: Job | Benchmark, world_size: int) -> tuple[PlanFile, ...]:
    """The keys of a training, and what they name that travels with them."""
    if not isinstance(job, TrainingJob):
        return ()
    deepspeed, data = job.deepspeed_text, tuple[PlanFile, ...]()
    if job.synthetic is not None:
        from multinode.job.synthetic import synthetic_files

        data = synthetic_files(job, job.synthetic, world_size)
    return (
        PlanFile(path=JOB_FILE, text=render_job(job)),
        *([] if deepspeed is None else [PlanFile(path=_DEEPSPEED_FILE, text=deepspeed)]),
        *data,
    )


def _with_care(file: PlanFile) -> PlanFile:
    """The file, marked if it has a secret."""
    return msgspec.structs.replace(file, in_memory=redact_file(file.text) != file.text)


def _assumed(place: Place, engine: Engine, options: LaunchOptions, facts: NodeFacts | None) -> tuple[str, ...]:
    assumed = []
    if facts is None:
        assumed.append("home: ~ is the user's home directory on the node")
        if place.cwd is None:
            assumed.append("workdir: this directory if the node has it, otherwise the home directory")
    if facts is None and options.observation.nccl_inspector:
        from multinode.job.nccl_inspector import PLUGIN

        if PLUGIN not in options.environment.env:
            assumed.append(f"{PLUGIN}: only the plugin's name; a launch finds its path on the node")
    if place.python is None and options.environment.prelude is not None:
        assumed.append("python: python3 on the PATH after the setup; its packages are not checked")
    elif place.python is None and facts is None:
        assumed.append("python: .venv/bin/python, else python3 on PATH; set python= in the hostfile to choose")
    if facts is None and engine.kind.assumed is not None:
        assumed.append(engine.kind.assumed)
    return tuple(assumed)
