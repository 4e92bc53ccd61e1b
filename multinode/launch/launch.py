"""launch: probe, plan, check, execute, summarize. Composes the layers; prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from multinode.check.probe import peer_addresses, probe, torch_environment
from multinode.cluster.cluster import Cluster
from multinode.cluster.facts import NodeFacts
from multinode.errors import ContactLost, Interrupted, MultinodeError, RunFailed, UsageError
from multinode.job.job import benchmark_job, with_same_threads
from multinode.job.job_files import absent_files, job_files, may_be_paths, with_sharding
from multinode.job.planning import argument_names, candidate_ports, plan_launch, workers_of_nodes
from multinode.launch.context import ExecuteOptions, Launch, Launched, RunContext
from multinode.launch.execute import Execution
from multinode.model.workload import read_workload
from multinode.profile.summary import import_analyses, summarise_run
from multinode.profile.throughput import read_model_work
from multinode.records.benchmark import Benchmark
from multinode.records.plan import CODE_FILE, LaunchPlan, has_secret
from multinode.records.run import Run, make_run_id
from multinode.records.run_directory import RunDirectory
from multinode.runs.stored_run import StoredRun
from multinode.stats.unknown import entries
from multinode.traffic.algorithms import Layout
from multinode.transport.agent import AgentTransport, load_archive
from multinode.units import format_count, format_size

if TYPE_CHECKING:
    from multinode.check.rule import CheckFinding

# Compared packages are shown with their versions.
_COMPARED = frozenset({"contrast", "sweep", "tuning"})


def launch(launch: Launch, context: RunContext) -> Launched:
    """Run a job on all nodes of the cluster, to its end.

    Raises:
        UsageError, NodeError, NodeFailed: as `prepare`; nothing was started.
    """
    return run_prepared(launch, prepare(launch, context), context)


def prepare(launch: Launch, context: RunContext) -> StoredRun:
    """Probe, plan and check, and keep it all in a new run directory; nothing of it runs yet.

    Its plan has the secrets that the directory has not.
    """
    if isinstance(launch.job, Benchmark):
        # Which the workers run in the place of a training.
        launch = msgspec.structs.replace(launch, agent=load_archive().path)
    run_id = launch.run_id or make_run_id()
    context.say(f"probing {_nodes(launch.cluster)}")
    facts = probe_nodes(launch, context.agent, candidate_ports(run_id, launch.master_port))
    plan = plan_launch(launch.cluster, launch.job, facts, run_id, launch)
    _keep_secrets(launch.cluster, plan, context.agent)
    findings = _check(launch, facts, plan, context) if launch.check else ()
    code = launch.code
    copied = None
    if code is not None:
        from multinode.copy.code import copy_code

        copied = copy_code(context.agent, launch.cluster, code, run_id, context.say)
    directory = RunDirectory.create(context.runs, plan.run_id)
    _keep(directory, launch, plan, facts, findings)
    if copied is not None:
        directory.write(CODE_FILE, copied)
    return StoredRun(directory).having(plan=plan, facts=facts, cluster=launch.cluster)


def _keep_secrets(cluster: Cluster, plan: LaunchPlan, agent: AgentTransport) -> None:
    """Make sure of each node that is to hear a secret."""
    for node, planned in zip(cluster.nodes, plan.nodes, strict=True):
        if has_secret(planned) and not agent.verifies(node):
            raise UsageError(
                "its host key is not verified (StrictHostKeyChecking no), so multinode does not send the job's secret",
                node=node.name,
                hint=(
                    "remove that setting for this node from the SSH configuration and accept its key once, or remove "
                    "the secret (--env NAME, a token in the YAML)"
                ),
            )


def run_prepared(launch: Launch, prepared: StoredRun, context: RunContext) -> Launched:
    """Start what was prepared on the nodes of the launch and follow it to its end; a run that fails is a result."""
    workers, nodes = format_count(prepared.require_plan().world_size, "worker"), _nodes(launch.cluster)
    context.say(f"run {prepared.run_id}: starting {workers} on {nodes}")
    return follow_run(prepared, launch.cluster, context, launch.execute)


def follow_run(stored: StoredRun, cluster: Cluster, context: RunContext, options: ExecuteOptions) -> Launched:
    """Execute the plan of a run, or take it up again, bring its traces home and summarise it."""
    plan, directory = stored.require_plan(), stored.directory
    import_analyses(plan)
    with directory.lock():
        execution = Execution(stored, cluster, context, options)
        with context.stop.heard():
            run = execution.run()
            if run.missing_bytes and run.status != "running" and not context.stop.count:
                run = _with_missing(stored, run, cluster, context)
        if plan.observation.trace is not None:
            from multinode.copy.fetch import fetch_traces

            fetch_traces(context.agent, cluster, plan, directory, context.say)
        summary = summarise_run(directory, plan, context.say)
    return Launched(run=run, summary=summary, plan=plan, directory=directory)


def _with_missing(stored: StoredRun, run: Run, cluster: Cluster, context: RunContext) -> Run:
    from multinode.launch.missing_data import fetch_missing

    try:
        return fetch_missing(stored, run, cluster, context)
    except MultinodeError as error:
        # The run has ended and is recorded; `attach` tries this again.
        context.say(str(error))
        return run


def require_success(launched: Launched, context: RunContext) -> None:
    """For commands that need the run's figures: it must have succeeded.

    Raises:
        Interrupted: the user stopped it.
        RunFailed: it failed, with its first failure.
    """
    if context.stop.count:
        raise Interrupted("interrupted", hint=f"results so far: {launched.directory}")
    if launched.run.status != "succeeded":
        failure = launched.run.first_failure
        raise RunFailed(
            failure.message if failure else f"the run ended with status {launched.run.status}",
            node=failure.node if failure else None,
            hint=(failure.hint if failure else None) or f"its logs: {launched.directory}/logs",
            detail=failure.log_tail if failure else "",
        ).of_run(launched.run.run_id)


def same_threads(launch: Launch, workers: Sequence[int], context: RunContext, where: str) -> Launch:
    """The launch with equal threads per worker on all nodes; see `with_same_threads`.

    `workers` are per node, in every run that is compared; `where` names them in the sentence about it.
    """
    environment = with_same_threads(launch.environment, launch.cluster, workers)
    if environment == launch.environment:
        return launch
    context.say(f"setting OMP_NUM_THREADS=1 {where}, because torchrun sets it only for several workers on a node")
    return msgspec.structs.replace(launch, environment=environment)


def benchmark_mode(launch: Launch) -> Launch:
    """The launch for measurement only."""
    return msgspec.structs.replace(launch, job=benchmark_job(launch.job))


def create_parent(runs: Path, launch: Launch) -> RunDirectory:
    """A directory for the result of several runs, so that it is listed with them."""
    directory = RunDirectory.create(runs, launch.run_id or make_run_id())
    directory.write_cluster(launch.cluster, launch.hostfile)
    return directory


def probe_workers(launch: Launch, agent: AgentTransport) -> tuple[int, ...]:
    """Workers of each node, which are asked where neither the options nor the hostfile say how many."""
    asked, nodes = launch.workers_per_node, launch.cluster.nodes
    is_told = asked is not None or all(node.slots or node.gpus for node in nodes)
    return workers_of_nodes(launch.cluster, {} if is_told else probe_nodes(launch, agent), asked)


def probe_nodes(launch: Launch, agent: AgentTransport, ports: tuple[int, ...] = ()) -> dict[str, NodeFacts]:
    """The facts of each node, by name, and which of these ports are taken there."""
    code = launch.code
    files = job_files(launch.job, code)
    outcomes = probe(
        agent,
        launch.cluster,
        controller_cwd=str(Path.cwd()),
        peers=peer_addresses(launch.cluster.nodes),
        paths=(*(files.needed if launch.check else ()), *(may_be_paths(launch.job) if code is not None else ())),
        ports=ports,
        tools=tuple(filter(None, (files.program,))) if launch.check else (),
        modules=tuple(filter(None, (files.module,))) if launch.check else (),
        packages=launch.check or launch.execute.kind in _COMPARED,
        model=files.model if launch.observation.profile else None,
        count=launch.job,
        torch_env=torch_environment(launch.job, launch) if launch.check else None,
        arguments=argument_names(launch.job, launch.cluster, launch) if launch.check else (),
    )
    return outcomes.require()


def _check(
    launch: Launch, facts: dict[str, NodeFacts], plan: LaunchPlan, context: RunContext
) -> tuple[CheckFinding, ...]:
    # A launch without checks imports no rules.
    from multinode.check.check import check_launch
    from multinode.check.rule import Inspection

    inspection = Inspection(
        cluster=launch.cluster,
        facts=facts,
        job=with_sharding(launch.job, launch.engine),
        options=launch,
        master_port=plan.rendezvous.port,
        endpoints={place.node: place.endpoint for place in plan.places},
        controller_cwd=str(Path.cwd()),
        absent_here=absent_files(job_files(launch.job).needed),
        runs=context.runs,
    )
    return check_launch(context.agent, inspection, context.say)


def _keep(
    directory: RunDirectory,
    launch: Launch,
    plan: LaunchPlan,
    facts: dict[str, NodeFacts],
    findings: tuple[CheckFinding, ...],
) -> None:
    directory.write_cluster(launch.cluster, launch.hostfile)
    directory.write("facts.json", list(facts.values()))
    directory.write("findings.json", findings)
    directory.write("plan.json", plan)
    first = facts[launch.cluster.nodes[0].name]
    if launch.observation.profile:
        directory.write("model.json", read_model_work(launch.job, first.model_config))
    if not isinstance(launch.job, Benchmark):
        layout = Layout.of(plan.workers)
        job = with_sharding(launch.job, launch.engine)
        workload = read_workload(job, first.model_config, layout, versions=entries(first.packages), levers=plan.levers)
        directory.write("workload.json", workload)


def _nodes(cluster: Cluster) -> str:
    return format_count(len(cluster.nodes), "node")


def fetch_results(
    context: RunContext, launched: Launched, cluster: Cluster, paths: Sequence[str], say: Callable[[str], None]
) -> None:
    """Copy files of `--fetch` from node 0 into the run's directory, unless the run continues.

    Raises:
        MultinodeError: a path cannot be fetched, or contact to the node was lost.
    """
    from multinode.copy.fetch import Wanted, fetch_files

    run, planned = launched.run, launched.plan.nodes[0]
    if not paths or run.status == "running":
        return
    # A restart may have gone on without the hostfile's first node.
    node = next(node for node in cluster.nodes if node.name == planned.place.node)
    if run.nodes[0].state == "lost":
        raise ContactLost("nothing was fetched: contact was lost", node=node.name)
    wanted = Wanted(node=node, paths=tuple(paths), cwd=planned.output_cwd or planned.command.cwd)
    fetched = fetch_files(context.agent, wanted, launched.directory.path / "fetched")
    files = f"{format_count(len(fetched.files), 'file')} ({format_size(fetched.size_bytes)})"
    say(f"fetched {files} into {fetched.directory}")
    if any(name.endswith(("_states.pt", ".distcp")) for name in fetched.files):
        from multinode.launch.shard_fetch import fetch_shards

        fetch_shards(context.agent, launched, cluster, wanted, fetched, say=say)
