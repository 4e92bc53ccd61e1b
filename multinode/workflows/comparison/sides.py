"""plan_sides: which nodes and workers the sides of a contrast have, and why; and the order of measuring them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from multinode.core.cluster.cluster import Cluster, Node
from multinode.errors import UsageError
from multinode.units import format_count

__all__ = ["MODES", "PlannedSide", "Sides", "Wish", "interleaved", "plan_sides"]

MODES = ("same-workers", "scale-out", "fixed-global-batch")


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asks of a contrast.

    Attributes:
        mode: one of MODES; None chooses.
        counts: numbers of nodes to measure, of the first ones of the hostfile; empty takes one and all.
        each_node: whether each node is measured alone as well.
        baseline_gpus: GPUs of node 0 for the baseline, as many as all nodes use together.
        accumulation: micro-batches a step that the job asks for; None where that is not known.
    """

    mode: str | None = None
    counts: tuple[int, ...] = ()
    each_node: bool = False
    baseline_gpus: tuple[int, ...] | None = None
    accumulation: int | None = None


class PlannedSide(msgspec.Struct, frozen=True, kw_only=True):
    """One side, before it is measured.

    Attributes:
        role: `baseline`, `candidate`, `point` or `each-node`, as the measured side has it.
        label: its name, unique among the sides; ends its runs' ids.
        cluster: its nodes.
        workers: on each of them.
        accumulation: micro-batches a step that it is to make; None leaves the job's own.
    """

    role: str
    label: str
    cluster: Cluster
    workers: int
    accumulation: int | None = None

    @property
    def description(self) -> str:
        """In a few words."""
        workers = format_count(self.workers, "worker")
        nodes = self.cluster.nodes
        where = f"on {nodes[0].name}" if len(nodes) == 1 else f"on each of {len(nodes)} nodes"
        steps = f", {self.accumulation} micro-batches a step" if self.accumulation is not None else ""
        return f"{workers} {where}{steps}"


class Sides(msgspec.Struct, frozen=True, kw_only=True):
    """The sides of a contrast.

    Attributes:
        mode: one of MODES.
        why: why this one.
        sides: the baseline first, the candidate after it, then the others.
    """

    mode: str
    why: str
    sides: tuple[PlannedSide, ...]

    @property
    def baseline(self) -> PlannedSide:
        """The side with the fewest nodes."""
        return self.sides[0]

    @property
    def candidate(self) -> PlannedSide:
        """The side with the most."""
        return self.sides[1]


def plan_sides(cluster: Cluster, slots: Sequence[int], wish: Wish) -> Sides:
    """Choose the sides; `slots` are the workers that each node can have.

    Same workers where the user names node 0's GPUs for it, or the fewest nodes can hold as many workers as the most;
    otherwise each node full.

    Raises:
        UsageError: fewer than two nodes, an unknown mode, or one that these nodes, slots or the job do not allow.
    """
    if wish.mode is not None and wish.mode not in MODES:
        raise UsageError(f"unknown mode {wish.mode!r}", hint=f"one of {', '.join(MODES)}")
    counts = _counts(cluster, wish)
    if wish.baseline_gpus is not None:
        if wish.mode not in {None, "same-workers"}:
            raise UsageError(f"--baseline-gpus is for the same workers, and --mode {wish.mode} fills every node")
        cluster_of, workers, why = _named(cluster, slots, wish.baseline_gpus, counts)
        mode = "same-workers"
    else:
        cluster_of = {count: cluster.first(count) for count in counts}
        mode, workers, why = _choose(slots, counts, wish.mode)
    accumulation = _accumulations(counts, workers, wish.accumulation) if mode == "fixed-global-batch" else {}
    order = (counts[0], counts[-1], *counts[1:-1])
    sides = [
        PlannedSide(
            role={counts[0]: "baseline", counts[-1]: "candidate"}.get(count, "point"),
            label={counts[0]: "baseline", counts[-1]: "candidate"}.get(count, f"{count}-nodes"),
            cluster=cluster_of[count],
            workers=workers[count],
            accumulation=accumulation.get(count),
        )
        for count in order
    ]
    if wish.each_node:
        sides += _each_alone(cluster.first(counts[-1]), slots[: counts[-1]], sides[0])
    return Sides(mode=mode, why=why, sides=tuple(sides))


def interleaved(sides: Sequence[PlannedSide], repeats: int) -> Iterator[tuple[int, PlannedSide]]:
    """Every side so many times, each turn in the opposite order of the one before: what drifts hits all alike.

    Yields:
        The number of the turn, from 1, and the side.
    """
    for turn in range(1, repeats + 1):
        for side in sides if turn % 2 else reversed(sides):
            yield turn, side


def _counts(cluster: Cluster, wish: Wish) -> tuple[int, ...]:
    """The numbers of nodes, ascending, at least two of them."""
    there = len(cluster.nodes)
    counts = tuple(sorted({1, *wish.counts} if len(set(wish.counts)) == 1 else set(wish.counts or (1, there))))
    if there < 2:  # noqa: PLR2004 - one against many
        raise UsageError("a contrast needs two nodes or more, and the hostfile has one")
    if counts[0] < 1 or counts[-1] > there:
        raise UsageError(f"--nodes {','.join(map(str, wish.counts))}: {cluster.source} has {there} nodes")
    if len(counts) == 1:
        raise UsageError("--nodes 1 is one node, and a contrast needs another side", hint="--nodes 1,2")
    return counts


