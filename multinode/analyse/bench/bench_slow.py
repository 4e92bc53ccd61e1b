"""Bench slow: which nodes and workers are slower than like devices elsewhere. Pure.

A worker is held against the workers of other nodes with the same device, in the same phase and test; without any,
against those of its own node. It is slow where its median over the tests of a kind is below nine tenths of the peers'
median, and by more than the timings scatter.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

import msgspec

from multinode.analyse.bench.bench_clues import Case, find_clues
from multinode.analyse.bench.bench_figures import BenchNode, BenchTest, BenchWorker, Slow, Speed
from multinode.analyse.bench.bench_work import KINDS
from multinode.analyse.steps.stragglers import Clue
from multinode.core.measure.benchmark import PHASES

__all__ = ["BEYOND_CHANCE", "SLOW_BELOW", "because", "error_of", "find_slow", "name_nodes", "with_peers"]

SLOW_BELOW = 0.9
"""Of the peers' median: what is below is slow."""
BEYOND_CHANCE = 3.0
"""Standard errors of a median: what differs by less may be chance."""
_MOST_NAMED = 4


class _Placed(msgspec.Struct, frozen=True, kw_only=True):
    """A worker and where it is."""

    node: BenchNode
    worker: BenchWorker


def with_peers(nodes: Sequence[BenchNode]) -> tuple[BenchNode, ...]:
    """The nodes with each speed as a share of the peers', and marked where it is slow."""
    placed = _placed(nodes)
    marked = {(one.node.node_rank, one.worker.rank): _marked(one, placed) for one in placed}
    return tuple(
        msgspec.structs.replace(node, workers=tuple(marked[node.node_rank, worker.rank] for worker in node.workers))
        for node in nodes
    )


def find_slow(nodes: Sequence[BenchNode]) -> tuple[Slow, ...]:
    """Who is slow, the slowest first; a node whose workers all are is named as a whole.

    Args:
        nodes: as `with_peers` marked them.
    """
    placed = _placed(nodes)
    found = []
    for node in nodes:
        slow = [(one, ratios) for one in placed if one.node is node and (ratios := _slow_ratios(one.worker))]
        if slow and len(slow) == len(node.workers):
            found.append(_verdict([one for one, _ in slow], _worst(ratios for _, ratios in slow), placed))
        else:
            found += [_verdict([one], ratios, placed, rank=one.worker.rank) for one, ratios in slow]
    return tuple(sorted(found, key=lambda one: min(_all_ratios(one.ratios))))


def _placed(nodes: Iterable[BenchNode]) -> list[_Placed]:
    return [_Placed(node=node, worker=worker) for node in nodes for worker in node.workers]


def _peers(one: _Placed, placed: Sequence[_Placed]) -> tuple[_Placed, ...]:
    """Like devices on other nodes, else on its own, else any of the same kind elsewhere."""
    alike = [each for each in placed if each.worker.device == one.worker.device and each.worker is not one.worker]
    same = [each for each in alike if each.worker.name == one.worker.name]
    for among, own in ((same, False), (same, True), (alike, False)):
        found = [each for each in among if (each.node.node_rank == one.node.node_rank) is own]
        if found:
            return tuple(found)
    return ()


def _marked(one: _Placed, placed: Sequence[_Placed]) -> BenchWorker:
    peers = [each.worker for each in _peers(one, placed)]
    return msgspec.structs.replace(one.worker, tests=tuple(_compared(test, peers) for test in one.worker.tests))


def _compared(test: BenchTest, peers: Sequence[BenchWorker]) -> BenchTest:
    like = [other for peer in peers for other in peer.tests if (other.label, other.size) == (test.label, test.size)]
    speeds = {phase: _against(test.speed(phase), [other.speed(phase) for other in like]) for phase in PHASES}
    return msgspec.structs.replace(test, **speeds)


def _against(mine: Speed | None, others: Iterable[Speed | None]) -> Speed | None:
    theirs = [other for other in others if other is not None]
    if mine is None or not theirs:
        return mine
    ratio = mine.value / statistics.median(other.value for other in theirs)
    scatter = math.hypot(error_of(mine), statistics.median(map(error_of, theirs)))
    slow = ratio < SLOW_BELOW and 1 - ratio > BEYOND_CHANCE * scatter
    return msgspec.structs.replace(mine, of_peers=ratio, slow=slow)


