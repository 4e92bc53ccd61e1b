"""Bench drop: which nodes are slower while all workers measure than each of them alone, and why. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

from multinode.analyse.bench.bench_clues import Case, find_clues
from multinode.analyse.bench.bench_figures import BenchNode, BenchWorker, Drop
from multinode.analyse.bench.bench_slow import BEYOND_CHANCE, SLOW_BELOW, because, error_of, name_nodes
from multinode.analyse.steps.stragglers import Clue

__all__ = ["find_drops"]

_FULL_PERCENT = 90
# Of the cores that a worker may run on: who has fewer of them, while all of the node are busy, shares them.
_SHARED_BELOW = 0.8


class _Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that is slower than alone."""

    node: str
    ratio: float  # Median over its tests of the speed together over that alone.
    clues: tuple[Clue, ...]


def find_drops(nodes: Sequence[BenchNode]) -> tuple[Drop, ...]:
    """Those nodes; the ones with the same cause are named together."""
    by_cause: dict[str, list[_Dropped]] = {}
    for node in nodes:
        for worker in node.workers:
            ratio = _ratio(worker)
            if ratio is not None:
                clues = _clues(node, worker, alone=sum(len(one.workers) for one in nodes) == 1)
                cause = clues[0].cause if clues else "unknown"
                by_cause.setdefault(cause, []).append(_Dropped(node=node.node, ratio=ratio, clues=clues))
    return tuple(_drop(cause, members) for cause, members in by_cause.items())


def _ratio(worker: BenchWorker) -> float | None:
    """None where it is no drop."""
    pairs = [(test.together, test.alone) for test in worker.tests]
    known = [(late, early) for late, early in pairs if late is not None and early is not None]
    if not known:
        return None
    ratio = statistics.median(late.value / early.value for late, early in known)
    scatter = statistics.median(math.hypot(error_of(late), error_of(early)) for late, early in known)
    return ratio if ratio < SLOW_BELOW and 1 - ratio > BEYOND_CHANCE * scatter else None


def _clues(node: BenchNode, worker: BenchWorker, *, alone: bool) -> tuple[Clue, ...]:
    case = Case(
        node=node.node,
        me=worker,
        phase="together",
        they="the same device alone",
        peers=(worker,),
        peer_phase="alone",
    )
    shared = None if alone else _shared(node.node, worker)
    found = find_clues(case)
    # The other nodes' workers are those other processes.
    return found if shared is None else (shared, *(clue for clue in found if clue.cause != "other_load"))


def _shared(node: str, worker: BenchWorker) -> Clue | None:
    """Processors that are all busy, of which a node's own workers have a part: others compute on them."""
    use = worker.use.get("together")
    if worker.device != "cpu" or use is None or worker.cores is None:
        return None
    got, busy = use.job_cores, use.cpu_busy_percent
    if got is None or busy is None or busy < _FULL_PERCENT or got >= _SHARED_BELOW * worker.cores:
        return None
    own = "them" if worker.node_cores in {None, worker.cores} else f"the {worker.cores} that they may run on"
    seen = worker.node_cores or worker.cores
    return Clue(
        cause="shared_processors",
        sentence=f"all {seen} cores that {node} sees were busy, and its own workers had {got:.1f} of {own}",
        hint="nodes that are parts of one machine have its cores only once: compare them alone",
    )


def _drop(cause: str, members: Sequence[_Dropped]) -> Drop:
    names = tuple(dict.fromkeys(one.node for one in members))
    ratio = statistics.median(one.ratio for one in members)
    verb = "reaches" if len(names) == 1 else "reach"
    return Drop(
        nodes=names,
        ratio=ratio,
        cause=cause,
        clues=members[0].clues,
        text=f"while all workers measure, {name_nodes(names)} {verb} {ratio:.2f} of the speed alone; "
        f"{because(members[0].clues)}",
    )
