"""The checks that a launch runs first: those whose failure would leave it hanging or dead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from multinode.core.cluster import Cluster
from multinode.core.collective_test import CollectiveTest
from multinode.core.facts import NodeFacts
from multinode.core.finding import Finding
from multinode.core.job import Job
from multinode.errors import NodeFailed
from multinode.preflight.checks import (
    check_backend,
    check_interpreter,
    check_packages,
    check_port,
    check_port_free,
    check_workdir,
)
from multinode.preflight.connect import probe_port
from multinode.transport.agent import AgentTransport

__all__ = ["check_before_launch", "check_rendezvous", "raise_first_error"]


def check_before_launch(
    cluster: Cluster, facts: Mapping[str, NodeFacts], job: Job | CollectiveTest, master_port: int
) -> Iterator[Finding]:
    """What the facts alone tell."""
    yield from check_interpreter(cluster, facts)
    yield from check_packages(cluster, facts, job)
    yield from check_backend(cluster, facts, job)
    yield from check_workdir(cluster, facts)
    yield from check_port_free(cluster, facts, master_port)


def check_rendezvous(agent: AgentTransport, cluster: Cluster, addr: str, port: int) -> Iterator[Finding]:
    """Whether the other nodes reach MASTER_PORT on node 0: a listener there, a connection from each.

    Raises:
        NodeError, NodeFailed: a node could not be asked.
    """
    listening, answers = probe_port(agent, cluster, addr, port)
    reached = {outcome.node.name: outcome.value for outcome in answers}
    yield from check_port(cluster, port, listening, reached)


def raise_first_error(findings: Iterable[Finding]) -> None:
    """Stop at the first finding that would break the run; the others stand in its detail.

    Raises:
        NodeFailed: there is one.
    """
    errors = [finding for finding in findings if finding.severity == "error"]
    if not errors:
        return
    first, *others = errors
    raise NodeFailed(
        first.message,
        node=first.node,
        hint=first.hint,
        detail="\n".join(f"also {finding.node}: {finding.message}" for finding in others),
    )
