"""launch: probe, plan, check, execute, summarize. Composes the layers; prints nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from multinode.check.probe import Questions, peer_addresses, probe
from multinode.cluster.cluster import Cluster
from multinode.cluster.dataplane import Endpoint
from multinode.cluster.facts import NodeFacts
from multinode.errors import Interrupted, RunFailed, UsageError
from multinode.job.job import LlamaFactoryJob, benchmark_job, with_same_threads
from multinode.job.job_files import absent_files, job_files, may_be_paths, with_sharding
from multinode.job.planning import argument_names, candidate_ports, plan_launch, workers_of_nodes
from multinode.job.workload import read_workload
from multinode.launch.context import ExecuteOptions, Launch, Launched, Prepared, RunContext
from multinode.launch.execute import Execution
from multinode.profile.summary import import_analyses, summarise_run
from multinode.profile.throughput import read_model_work
from multinode.records.benchmark import Benchmark
from multinode.records.plan import CODE_FILE, LaunchPlan, redact_plan
from multinode.records.run import make_run_id
from multinode.records.run_directory import RunDirectory
from multinode.traffic.algorithms import Layout
from multinode.transport.agent import AgentTransport, load_archive
from multinode.units import format_count

if TYPE_CHECKING:
    from multinode.check.rule import CheckFinding

# Compared packages are shown with their versions.
_COMPARED = frozenset({"contrast", "sweep", "tuning"})


def launch(what: Launch, context: RunContext) -> Launched:
    """Run a job on all nodes of the cluster, to its end.

    Raises:
        UsageError, NodeError, NodeFailed: as `prepare`; nothing was started.
    """
    return run_prepared(prepare(what, context), context)


def prepare(what: Launch, context: RunContext) -> Prepared:
    """Probe, plan and check, and keep it all in a new run directory."""
    if isinstance(what.job, Benchmark):
        # Which the workers run in the place of a training.
        options = msgspec.structs.replace(what.options, agent=load_archive().path)
        what = msgspec.structs.replace(what, options=options)
    run_id = what.run_id or make_run_id()
    context.say(f"probing {_nodes(what.cluster)}")
    facts = probe_nodes(what, context.agent, candidate_ports(run_id, what.options.master_port))
    plan = plan_launch(what.cluster, what.job, facts, run_id, what.options)
    _keep_secrets(what.cluster, plan, context.agent)
    findings = _check(what, facts, plan, context) if what.check else ()
    code = what.options.code
    copied = None
    if code is not None:
        from multinode.launch.transfer import copy_code

        copied = copy_code(context, what.cluster, code, run_id)
    directory = RunDirectory.create(context.runs, plan.run_id)
    _keep(directory, what, plan, facts, findings)
    if copied is not None:
        directory.write(CODE_FILE, copied)
    return Prepared(what=what, facts=facts, plan=plan, findings=findings, directory=directory)


def _keep_secrets(cluster: Cluster, plan: LaunchPlan, agent: AgentTransport) -> None:
    """Make sure of each node that is to hear a secret."""
    for node, planned, shown in zip(cluster.nodes, plan.nodes, redact_plan(plan).nodes, strict=True):
        if planned != shown and not agent.verifies(node):
            raise UsageError(
                "its host key is not verified (StrictHostKeyChecking no), and the job has a secret",
                node=node.name,
                hint=(
                    "remove that setting for it from the SSH configuration and accept its key once, or remove the "
                    "secret (--env NAME, a token in the YAML)"
                ),
            )


def run_prepared(prepared: Prepared, context: RunContext) -> Launched:
    """Start what was prepared and follow it to its end; a run that fails is a result."""
    plan, cluster = prepared.plan, prepared.what.cluster
    context.say(f"run {plan.run_id}: starting {format_count(plan.world_size, 'worker')} on {_nodes(cluster)}")
    return follow_run(context, plan, cluster, prepared.directory, prepared.what.execute)


def follow_run(
    context: RunContext, plan: LaunchPlan, cluster: Cluster, directory: RunDirectory, options: ExecuteOptions
) -> Launched:
    """Execute a plan, or take it up again, bring its traces home and summarise it."""
    import_analyses(plan)
    with directory.lock():
        execution = Execution(
            plan=plan,
            cluster=cluster,
            agent=context.agent,
            directory=directory,
            options=options,
            stop=context.stop,
            observe=context.observe,
        )
        with context.stop.heard():
            run = execution.run()
        if plan.trace is not None:
            from multinode.launch.transfer import fetch_traces

            fetch_traces(context.agent, cluster, plan, directory, context.say)
        summary = summarise_run(directory, plan, context.say)
    return Launched(run=run, summary=summary, plan=plan, directory=directory)


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
            failure.message if failure else f"the run ended as {launched.run.status}",
            node=failure.node if failure else None,
            hint=(failure.hint if failure else None) or f"its logs: {launched.directory}/logs",
            detail=failure.log_tail if failure else "",
        )


def same_threads(what: Launch, workers: Sequence[int], context: RunContext, where: str) -> Launch:
    """The launch with equal threads per worker on all nodes; see `with_same_threads`.

    `workers` are per node, in every run that is compared; `where` names them in the sentence about it.
    """
    environment = with_same_threads(what.options.environment, what.cluster, workers)
    if environment == what.options.environment:
        return what
    context.say(f"OMP_NUM_THREADS=1 {where}: torchrun gives a single worker on a node more threads")
    return msgspec.structs.replace(what, options=msgspec.structs.replace(what.options, environment=environment))


def benchmark_mode(what: Launch) -> Launch:
    """The launch for measurement only; a script writes what it writes."""
    if not isinstance(what.job, LlamaFactoryJob):
        return what
    return msgspec.structs.replace(what, job=benchmark_job(what.job))


def plan_offline(what: Launch) -> LaunchPlan:
    """The plan from the hostfile alone; what a probe would have found is marked as assumed."""
    return plan_launch(what.cluster, what.job, {}, what.run_id or make_run_id(), what.options)


def create_parent(runs: Path, what: Launch) -> RunDirectory:
    """A directory for the result of several runs, so that it is listed with them."""
    directory = RunDirectory.create(runs, what.run_id or make_run_id())
    directory.write_cluster(what.cluster, what.hostfile)
    return directory


def probe_workers(what: Launch, agent: AgentTransport) -> tuple[int, ...]:
    """Workers of each node, which are asked where neither the options nor the hostfile say how many."""
    asked, nodes = what.options.workers_per_node, what.cluster.nodes
    is_told = asked is not None or all(node.slots or node.gpus for node in nodes)
    return workers_of_nodes(what.cluster, {} if is_told else probe_nodes(what, agent), asked)


def probe_nodes(what: Launch, agent: AgentTransport, ports: tuple[int, ...] = ()) -> dict[str, NodeFacts]:
    """The facts of each node, by name, and which of these ports are taken there."""
    code = what.options.code
    files = job_files(what.job, code)
    questions = Questions(
        controller_cwd=str(Path.cwd()),
        peers=peer_addresses(what.cluster.nodes),
        paths=(*(files.needed if what.check else ()), *(may_be_paths(what.job) if code is not None else ())),
        ports=ports,
        packages=what.check or what.execute.kind in _COMPARED,
        model=files.model if what.options.profile else None,
        arguments=argument_names(what.job, what.cluster, what.options) if what.check else (),
    )
    return {facts.node: facts for facts in probe(agent, what.cluster, questions).require()}


def _check(
    what: Launch, facts: dict[str, NodeFacts], plan: LaunchPlan, context: RunContext
) -> tuple[CheckFinding, ...]:
    # A launch without checks imports no rules.
    from multinode.check.check import check_launch
    from multinode.check.rule import Inspection

    endpoints = {
        node.node: Endpoint(
            addr=node.addr, ifname=node.ifname, link_gbit_per_s=node.link_gbit_per_s, ifnames=node.ifnames
        )
        for node in plan.nodes
    }
    inspection = Inspection(
        cluster=what.cluster,
        facts=facts,
        job=with_sharding(what.job, what.options.engine),
        workers=what.options.workers_per_node,
        master_port=plan.master_port,
        environment=what.options.environment,
        endpoints=endpoints,
        controller_cwd=str(Path.cwd()),
        code=what.options.code,
        absent_here=absent_files(job_files(what.job).needed),
    )
    return check_launch(context.agent, inspection, what.options, context.say)


def _keep(
    directory: RunDirectory,
    what: Launch,
    plan: LaunchPlan,
    facts: dict[str, NodeFacts],
    findings: tuple[CheckFinding, ...],
) -> None:
    directory.write_cluster(what.cluster, what.hostfile)
    directory.write("facts.json", list(facts.values()))
    directory.write("findings.json", findings)
    directory.write("plan.json", redact_plan(plan))
    first = facts[what.cluster.nodes[0].name]
    if what.options.profile:
        directory.write("model.json", read_model_work(what.job, first.model))
    if not isinstance(what.job, Benchmark):
        layout = Layout.of(plan.workers)
        job = with_sharding(what.job, what.options.engine)
        workload = read_workload(job, first.model, layout, versions=first.packages, grad_compress=plan.grad_compress)
        averaging = plan.averaging.words if plan.averaging is not None else None
        balance = plan.balance.words if plan.balance is not None else None
        settings = msgspec.structs.replace(workload.settings, averaging=averaging, balance=balance)
        directory.write("workload.json", msgspec.structs.replace(workload, settings=settings))


def _nodes(cluster: Cluster) -> str:
    return format_count(len(cluster.nodes), "node")
