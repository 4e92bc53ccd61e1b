"""Devices of a run: what the workers of each node compute on, by name. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from multinode.cluster.facts import NodeFacts
from multinode.records.plan import LaunchPlan, NodePlan
from multinode.stats.unknown import or_empty, or_none

_CPU = "CPU"
_LONGEST = 80


def devices_of(plan: LaunchPlan, facts: Mapping[str, NodeFacts]) -> tuple[dict[str, int], ...]:
    """Of each node, how many workers compute on which device, by its name; nothing where a node does not tell.

    Args:
        plan: of the run.
        facts: by the node's name.
    """
    names_of = [_names(node, facts.get(node.place.node)) for node in plan.nodes]
    known_names = [names for names in names_of if names is not None]
    return tuple(dict(Counter(names)) for names in known_names) if len(known_names) == len(names_of) else ()


def _names(node: NodePlan, facts: NodeFacts | None) -> list[str] | None:
    if facts is None:
        return None
    if not node.gpus:
        return [_one_line(or_none(facts.processor) or "") or _CPU] * len(node.place.ranks)
    listed = {gpu.index: _one_line(gpu.name) for gpu in or_empty(facts.gpus)}
    names = [listed[index] for index in node.gpus if listed.get(index)]
    return names if len(names) == len(node.gpus) else None


def _one_line(name: str) -> str:
    return " ".join(name.split())[:_LONGEST].strip()