def _choose(slots: Sequence[int], counts: Sequence[int], mode: str | None) -> tuple[str, dict[int, int], str]:
    """Mode, workers on each node by number of nodes, and why."""
    most = counts[-1]
    shared = _shared_total(slots, counts)
    if mode in {None, "same-workers"} and shared:
        where = "node 0 has" if counts[0] == 1 else f"the first {counts[0]} nodes have"
        why = f"{where} {sum(slots[: counts[0]])} slots, enough for the workers of all {most} nodes"
        return "same-workers", {count: shared // count for count in counts}, why
    few = _why_not_shared(slots, counts)
    if mode == "same-workers":
        raise UsageError(few, hint="--baseline-gpus names node 0's GPUs for the baseline; or --mode scale-out")
    full = {count: min(slots[:count]) for count in counts}
    return mode or "scale-out", full, "asked for with --mode" if mode else few


def _why_not_shared(slots: Sequence[int], counts: Sequence[int]) -> str:
    least, most = counts[0], counts[-1]
    if least * min(slots[:least]) >= most:
        numbers = " and ".join(", ".join(map(str, counts)).rsplit(", ", 1))
        return f"no number of workers that these nodes can have divides among {numbers} nodes"
    where = f"node 0 has slots={slots[0]}" if least == 1 else f"the first {least} nodes have {sum(slots[:least])} slots"
    return f"{where}, too few for one worker of each of the {most} nodes"


def _shared_total(slots: Sequence[int], counts: Sequence[int]) -> int:
    """The most workers that can be spread evenly over each of these numbers of nodes; 0 where none can."""
    least, most = counts[0], counts[-1]
    for total in range(least * min(slots[:least]), most - 1, -1):
        if all(total % count == 0 and total // count <= min(slots[:count]) for count in counts):
            return total
    return 0


def _accumulations(counts: Sequence[int], workers: dict[int, int], accumulation: int | None) -> dict[int, int]:
    """Micro-batches a step of each side, so that a step has as many as the job makes of it on the most nodes."""
    if accumulation is None:
        raise UsageError(
            "the global batch of a script is not known, nor is it multinode's to change",
            hint="--mode scale-out compares at the same batch a worker",
        )
    most = counts[-1]
    total = accumulation * most * workers[most]
    for count in counts:
        if total % (count * workers[count]):
            raise UsageError(
                f"{total} micro-batches a step do not divide among {count * workers[count]} workers",
                hint=f"--set gradient_accumulation_steps={accumulation * count * workers[count]}",
            )
    return {count: total // (count * workers[count]) for count in counts}


def _each_alone(cluster: Cluster, slots: Sequence[int], baseline: PlannedSide) -> list[PlannedSide]:
    """Each node alone with as many workers as the baseline has; one that is the baseline already is left out."""
    alone = len(baseline.cluster.nodes) == 1
    workers = min(baseline.workers, *slots)
    if alone and workers < baseline.workers:
        raise UsageError(
            f"each node alone needs {baseline.workers} workers as on {baseline.cluster.nodes[0].name}, and one has "
            f"slots={min(slots)}",
            hint="--mode scale-out gives each node as many as the smallest has",
        )
    nodes: Sequence[Node] = cluster.nodes[1:] if alone else cluster.nodes
    return [
        PlannedSide(
            role="each-node",
            label=f"alone-{rank}",
            cluster=msgspec.structs.replace(cluster, nodes=(node,)),
            workers=workers,
            accumulation=baseline.accumulation,
        )
        for rank, node in enumerate(nodes, len(cluster.nodes) - len(nodes))
    ]


def _named(
    cluster: Cluster, slots: Sequence[int], gpus: tuple[int, ...], counts: Sequence[int]
) -> tuple[dict[int, Cluster], dict[int, int], str]:
    """Clusters and workers by number of nodes where node 0's GPUs are named for the baseline."""
    if counts[0] != 1 or len(counts) != 2:  # noqa: PLR2004 - one against many
        raise UsageError("--baseline-gpus is of one node against many", hint="leave --nodes out, or name one number")
    most = counts[-1]
    workers = min(slots[:most])
    if len(set(gpus)) != len(gpus):
        raise UsageError("--baseline-gpus names a GPU twice", hint="each GPU has one worker")
    if len(gpus) != workers * most:
        raise UsageError(
            f"--baseline-gpus names {len(gpus)} GPUs, and all nodes have {workers * most} workers",
            hint="name as many as all nodes have together",
        )
    first: Node = msgspec.structs.replace(cluster.nodes[0], gpus=gpus, slots=len(gpus))
    clusters = {1: msgspec.structs.replace(cluster, nodes=(first,)), most: cluster.first(most)}
    return clusters, {1: len(gpus), most: workers}, f"--baseline-gpus names {len(gpus)} GPUs of node 0"
