"""launch: probe, plan, check, execute, summarise. Composes the layers; prints nothing."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from multinode.analyse.collectives.algorithms import Layout
from multinode.analyse.job.workload import read_workload
from multinode.analyse.steps.utilisation import read_model_work
from multinode.core.check.finding import Finding
from multinode.core.cluster.cluster import Cluster
from multinode.core.cluster.dataplane import Endpoint
from multinode.core.cluster.facts import NodeFacts
from multinode.core.job.job import LlamaFactoryJob, argument_keys, figures_only
from multinode.core.job.job_environment import with_same_threads
from multinode.core.measure.benchmark import Benchmark
from multinode.core.run.job_files import job_files
from multinode.core.run.plan import LaunchPlan, redact_plan
from multinode.core.run.planning import plan_launch
from multinode.errors import Interrupted, RunFailed
from multinode.lab.cluster import refresh_lab
from multinode.launch.execute import Execution
from multinode.launch.request import ExecuteOptions
from multinode.preflight.catalogue import sort_findings
from multinode.preflight.inspection import Inspection
from multinode.preflight.launch_checks import check_launch, check_meeting, raise_first_error, with_meeting
from multinode.preflight.probe import Questions, peer_addresses, probe
from multinode.store.run_directory import RunDirectory
from multinode.transport.agent import AgentTransport
from multinode.units import format_count
from multinode.workflows.run.context import Launch, Launched, Prepared, RunContext
from multinode.workflows.run.fetch import fetch_traces
from multinode.workflows.run.observe import summarise_run

__all__ = [
    "create_parent",
    "follow_run",
    "launch",
    "make_run_id",
    "measured_only",
    "plan_offline",
    "prepare",
    "probe_nodes",
    "require_success",
    "run_prepared",
    "same_threads",
]

# What is compared is told with its versions.
_COMPARED = frozenset({"contrast", "sweep"})
# Checks that look into the interpreter that was found before the job starts.
_SOFTWARE = frozenset({"interpreter", "packages", "versions"})
# Looks whether the job's files are there.
_FILES = "paths"


def launch(what: Launch, context: RunContext) -> Launched:
    """Run a job on all nodes of the cluster, to its end.

    Raises:
        UsageError, NodeError, NodeFailed: as `prepare`; nothing was started.
    """
    return run_prepared(prepare(what, context), context)


def prepare(what: Launch, context: RunContext) -> Prepared:
    """Probe, plan and check, and keep it all in a new run directory.

    Raises:
        UsageError: the job cannot be laid out over these nodes.
        NodeError: a node could not be reached.
        NodeFailed: a check found what would break the run.
    """
    refresh_lab(what.cluster)
    context.say(f"probing {_nodes(what.cluster)}")
    facts = probe_nodes(what, context.agent)
    plan = plan_launch(what.cluster, what.job, facts, what.run_id or make_run_id(), what.options)
    findings = _check(what, facts, plan, context) if what.check else ()
    directory = RunDirectory.create(context.runs, plan.run_id)
    _keep(directory, what, plan, facts, findings)
    return Prepared(what=what, facts=facts, plan=plan, findings=findings, directory=directory)


def run_prepared(prepared: Prepared, context: RunContext) -> Launched:
    """Start what was prepared and follow it to its end; a run that fails is a result."""
    plan, cluster = prepared.plan, prepared.what.cluster
    context.say(f"run {plan.run_id}: starting {format_count(plan.world_size, 'worker')} on {_nodes(cluster)}")
    return follow_run(context, plan, cluster, prepared.directory, prepared.what.execute)


def follow_run(
    context: RunContext, plan: LaunchPlan, cluster: Cluster, directory: RunDirectory, options: ExecuteOptions
) -> Launched:
    """Execute a plan, or take it up again, bring its traces home and summarise it.

    Raises:
        UsageError: another process follows it.
    """
    with directory.lock():
        run = Execution(
            plan=plan,
            cluster=cluster,
            agent=context.agent,
            directory=directory,
            options=options,
            stop=context.stop,
            observe=context.observe,
        ).run()
        fetch_traces(context.agent, cluster, plan, directory, context.say)
        summary = summarise_run(directory, plan)
    return Launched(run=run, summary=summary, plan=plan, directory=directory)


def require_success(launched: Launched, context: RunContext) -> None:
    """For verbs that need the run's figures: it must have ended well.

    Raises:
        Interrupted: the user stopped it.
        RunFailed: it failed, with its first failure.
    """
    if context.stop.count:
        raise Interrupted("interrupted", hint=f"what was measured so far: {launched.directory}")
    if launched.run.status != "succeeded":
        failure = launched.run.first_failure
        raise RunFailed(
            failure.message if failure else f"the run ended as {launched.run.status}",
            node=failure.node if failure else None,
            hint=(failure.hint if failure else None) or f"its logs: {launched.directory}/logs",
            detail=failure.log_tail if failure else "",
        )


def same_threads(what: Launch, workers: Sequence[int]) -> Launch:
    """The launch with as many threads a worker, however many workers a node has; see `with_same_threads`."""
    environment = with_same_threads(what.options.environment, what.cluster, workers)
    return msgspec.structs.replace(what, options=msgspec.structs.replace(what.options, environment=environment))


def measured_only(what: Launch) -> Launch:
    """The launch for its figures alone; a script keeps what it keeps."""
    if not isinstance(what.job, LlamaFactoryJob):
        return what
    return msgspec.structs.replace(what, job=figures_only(what.job))


def plan_offline(what: Launch) -> LaunchPlan:
    """The plan as far as the hostfile alone gives it; what a probe would have told is marked as assumed."""
    return plan_launch(what.cluster, what.job, {}, what.run_id or make_run_id(), what.options)


def make_run_id() -> str:
    """A name that sorts by date and that no two runs share."""
    return time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)


def create_parent(runs: Path, what: Launch) -> RunDirectory:
    """A directory for what is made of several runs, so that it is listed with them.

    Raises:
        MultinodeError: it cannot be made.
    """
    directory = RunDirectory.create(runs, what.run_id or make_run_id())
    directory.write_cluster(what.cluster, what.hostfile)
    return directory


def probe_nodes(what: Launch, agent: AgentTransport) -> dict[str, NodeFacts]:
    """What each node is, by its name.

    Raises:
        NodeError: one could not be reached.
    """
    questions = Questions(
        controller_cwd=str(Path.cwd()),
        peers=peer_addresses(what.cluster.nodes),
        paths=job_files(what.job).needed if what.check else (),
        ports=(what.options.master_port,),
        packages=what.check or what.execute.kind in _COMPARED,
        model=job_files(what.job).model if what.options.profile else None,
        arguments=_argument_keys(what),
    )
    return {facts.node: facts for facts in probe(agent, what.cluster, questions).require()}


def _argument_keys(what: Launch) -> tuple[str, ...]:
    """Those that are looked for; a prelude may lead to another LLaMA-Factory than the one that is found without it."""
    environment = what.options.environment
    if not what.check or environment.prelude is not None:
        return ()
    names = (name for node in what.cluster.nodes for name in node.env)
    return argument_keys(what.job, (*environment.env, *names))


def _check(what: Launch, facts: dict[str, NodeFacts], plan: LaunchPlan, context: RunContext) -> tuple[Finding, ...]:
    endpoints = {
        node.node: Endpoint(addr=node.addr, ifname=node.ifname, link_gbit_per_s=node.link_gbit_per_s)
        for node in plan.nodes
    }
    inspection = Inspection(
        cluster=what.cluster, facts=facts, job=what.job, master_port=plan.master_port, endpoints=endpoints
    )
    findings = _apply(what, check_launch(inspection))
    raise_first_error(findings)
    if len(what.cluster.nodes) > 1:
        context.say("checking that the nodes reach each other")
        met = with_meeting(context.agent, inspection)
        findings = sort_findings([*findings, *_apply(what, check_meeting(met))])
        raise_first_error(findings)
    return findings


def _apply(what: Launch, found: Iterable[Finding]) -> tuple[Finding, ...]:
    """Those that concern the job: a prelude may bring interpreter and files, and a program of any kind needs none."""
    options, names = what.options, {node.name for node in what.cluster.nodes}
    # On which nodes nothing is known of the job's files, and of its interpreter.
    files, software = set[str](), set[str]()
    if options.engine is not None and options.engine.name == "command":
        files = software = names
    elif options.environment.prelude is not None:
        files, software = names, {node.name for node in what.cluster.nodes if node.python is None}
    return tuple(
        one
        for one in found
        if not ((one.check == _FILES and one.node in files) or (one.check in _SOFTWARE and one.node in software))
    )


def _keep(
    directory: RunDirectory, what: Launch, plan: LaunchPlan, facts: dict[str, NodeFacts], findings: tuple[Finding, ...]
) -> None:
    directory.write_cluster(what.cluster, what.hostfile)
    directory.write("facts.json", list(facts.values()))
    directory.write("findings.json", findings)
    directory.write("plan.json", redact_plan(plan))
    first = facts[what.cluster.nodes[0].name]
    if what.options.profile:
        directory.write("model.json", read_model_work(what.job, first.model))
    if not isinstance(what.job, Benchmark):
        layout = Layout(nodes=len(plan.nodes), workers_per_node=plan.nproc_per_node)
        directory.write(
            "workload.json",
            read_workload(what.job, first.model, layout, versions=first.packages, grad_compress=plan.grad_compress),
        )


def _nodes(cluster: Cluster) -> str:
    return format_count(len(cluster.nodes), "node")
