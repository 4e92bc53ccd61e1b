"""The checks that a launch makes first: those whose failure would leave it hanging or dead."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from multinode.core.check.finding import Finding
from multinode.errors import NodeFailed
from multinode.preflight.catalogue import CHECKS, check_all, sort_findings
from multinode.preflight.inspection import Inspection
from multinode.preflight.network.meeting import launch_pairs
from multinode.preflight.network.reach import Agenda, hold_meeting
from multinode.transport.agent import AgentTransport

__all__ = ["check_launch", "check_meeting", "raise_first_error", "with_meeting"]

_EPHEMERAL_PORTS = 2


def check_launch(inspection: Inspection) -> tuple[Finding, ...]:
    """What the checks find that a launch makes."""
    return sort_findings(check_all(inspection, before_launch=True))


def check_meeting(inspection: Inspection) -> tuple[Finding, ...]:
    """What those of them find that judge how the nodes reached each other."""
    return sort_findings(finding for check in CHECKS if check.judges_meeting for finding in check(inspection))


def with_meeting(agent: AgentTransport, inspection: Inspection) -> Inspection:
    """The same after the nodes have called at node 0 and at their neighbours.

    Raises:
        NodeError, NodeFailed: a node could not be asked.
    """
    nodes = inspection.cluster.nodes
    agenda = Agenda(
        pairs=launch_pairs([node.name for node in nodes]),
        master_port=inspection.master_port,
        ephemeral=_EPHEMERAL_PORTS,
    )
    addresses = {name: place.addr for name, place in inspection.endpoints.items() if place.addr is not None}
    meeting, errors = hold_meeting(agent, nodes, addresses, agenda)
    for error in errors:
        raise error
    return msgspec.structs.replace(inspection, meeting=meeting)


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
