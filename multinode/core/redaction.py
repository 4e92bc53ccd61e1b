"""Plans and clusters as they may be stored and shown, with the values of secrets gone."""

from __future__ import annotations

import msgspec

from multinode.core.cluster import Cluster
from multinode.core.command import REDACTED, is_secret, shown_environment
from multinode.core.plan import LaunchPlan, NodePlan

__all__ = ["redact_cluster", "redact_plan"]


def redact_plan(plan: LaunchPlan) -> LaunchPlan:
    """The same plan without the values of variables that look like secrets, or that were forwarded."""
    return msgspec.structs.replace(plan, nodes=tuple(_redact_node(node) for node in plan.nodes))


def redact_cluster(cluster: Cluster) -> Cluster:
    """The same cluster without the values of variables that look like secrets."""
    nodes = tuple(msgspec.structs.replace(node, env=_redact(node.env)) for node in cluster.nodes)
    return msgspec.structs.replace(cluster, nodes=nodes)


def _redact_node(node: NodePlan) -> NodePlan:
    shown = msgspec.structs.replace(node.command, env=shown_environment(node.command))
    return msgspec.structs.replace(node, command=shown)


def _redact(env: dict[str, str]) -> dict[str, str]:
    return {name: REDACTED if is_secret(name) else value for name, value in env.items()}