def error_of(speed: Speed) -> float:
    """How far its median may be off by chance, as a share of it."""
    return speed.cv / math.sqrt(speed.timings)


def _slow_ratios(worker: BenchWorker) -> dict[str, dict[str, float]]:
    """By phase and kind of test, where it is slow, its median share of what the peers reach."""
    found: dict[str, dict[str, float]] = {}
    for phase in PHASES:
        for kind in KINDS:
            speeds = [test.speed(phase) for test in worker.tests if test.kind == kind]
            judged = [speed for speed in speeds if speed is not None and speed.of_peers is not None]
            ratios = [speed.of_peers for speed in judged if speed.of_peers is not None]
            if ratios and statistics.median(ratios) < SLOW_BELOW and 2 * sum(one.slow for one in judged) >= len(judged):
                found.setdefault(phase, {})[kind] = statistics.median(ratios)
    return found


def _worst(all_ratios: Iterable[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Of several workers: by phase and kind, the least."""
    worst: dict[str, dict[str, float]] = {}
    for ratios in all_ratios:
        for phase, kinds in ratios.items():
            mine = worst.setdefault(phase, {})
            for kind, ratio in kinds.items():
                mine[kind] = min(ratio, mine.get(kind, ratio))
    return worst


def _all_ratios(ratios: dict[str, dict[str, float]]) -> list[float]:
    return [ratio for kinds in ratios.values() for ratio in kinds.values()]


def _verdict(
    members: Sequence[_Placed],
    ratios: dict[str, dict[str, float]],
    placed: Sequence[_Placed],
    *,
    rank: int | None = None,
) -> Slow:
    first = members[0]
    peers = _peers(first, placed)
    they = (
        name_nodes(each.node.node for each in peers if each.node is not first.node) or "the other workers of its node"
    )
    clues = _clues(members, peers, they, next(phase for phase in PHASES if phase in ratios))
    who = first.node.node if rank is None else f"worker {rank} of {first.node.node}"
    return Slow(
        node=first.node.node,
        rank=rank,
        ratios=ratios,
        peers=they,
        cause=clues[0].cause if clues else "unknown",
        clues=clues,
        text=f"{who} is slow: {_told(ratios)} of what {they} {'reaches' if ',' not in they else 'reach'}"
        f"; {because(clues)}",
    )


def _clues(members: Sequence[_Placed], peers: Sequence[_Placed], they: str, phase: str) -> tuple[Clue, ...]:
    """Of all members, one of each cause and sentence."""
    found: dict[str, Clue] = {}
    for one in members:
        case = Case(
            node=one.node.node,
            me=one.worker,
            phase=phase,
            they=they,
            peers=tuple(each.worker for each in peers),
            peer_phase=phase,
        )
        for clue in find_clues(case):
            found.setdefault(clue.cause, clue)
    return tuple(found.values())


def because(clues: Sequence[Clue]) -> str:
    """The likeliest cause in words, or that there is none."""
    return f"likely because {clues[0].sentence}" if clues else "nothing that was recorded says why"


def _told(ratios: dict[str, dict[str, float]]) -> str:
    """`0.31 in matrix products and 0.33 in memory (alone)`."""
    said = []
    for phase, kinds in ratios.items():
        words = [f"{ratio:.2f} in {KINDS[kind]}" for kind, ratio in kinds.items()]
        said.append(f"{' and '.join([', '.join(words[:-1]), words[-1]] if len(words) > 1 else words)} ({phase})")
    return "; ".join(said)


def name_nodes(names: Iterable[str]) -> str:
    """At most four names, and how many there are beside."""
    shown = list(dict.fromkeys(names))
    if len(shown) > _MOST_NAMED:
        return f"{', '.join(shown[: _MOST_NAMED - 1])} and {len(shown) - _MOST_NAMED + 1} others"
    return ", ".join(shown)
