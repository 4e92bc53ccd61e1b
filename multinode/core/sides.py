"""plan_sides: which workers the two sides of a contrast have, and why. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from multinode.core.cluster import Cluster, Node
from multinode.errors import UsageError

__all__ = ["MODES", "Sides", "plan_sides"]

MODES = ("same-workers", "scale-out")


class Sides(msgspec.Struct, frozen=True, kw_only=True):
    """The two sides.

    Attributes:
        mode: `same-workers` or `scale-out`.
        why: why this one.
        baseline: node 0 alone; `baseline_workers` on it.
        candidate: all nodes; `candidate_workers` on each.
    """

    mode: str
    why: str
    baseline: Cluster
    baseline_workers: int
    candidate: Cluster
    candidate_workers: int


def plan_sides(
    cluster: Cluster, slots: Sequence[int], mode: str | None, baseline_gpus: tuple[int, ...] | None
) -> Sides:
    """Choose the sides; `slots` are the workers that each node can have.

    Same workers where the user names node 0's GPUs for it, or node 0 can hold as many workers as there are nodes;
    otherwise each node full.

    Raises:
        UsageError: fewer than two nodes, an unknown mode, or same workers asked for where node 0 has too few slots.
    """
    if len(cluster.nodes) < 2:  # noqa: PLR2004 - one against many
        raise UsageError("a contrast needs two nodes or more, and the hostfile has one")
    if mode is not None and mode not in MODES:
        raise UsageError(f"unknown mode {mode!r}", hint=f"one of {', '.join(MODES)}")
    if baseline_gpus is not None and mode != "scale-out":
        return _named(cluster, slots, baseline_gpus)
    shared = min(slots[0] // len(cluster.nodes), *slots)
    if mode != "scale-out" and shared >= 1:
        return Sides(
            mode="same-workers",
            why=f"node 0 has {slots[0]} slots, enough for the workers of all {len(cluster.nodes)} nodes",
            baseline=cluster.first(1),
            baseline_workers=shared * len(cluster.nodes),
            candidate=cluster,
            candidate_workers=shared,
        )
    few = f"node 0 has slots={slots[0]}, too few for one worker of each of the {len(cluster.nodes)} nodes"
    if mode == "same-workers":
        raise UsageError(few, hint="--baseline-gpus names node 0's GPUs for the baseline; or --mode scale-out")
    return Sides(
        mode="scale-out",
        why="asked for with --mode" if mode else few,
        baseline=cluster.first(1),
        baseline_workers=slots[0],
        candidate=cluster,
        candidate_workers=min(slots),
    )


def _named(cluster: Cluster, slots: Sequence[int], gpus: tuple[int, ...]) -> Sides:
    workers = min(slots)
    if len(gpus) != workers * len(cluster.nodes):
        raise UsageError(
            f"--baseline-gpus names {len(gpus)} GPUs, and all nodes have {workers * len(cluster.nodes)} workers",
            hint="name as many as all nodes have together",
        )
    first: Node = msgspec.structs.replace(cluster.nodes[0], gpus=gpus, slots=len(gpus))
    return Sides(
        mode="same-workers",
        why=f"--baseline-gpus names {len(gpus)} GPUs of node 0",
        baseline=msgspec.structs.replace(cluster, nodes=(first,)),
        baseline_workers=len(gpus),
        candidate=cluster,
        candidate_workers=workers,
    )
