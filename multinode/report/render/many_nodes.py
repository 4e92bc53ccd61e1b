"""Many nodes in few rows: the worst first, the rest summed up. Pure; knows no table."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

import msgspec

from multinode.core.run.progress import NodeProgress

__all__ = ["Rest", "sum_up", "worst_first"]

# A state that needs a look comes before one that does not.
_STATES = ("lost", "stopping", "waiting", "starting", "ended", "running")


class Rest(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes that have no row of their own.

    Attributes:
        states: in a few words, `24 running, 1 ended`.
        step: the least of their steps.
        step_time_us: median of theirs; likewise None where none is known.
        samples_per_s: their sum; likewise the two network rates.
    """

    count: int
    states: str
    step: int | None
    step_time_us: float | None
    samples_per_s: float | None
    net_in_gbit_per_s: float | None
    net_out_gbit_per_s: float | None


def worst_first(nodes: Sequence[NodeProgress], most: int) -> tuple[tuple[NodeProgress, ...], tuple[NodeProgress, ...]]:
    """At most so many nodes to be shown, and the others; few nodes are all shown, in node-rank order."""
    if len(nodes) <= most:
        return tuple(nodes), ()
    ranked = sorted(nodes, key=_badness)
    return tuple(ranked[: most - 1]), tuple(ranked[most - 1 :])


def sum_up(nodes: Sequence[NodeProgress]) -> Rest:
    """The nodes as one."""
    states = Counter(node.state for node in nodes)
    steps = [node.step for node in nodes if node.step is not None]
    times = [node.step_time_us for node in nodes if node.step_time_us is not None]
    return Rest(
        count=len(nodes),
        states=", ".join(f"{states[state]} {state}" for state in _STATES if states[state]),
        step=min(steps, default=None),
        step_time_us=statistics.median(times) if times else None,
        samples_per_s=_sum([node.samples_per_s for node in nodes]),
        net_in_gbit_per_s=_sum([node.net_in_gbit_per_s for node in nodes]),
        net_out_gbit_per_s=_sum([node.net_out_gbit_per_s for node in nodes]),
    )


def _badness(node: NodeProgress) -> tuple[int, bool, int, float, int]:
    """Its state, whether it has something to say, how far behind it is, how slow; then its node rank."""
    state = _STATES.index(node.state) if node.state in _STATES else 0
    step = node.step if node.step is not None else -1
    return state, not node.message, step, -(node.step_time_us or 0.0), node.node_rank


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
