"""Plans and clusters as they may be stored and shown, with the values of secrets gone."""

from __future__ import annotations

import msgspec

from multinode.core.cluster.cluster import Cluster
from multinode.core.run.command import shown_environment
from multinode.core.run.plan import LaunchPlan, NodePlan, PlanFile
from multinode.core.text.secret_values import redact, redact_file
from multinode.decoding import convert

__all__ = ["redact_cluster", "redact_plan"]


def redact_plan(plan: LaunchPlan) -> LaunchPlan:
    """The same plan without secrets: in variables, arguments, prelude and files, and what was forwarded."""
    shown = msgspec.structs.replace(plan, nodes=tuple(_redact_node(node) for node in plan.nodes))
    return convert(redact(msgspec.to_builtins(shown)), LaunchPlan)


def redact_cluster(cluster: Cluster) -> Cluster:
    """The same cluster without the values of variables that look like secrets."""
    nodes = tuple(msgspec.structs.replace(node, env=redact(node.env)) for node in cluster.nodes)
    return msgspec.structs.replace(cluster, nodes=nodes)


def _redact_node(node: NodePlan) -> NodePlan:
    shown = msgspec.structs.replace(node.command, env=shown_environment(node.command))
    files = tuple(PlanFile(path=file.path, text=redact_file(file.text)) for file in node.files)
    return msgspec.structs.replace(node, command=shown, files=files)
