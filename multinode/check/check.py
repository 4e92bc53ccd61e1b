"""check: ask every node, test the connections, judge. Reports on the others if one is unreachable."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from multinode.check.catalogue import CHECK_NAMES, check_all, sort_findings
from multinode.check.connection_test import ConnectivityPlan, run_connectivity_test
from multinode.check.connectivity import choose_pairs
from multinode.check.inspection import Inspection
from multinode.check.launch_checks import concerning
from multinode.check.link import least_speeds
from multinode.check.probe import Questions, check_host_keys, check_ssh, peer_addresses, probe
from multinode.check.rule import CheckFinding, finding_of_error
from multinode.check.software import needed_tools
from multinode.cluster.cluster import Cluster
from multinode.cluster.dataplane import choose_endpoints
from multinode.cluster.quoting import as_steps
from multinode.errors import NodeError, UsageError
from multinode.job.job import Job
from multinode.job.job_files import absent_files, job_files, may_be_paths
from multinode.job.planning import LaunchOptions, argument_names, candidate_ports, choose_master_port, plan_launch
from multinode.job.training import with_accelerate
from multinode.records.run import make_run_id
from multinode.traffic.pair_speeds import PairSpeed
from multinode.transport.agent import AgentTransport

# Up to this number of nodes, streams between all pairs take seconds; above, they are made on request.
_STREAMS_NODES = 8
_STREAM_S = 0.3


class CheckOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How nodes are checked.

    Attributes:
        launch: how the job will be launched.
        bandwidth: whether nodes stream to each other; None does so for few nodes.
    """

    launch: LaunchOptions = LaunchOptions()
    bandwidth: bool | None = None


class CheckedNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node, as checked."""

    name: str
    node_rank: int
    reached: bool
    addr: str | None = None  # its address for data, if found; likewise `ifname` and `link_gbit_per_s`
    ifname: str | None = None
    link_gbit_per_s: float | None = None
    python: str | None = None
    packages: dict[str, str] = {}


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """The document of `check --json`.

    Attributes:
        streams: short TCP streams between the nodes, in Gbit/s of payload.
    """

    schema: str = "multinode.check/1"
    ok: bool
    nodes: tuple[CheckedNode, ...]
    checks: tuple[str, ...] = CHECK_NAMES
    findings: tuple[CheckFinding, ...]
    streams: tuple[PairSpeed, ...] = ()
    time_s: float

    @property
    def unreached(self) -> tuple[str, ...]:
        """Nodes that did not answer."""
        return tuple(node.name for node in self.nodes if not node.reached)


def check_cluster(
    agent: AgentTransport,
    cluster: Cluster,
    job: Job | None,
    options: CheckOptions,
    say: Callable[[str], None] = lambda _: None,
) -> CheckReport:
    """Check the nodes, and the job if given. Never raises because of a node; that is a finding."""
    began = time.monotonic()
    say(f"probing {len(cluster.nodes)} nodes")
    run_id, asked = make_run_id(), options.launch.master_port
    outcomes = probe(agent, cluster, _questions(cluster, job, options, candidate_ports(run_id, asked)))
    facts = {outcome.node.name: outcome.value for outcome in outcomes if outcome.error is None}
    launch = options.launch
    accelerate = launch.engine.accelerate if launch.engine is not None else {}
    inspection = Inspection(
        cluster=cluster,
        facts=facts,
        job=with_accelerate(job, accelerate) if job is not None else None,
        workers=launch.workers_per_node,
        master_port=choose_master_port(run_id, asked, facts.get(cluster.nodes[0].name)),
        environment=launch.environment,
        controller_cwd=str(Path.cwd()),
        code=launch.code,
        absent_here=absent_files(job_files(job).needed),
    )
    inspection, findings = _inspect_network(agent, inspection, options, say)
    reached = [outcome.node for outcome in outcomes if outcome.error is None]
    findings = [
        *check_ssh(outcomes.errors),
        *check_host_keys(agent, reached),
        *findings,
        *concerning(check_all(inspection), cluster, launch),
    ]
    if job is not None and not any(finding.severity == "error" for finding in findings):
        findings += _check_plan(inspection, job, launch)
    return CheckReport(
        ok=not any(finding.severity == "error" for finding in findings),
        nodes=tuple(_checked(inspection, index) for index in range(len(cluster.nodes))),
        findings=tuple(_reachable(one, cluster) for one in sort_findings(findings)),
        streams=inspection.connectivity.streams,
        time_s=time.monotonic() - began,
    )


def _reachable(finding: CheckFinding, cluster: Cluster) -> CheckFinding:
    return msgspec.structs.replace(finding, hint=as_steps(finding.hint, cluster.nodes)) if finding.hint else finding


def _check_plan(inspection: Inspection, job: Job, options: LaunchOptions) -> list[CheckFinding]:
    try:
        plan_launch(inspection.cluster, job, inspection.facts, "check", options)
    except UsageError as error:
        return [finding_of_error("training", error)]
    return []


def _questions(cluster: Cluster, job: Job | None, options: CheckOptions, ports: tuple[int, ...]) -> Questions:
    code = options.launch.code
    files = job_files(job, code)
    return Questions(
        controller_cwd=str(Path.cwd()),
        peers=peer_addresses(cluster.nodes),
        paths=(*files.looked_at, *(may_be_paths(job) if code is not None else ())),
        ports=ports,
        tools=needed_tools(job) or ("torchrun",),
        contents=files.compared,
        datasets=files.datasets,
        model=files.model,
        arguments=argument_names(job, cluster, options.launch),
    )


def _inspect_network(
    agent: AgentTransport, inspection: Inspection, options: CheckOptions, say: Callable[[str], None]
) -> tuple[Inspection, list[CheckFinding]]:
    nodes = tuple(node for node, _ in inspection.known)
    if not nodes:
        return inspection, []
    try:
        places = choose_endpoints(msgspec.structs.replace(inspection.cluster, nodes=nodes), inspection.facts)
    except UsageError as error:
        return inspection, [finding_of_error("interface", error)]
    endpoints = {node.name: place for node, place in zip(nodes, places, strict=True)}
    inspection = msgspec.structs.replace(inspection, endpoints=endpoints)
    addresses = {name: place.addr for name, place in endpoints.items() if place.addr is not None}
    # A call over a NIC without a link times out; the check of the link reports it.
    down = {node.name for node, interface in inspection.links if not interface.up}
    present = [node for node in nodes if node.name in addresses and node.name not in down]
    if len(present) < 2:  # noqa: PLR2004 - a network needs two
        return inspection, []
    say(f"connecting {len(present)} nodes with each other")
    # A stream would take bandwidth from a run in progress.
    is_busy = any(process.supervised for found in inspection.facts.values() for process in found.run_processes)
    by_default = len(present) <= _STREAMS_NODES and not is_busy
    bandwidth = by_default if options.bandwidth is None else options.bandwidth
    plan = ConnectivityPlan(
        pairs=choose_pairs([node.name for node in present], random.Random()),  # noqa: S311 - no secret
        master_port=inspection.master_port,
        stream_s=_STREAM_S if bandwidth else None,
        least_gbit_per_s=least_speeds(inspection),
    )
    connectivity, errors = run_connectivity_test(agent, present, addresses, plan, say)
    findings = [finding_of_error("ssh" if isinstance(error, NodeError) else "ports", error) for error in errors]
    return msgspec.structs.replace(inspection, connectivity=connectivity), findings


def _checked(inspection: Inspection, index: int) -> CheckedNode:
    name = inspection.cluster.nodes[index].name
    found = inspection.facts.get(name)
    place = inspection.place(name)
    return CheckedNode(
        name=name,
        node_rank=index,
        reached=found is not None,
        addr=place.addr,
        ifname=place.ifname,
        link_gbit_per_s=place.link_gbit_per_s,
        python=found.python if found else None,
        packages=found.packages if found else {},
    )
