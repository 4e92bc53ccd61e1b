"""check: ask every node, judge the facts, prove the connections. Reports on the others when one cannot be reached."""

from __future__ import annotations

from pathlib import Path

import msgspec

from multinode.core.cluster import Cluster
from multinode.core.dataplane import choose_endpoints, route_notes
from multinode.core.facts import NodeFacts
from multinode.core.finding import Finding
from multinode.core.job import Job, LlamaFactoryJob, job_paths
from multinode.errors import MultinodeError, NodeError, UsageError
from multinode.preflight.checks import (
    check_interpreter,
    check_packages,
    check_paths,
    check_port_free,
    check_ssh,
    check_versions,
    check_workdir,
)
from multinode.preflight.launch_checks import check_rendezvous
from multinode.preflight.probe import Questions, peer_addresses, probe
from multinode.transport.agent import AgentTransport
from multinode.workflows.lab import refresh_lab

__all__ = ["CHECKS", "CheckReport", "CheckedNode", "check_cluster"]

# The columns of the matrix, in the order in which a person mends things.
CHECKS = ("ssh", "interpreter", "packages", "versions", "interface", "workdir", "paths", "master-port")


class CheckedNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node, as checked.

    Attributes:
        name: its name.
        node_rank: its node rank.
        reached: whether it answered.
        addr: its data-plane address, where it could be found; likewise `ifname`.
        python: the job's interpreter.
        packages: versions in the job's environment.
    """

    name: str
    node_rank: int
    reached: bool
    addr: str | None = None
    ifname: str | None = None
    python: str | None = None
    packages: dict[str, str] = {}


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `check --json` prints.

    Attributes:
        schema: `multinode.check/1`.
        ok: no finding is an error.
        nodes: in node-rank order.
        checks: the checks that were made.
        findings: errors first.
    """

    schema: str = "multinode.check/1"
    ok: bool
    nodes: tuple[CheckedNode, ...]
    checks: tuple[str, ...] = CHECKS
    findings: tuple[Finding, ...]

    @property
    def unreached(self) -> tuple[str, ...]:
        """Nodes that did not answer."""
        return tuple(node.name for node in self.nodes if not node.reached)


def check_cluster(agent: AgentTransport, cluster: Cluster, job: Job | None, master_port: int) -> CheckReport:
    """Check the nodes, and the job on them where there is one. Never raises for what a node does; it is a finding."""
    refresh_lab(cluster)
    questions = Questions(
        controller_cwd=str(Path.cwd()),
        peers=peer_addresses(cluster.nodes),
        paths=job_paths(job) if isinstance(job, LlamaFactoryJob) else (),
        ports=(master_port,),
    )
    outcomes = probe(agent, cluster, questions)
    facts = {outcome.node.name: outcome.value for outcome in outcomes if outcome.error is None}
    findings = [
        *check_ssh(outcomes.errors),
        *check_interpreter(cluster, facts),
        *(check_packages(cluster, facts, job) if job is not None else ()),
        *check_versions(cluster, facts),
        *check_workdir(cluster, facts),
        *check_paths(cluster, facts),
        *check_port_free(cluster, facts, master_port),
    ]
    reached = msgspec.structs.replace(cluster, nodes=tuple(node for node in cluster.nodes if node.name in facts))
    places, network = _check_network(agent, cluster, reached, facts, master_port)
    findings += network
    return CheckReport(
        ok=not any(finding.severity == "error" for finding in findings),
        nodes=tuple(_checked(cluster, index, facts, places) for index in range(len(cluster.nodes))),
        findings=tuple(
            sorted(_once(findings), key=lambda finding: ("error", "warning", "note").index(finding.severity))
        ),
    )


def _check_network(
    agent: AgentTransport, cluster: Cluster, reached: Cluster, facts: dict[str, NodeFacts], master_port: int
) -> tuple[dict[str, tuple[str | None, str | None]], list[Finding]]:
    """Each reached node's place on the data plane, and what stands in the way of the rendezvous."""
    if not reached.nodes:
        return {}, []
    try:
        endpoints = choose_endpoints(reached, facts)
    except UsageError as error:
        return {}, [
            Finding(severity="error", node=error.node, check="interface", message=error.message, hint=error.hint)
        ]
    places = {node.name: (place.addr, place.ifname) for node, place in zip(reached.nodes, endpoints, strict=True)}
    findings = [
        Finding(
            severity="warning", node=None, check="interface", message=note, hint="see: ip route get ADDRESS on the node"
        )
        for note in route_notes(reached, endpoints, facts)
    ]
    # Without node 0 there is nobody to listen, and a port that is in use has been reported with its user.
    port_taken = any(
        str(master_port) in found.port_users for name, found in facts.items() if name == cluster.nodes[0].name
    )
    if cluster.nodes[0].name in facts and len(reached.nodes) > 1 and endpoints[0].addr is not None and not port_taken:
        findings += _rendezvous(agent, reached, endpoints[0].addr, master_port)
    return places, findings


def _rendezvous(agent: AgentTransport, reached: Cluster, addr: str, port: int) -> list[Finding]:
    try:
        return list(check_rendezvous(agent, reached, addr, port))
    except MultinodeError as error:
        check = "ssh" if isinstance(error, NodeError) else "master-port"
        return [Finding(severity="error", node=error.node, check=check, message=error.message, hint=error.hint)]


def _checked(
    cluster: Cluster, index: int, facts: dict[str, NodeFacts], places: dict[str, tuple[str | None, str | None]]
) -> CheckedNode:
    name = cluster.nodes[index].name
    found = facts.get(name)
    addr, ifname = places.get(name, (None, None))
    return CheckedNode(
        name=name,
        node_rank=index,
        reached=found is not None,
        addr=addr,
        ifname=ifname,
        python=found.python if found else None,
        packages=found.packages if found else {},
    )


def _once(findings: list[Finding]) -> list[Finding]:
    return list(dict.fromkeys(findings))
