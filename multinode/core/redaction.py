"""redact_plan: a plan as it may be stored and shown, with the values of secrets gone."""

from __future__ import annotations

import msgspec

from multinode.core.command import REDACTED, is_secret
from multinode.core.plan import LaunchPlan, NodePlan

__all__ = ["redact_plan"]


def redact_plan(plan: LaunchPlan) -> LaunchPlan:
    """The same plan without the values of variables that look like secrets."""
    return msgspec.structs.replace(plan, nodes=tuple(_redact_node(node) for node in plan.nodes))


def _redact_node(node: NodePlan) -> NodePlan:
    env = {name: REDACTED if is_secret(name) else value for name, value in node.command.env.items()}
    return msgspec.structs.replace(node, command=msgspec.structs.replace(node.command, env=env))
