"""check: ask every node, prove the connections, judge. Reports on the others when one cannot be reached."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from multinode.analyse.nccl_test.pair_speeds import PairSpeed
from multinode.core.check.finding import Finding
from multinode.core.cluster.cluster import Cluster
from multinode.core.cluster.dataplane import choose_endpoints
from multinode.core.job.job import Job, argument_keys
from multinode.core.run.job_files import job_files
from multinode.errors import MultinodeError, NodeError, UsageError
from multinode.lab.cluster import refresh_lab
from multinode.preflight.catalogue import CHECK_NAMES, check_all, sort_findings
from multinode.preflight.checks.link import least_speeds
from multinode.preflight.checks.software import needed_tools
from multinode.preflight.inspection import Inspection
from multinode.preflight.network.meeting import choose_pairs
from multinode.preflight.network.reach import Agenda, hold_meeting
from multinode.preflight.probe import Questions, check_ssh, peer_addresses, probe
from multinode.transport.agent import AgentTransport

__all__ = ["CheckOptions", "CheckReport", "CheckedNode", "check_cluster"]

# Up to so many nodes a short stream between all pairs takes seconds; above that it is made on request.
_STREAMS_NODES = 8
_STREAM_S = 0.3


class CheckOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How nodes are checked.

    Attributes:
        bandwidth: whether nodes stream to each other; None does where they are few.
    """

    master_port: int = 29500
    bandwidth: bool | None = None


class CheckedNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node, as checked.

    Attributes:
        addr: its data-plane address, where it could be found; likewise `ifname` and `link_gbit_per_s`.
    """

    name: str
    node_rank: int
    reached: bool
    addr: str | None = None
    ifname: str | None = None
    link_gbit_per_s: float | None = None
    python: str | None = None
    packages: dict[str, str] = {}


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `check --json` prints.

    Attributes:
        streams: the short TCP streams between the nodes, in Gbit/s of payload.
    """

    schema: str = "multinode.check/1"
    ok: bool
    nodes: tuple[CheckedNode, ...]
    checks: tuple[str, ...] = CHECK_NAMES
    findings: tuple[Finding, ...]
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
    """Check the nodes, and the job on them where there is one. Never raises for what a node does; it is a finding."""
    began = time.monotonic()
    refresh_lab(cluster)
    say(f"probing {len(cluster.nodes)} nodes")
    outcomes = probe(agent, cluster, _questions(cluster, job, options))
    facts = {outcome.node.name: outcome.value for outcome in outcomes if outcome.error is None}
    inspection = Inspection(cluster=cluster, facts=facts, job=job, master_port=options.master_port)
    inspection, findings = _inspect_network(agent, inspection, options, say)
    findings = [*check_ssh(outcomes.errors), *findings, *check_all(inspection)]
    return CheckReport(
        ok=not any(finding.severity == "error" for finding in findings),
        nodes=tuple(_checked(inspection, index) for index in range(len(cluster.nodes))),
        findings=sort_findings(findings),
        streams=inspection.meeting.streams,
        time_s=time.monotonic() - began,
    )


def _questions(cluster: Cluster, job: Job | None, options: CheckOptions) -> Questions:
    files = job_files(job)
    return Questions(
        controller_cwd=str(Path.cwd()),
        peers=peer_addresses(cluster.nodes),
        paths=files.looked_at,
        ports=(options.master_port,),
        tools=needed_tools(job) or ("torchrun",),
        contents=files.compared,
        datasets=files.datasets,
        model=files.model,
        arguments=argument_keys(job, variables=(name for node in cluster.nodes for name in node.env)),
    )


def _inspect_network(
    agent: AgentTransport, inspection: Inspection, options: CheckOptions, say: Callable[[str], None]
) -> tuple[Inspection, list[Finding]]:
    """The data plane of the nodes that answered, and what came of their connections."""
    nodes = tuple(node for node, _ in inspection.known)
    if not nodes:
        return inspection, []
    try:
        places = choose_endpoints(msgspec.structs.replace(inspection.cluster, nodes=nodes), inspection.facts)
    except UsageError as error:
        return inspection, [_finding("interface", error)]
    endpoints = {node.name: place for node, place in zip(nodes, places, strict=True)}
    inspection = msgspec.structs.replace(inspection, endpoints=endpoints)
    addresses = {name: place.addr for name, place in endpoints.items() if place.addr is not None}
    # What calls at a card without a link ends at its deadline; the check of the link tells of it.
    down = {node.name for node, interface in inspection.links if not interface.up}
    present = [node for node in nodes if node.name in addresses and node.name not in down]
    if len(present) < 2:  # noqa: PLR2004 - a network needs two
        return inspection, []
    say(f"connecting {len(present)} nodes with each other")
    bandwidth = len(present) <= _STREAMS_NODES if options.bandwidth is None else options.bandwidth
    agenda = Agenda(
        pairs=choose_pairs([node.name for node in present], random.Random()),  # noqa: S311 - no secret
        master_port=options.master_port,
        stream_s=_STREAM_S if bandwidth else None,
        least_gbit_per_s=least_speeds(inspection),
    )
    meeting, errors = hold_meeting(agent, present, addresses, agenda, say)
    findings = [_finding("ssh" if isinstance(error, NodeError) else "ports", error) for error in errors]
    return msgspec.structs.replace(inspection, meeting=meeting), findings


def _finding(check: str, error: MultinodeError) -> Finding:
    return Finding(severity="error", node=error.node, check=check, message=error.message, hint=error.hint)


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
