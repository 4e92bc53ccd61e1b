"""devices_of, device_of: what the workers of a run compute on, by the plan's GPUs and the nodes' facts. Pure.

Workers without GPUs compute on their node's processors; where the node does not name those, they are `CPU`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from multinode.core.cluster.facts import NodeFacts
from multinode.core.run.plan import LaunchPlan, NodePlan

__all__ = ["device_of", "devices_of"]

_CPU = "CPU"
_LONGEST = 80


def devices_of(plan: LaunchPlan, facts: Mapping[str, NodeFacts]) -> tuple[dict[str, int], ...]:
    """Of each node, how many workers compute on which device, by its name; nothing where a node does not tell.

    Args:
        plan: of the run.
        facts: by the node's name.
    """
    told = [_names(node, facts.get(node.node)) for node in plan.nodes]
    known = [names for names in told if names is not None]
    return tuple(dict(Counter(names)) for names in known) if len(known) == len(told) else ()


def device_of(devices: Sequence[Mapping[str, int]]) -> str | None:
    """The name of the device, of different ones how many of each; None where no node tells.

    Args:
        devices: of each node.
    """
    counts: Counter[str] = Counter()
    for names in devices:
        counts.update(names)
    if len(counts) == 1:
        return next(iter(counts))
    return " + ".join(f"{count} x {name}" for name, count in counts.items()) or None


def _names(node: NodePlan, found: NodeFacts | None) -> list[str] | None:
    """One a worker."""
    if found is None:
        return None
    if not node.gpus:
        return [_one_line(found.processor or "") or _CPU] * len(node.ranks)
    listed = {gpu.index: _one_line(gpu.name) for gpu in found.gpus}
    names = [listed[index] for index in node.gpus if listed.get(index)]
    return names if len(names) == len(node.gpus) else None


def _one_line(name: str) -> str:
    """A node may say anything."""
    return " ".join(name.split())[:_LONGEST].strip()
