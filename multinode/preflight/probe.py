"""probe: ask every node for its facts, in one round trip each. Judges nothing."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

import msgspec

from multinode.core.cluster import Cluster, Node
from multinode.core.facts import NodeFacts
from multinode.errors import NodeFailed
from multinode.transport.agent import AgentTransport
from multinode.transport.outcomes import Outcomes, gather

__all__ = ["PROBE_DEADLINE_S", "Questions", "peer_addresses", "probe"]

PROBE_DEADLINE_S = 30.0


class Questions(msgspec.Struct, frozen=True, kw_only=True):
    """What a probe asks beyond the node itself.

    Attributes:
        controller_cwd: directory to run in where the hostfile names none and the node has it too.
        peers: addresses to which routes are asked for.
        paths: paths of the job.
        ports: ports that node 0 should have free.
        packages: whether versions in the job's environment are read (it starts the job's interpreter).
    """

    controller_cwd: str | None = None
    peers: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    packages: bool = True


def probe(agent: AgentTransport, cluster: Cluster, questions: Questions) -> Outcomes[NodeFacts]:
    """The facts of every node, or why there are none, in node-rank order."""
    return gather(cluster.nodes, lambda node: _probe_node(agent, node, questions), deadline_s=PROBE_DEADLINE_S)


def peer_addresses(nodes: Sequence[Node]) -> tuple[str, ...]:
    """The data-plane addresses that the hostfile names."""
    return tuple(node.addr for node in nodes if node.addr is not None)


def _probe_node(agent: AgentTransport, node: Node, questions: Questions) -> NodeFacts:
    request = {
        "schema": 1,
        "python": node.python,
        "workdir": node.workdir,
        "controller_cwd": questions.controller_cwd,
        "peers": list(questions.peers),
        "paths": list(questions.paths),
        "ports": list(questions.ports),
        "packages": questions.packages,
    }
    record = agent.call(node, "probe", request, deadline_s=PROBE_DEADLINE_S)
    try:
        facts = msgspec.convert(record | {"node": node.name}, NodeFacts, strict=False)
        _check_addresses(facts)
    except (msgspec.ValidationError, ValueError) as error:
        raise NodeFailed(f"its facts cannot be read: {error}", node=node.name) from error
    return facts


def _check_addresses(facts: NodeFacts) -> None:
    """What planning will read as addresses are addresses."""
    for interface in facts.interfaces:
        for address in interface.addresses:
            ipaddress.ip_interface(address)
    if facts.ssh_address is not None:
        ipaddress.ip_address(facts.ssh_address)
