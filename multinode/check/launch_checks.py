"""The checks before a launch: those whose failure would make it hang or fail."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from multinode.check.catalogue import CHECKS, check_all, sort_findings
from multinode.check.connection_test import ConnectivityPlan, run_connectivity_test
from multinode.check.connectivity import launch_pairs
from multinode.check.inspection import Inspection
from multinode.check.rule import CheckFinding
from multinode.cluster.cluster import Cluster
from multinode.errors import NodeFailed
from multinode.job.planning import LaunchOptions
from multinode.transport.agent import AgentTransport

_EPHEMERAL_PORTS = 2
# Checks of the interpreter that was found before the job starts.
_SOFTWARE = frozenset({"interpreter", "packages", "versions"})
# Looks whether the job's files are there.
_FILES = "paths"


def check_launch(inspection: Inspection) -> tuple[CheckFinding, ...]:
    """The findings of the checks before a launch."""
    return sort_findings(check_all(inspection, before_launch=True))


def check_connectivity(inspection: Inspection) -> tuple[CheckFinding, ...]:
    """Those of them that judge the connections between nodes."""
    return sort_findings(finding for check in CHECKS if check.judges_meeting for finding in check(inspection))


def with_connectivity(agent: AgentTransport, inspection: Inspection) -> Inspection:
    """The same after the nodes have connected to node 0 and their neighbors.

    Raises:
        NodeError, NodeFailed: a node could not be asked.
    """
    nodes = inspection.cluster.nodes
    plan = ConnectivityPlan(
        pairs=launch_pairs([node.name for node in nodes]),
        master_port=inspection.master_port,
        ephemeral=_EPHEMERAL_PORTS,
    )
    addresses = {name: place.addr for name, place in inspection.endpoints.items() if place.addr is not None}
    connectivity, errors = run_connectivity_test(agent, nodes, addresses, plan)
    for error in errors:
        raise error
    return msgspec.structs.replace(inspection, connectivity=connectivity)


def concerning(findings: Iterable[CheckFinding], cluster: Cluster, options: LaunchOptions) -> tuple[CheckFinding, ...]:
    """Those that concern the job: its setup may provide interpreter and files, and a program needs none."""
    names = {node.name for node in cluster.nodes}
    # Nodes for which the job's files, and its interpreter, are unknown.
    files, software = set[str](), set[str]()
    if options.engine is not None and options.engine.name == "exec":
        files = software = names
    elif options.environment.prelude is not None:
        files, software = names, {node.name for node in cluster.nodes if node.python is None}
    return tuple(
        one
        for one in findings
        if not ((one.code == _FILES and one.node in files) or (one.code in _SOFTWARE and one.node in software))
    )


def raise_first_error(findings: Iterable[CheckFinding]) -> None:
    """Stop at the first finding that would break the run; the others are in its detail.

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
        hint=first.hint and first.hint.split("\n"),
        detail="\n".join(f"also {finding.node}: {finding.message}" for finding in others),
    )
