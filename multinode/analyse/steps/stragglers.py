"""Stragglers: workers that the others wait for, step after step, and what is the likely cause. Pure.

How long a worker waited is `exposure`'s; what differs on a late node is `straggler_causes`'.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Sequence

import msgspec

from multinode.analyse.run.observed import Observed
from multinode.analyse.steps.exposure import Exposure, WorkerStep
from multinode.analyse.steps.step_split import StepSplit
from multinode.analyse.steps.straggler_causes import Case, compute_longer, find_clues, name_compared
from multinode.analyse.telemetry.machine_use import NodeUse
from multinode.analyse.traffic.seen_calls import read_calls, rooted_part
from multinode.core.run.samples import StepSample
from multinode.core.text.plausible import plausible_count

__all__ = ["Straggler", "Waiting", "find_stragglers", "find_waiting"]

# Late by less than a twentieth of the step nobody would notice.
_LATE = 0.05
# Nodes that take turns are late in half of the steps, or in fewer where there are more of them.
_OFTEN = 0.7
# By chance one of two is the late one in 7 of 10 steps every third time: its lateness has to stand out from its own
# scatter, too, by this many standard errors. Few steps tell little of the scatter: as if there were three fewer, chance
# does that about once in a thousand nodes, as Student's t has it.
_ERRORS = 4
_FEWER = 3
_LEAST_STEPS = 4
# Of fewer steps nobody could say that nodes take turns in them.
_LEAST_TURNS = 10
# From this part of what is sent on, calls that workers leave one by one decide who waits: least waits their root.
_ROOTED = 0.25


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """A node whose workers the others wait for.

    Attributes:
        ranks: the workers that are late.
        late_ms: what the others wait for it, median over the steps.
        share: of the step.
        cause: `cpu`, `gpu_clocks`, `gpu_power`, `gpu_heat`, `pcie`, `disk`, `data`, `memory`, `work` (it has more
            tokens) or `unknown`.
        evidence: what says so, a sentence each with its figures; the first is of the cause.
        hint: what to do about it.
    """

    node: str
    ranks: tuple[int, ...]
    late_ms: float
    share: float
    cause: str = "unknown"
    evidence: tuple[str, ...] = ()
    hint: str = ""


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """What nodes wait for each other, whoever is late; of a single node, its workers.

    Attributes:
        late_ms: what the others wait for the last one, mean over the steps; None is unknown.
        take_turns: whether another one is the last again and again.
    """

    late_ms: float | None = None
    take_turns: bool = False


class _Seen(msgspec.Struct, frozen=True, kw_only=True):
    """All that the causes are looked for in."""

    observed: Observed
    exposure: Exposure
    split: StepSplit
    uses: Sequence[NodeUse]


class _Group(msgspec.Struct, frozen=True, kw_only=True):
    """Workers that are compared with the others: those of a node, or a single one where there is but one node."""

    node: str
    ranks: tuple[int, ...]


class _Late(msgspec.Struct, frozen=True, kw_only=True):
    """The late workers of a node, and by step what the others wait for them."""

    node: str
    ranks: tuple[int, ...]
    late_us: tuple[float, ...]


def find_stragglers(
    observed: Observed, exposure: Exposure, split: StepSplit, uses: Sequence[NodeUse]
) -> tuple[Straggler, ...]:
    """The late nodes, in node-rank order, with the likely cause; empty where that cannot be told.

    Workers end a step together, so a late one shows by waiting less than the others. On each node the one that waits
    least is compared with the median of the other nodes. Where more than half are late, the others are merely fast.
    Where much is sent by calls that workers need not leave together, waiting less alone makes nobody late.

    Args:
        observed: the run.
        exposure: of it.
        split: of that.
        uses: what the nodes' machines did.
    """
    groups = _groups(observed)
    if exposure.source is None or len(exposure.steps) < _LEAST_STEPS or len(groups) < 2:  # noqa: PLR2004 - a peer
        return ()
    late = [found for group in groups if (found := _late(exposure, group, groups)) is not None]
    if 2 * len(late) > len(groups):
        return ()
    seen = _Seen(observed=observed, exposure=exposure, split=split, uses=uses)
    slow = frozenset(rank for one in late for rank in one.ranks)
    nodes = [_merged(late, node) for node in dict.fromkeys(one.node for one in late)]
    return tuple(straggler for node in nodes if (straggler := _straggler(node, slow, seen)) is not None)


def find_waiting(observed: Observed, exposure: Exposure) -> Waiting:
    """What nodes wait for each other in the steps that can be told."""
    groups = [group.ranks for group in _groups(observed)]
    if exposure.source is None or len(groups) < 2:  # noqa: PLR2004 - a peer
        return Waiting()
    waited = [[min(step[rank].exposed_us or 0.0 for rank in ranks) for ranks in groups] for step in exposure.steps]
    late_us = [statistics.median(others) - last for last, *others in map(sorted, waited)]
    return Waiting(late_ms=statistics.fmean(late_us) / 1000, take_turns=_take_turns(exposure, waited))


def _take_turns(exposure: Exposure, waited: Sequence[Sequence[float]]) -> bool:
    """Whether none is the last, or about as late as the last, in most of the steps in which somebody waited."""
    turns = []
    for step, least in zip(exposure.steps, waited, strict=True):
        matters_us = _LATE * _step_us(step)
        if max(least) - min(least) > matters_us:
            turns.append([one - min(least) <= matters_us for one in least])
    often = _OFTEN * len(turns)
    return len(turns) >= _LEAST_TURNS and all(sum(is_last) < often for is_last in zip(*turns, strict=True))


def _groups(observed: Observed) -> list[_Group]:
    nodes = [_Group(node=node.name, ranks=node.ranks) for node in observed.nodes if node.ranks]
    if len(nodes) == 1:
        return [_Group(node=nodes[0].node, ranks=(rank,)) for rank in nodes[0].ranks]
    return nodes


def _late(exposure: Exposure, group: _Group, groups: Sequence[_Group]) -> _Late | None:
    others = [other.ranks for other in groups if other is not group]
    late_us = _lateness(exposure, group.ranks, others)
    if not _stands_out(exposure, late_us):
        return None
    alone = tuple(rank for rank in group.ranks if _stands_out(exposure, _lateness(exposure, (rank,), others)))
    return _Late(node=group.node, ranks=alone or group.ranks, late_us=late_us)


def _lateness(exposure: Exposure, ranks: Sequence[int], others: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """By step, how much longer the others wait than these; negative where these wait longer."""
    found = []
    for step in exposure.steps:
        waited = {rank: worker.exposed_us or 0.0 for rank, worker in step.items()}
        least = [min(waited[rank] for rank in other) for other in others]
        found.append(statistics.median(least) - min(waited[rank] for rank in ranks))
    return tuple(found)


def _stands_out(exposure: Exposure, late_us: Sequence[float]) -> bool:
    """Whether it is late in most steps, by more than chance makes of it."""
    often = sum(late > _LATE * _step_us(step) for late, step in zip(late_us, exposure.steps, strict=True))
    error = statistics.stdev(late_us) / math.sqrt(len(late_us) - _FEWER)
    return often >= _OFTEN * len(late_us) and statistics.fmean(late_us) > _ERRORS * error


def _step_us(step: dict[int, WorkerStep]) -> float:
    return statistics.median(worker.step_us for worker in step.values())


def _merged(late: Sequence[_Late], node: str) -> _Late:
    of_node = [one for one in late if one.node == node]
    return _Late(
        node=node,
        ranks=tuple(sorted(rank for one in of_node for rank in one.ranks)),
        late_us=tuple(max(step) for step in zip(*(one.late_us for one in of_node), strict=True)),
    )


def _straggler(late: _Late, slow: Collection[int], seen: _Seen) -> Straggler | None:
    """The straggler with its cause; without any, with what was looked at. None where it may be a root alone."""
    case = _case(late, slow, seen)
    clues = find_clues(case)
    if not clues and not compute_longer(case) and rooted_part(read_calls(seen.observed).values()) >= _ROOTED:
        return None
    return Straggler(
        node=late.node,
        ranks=late.ranks,
        late_ms=statistics.median(late.late_us) / 1000,
        share=statistics.median(
            late_us / _step_us(step) for late_us, step in zip(late.late_us, seen.exposure.steps, strict=True)
        ),
        cause=clues[0].cause if clues else "unknown",
        evidence=tuple(clue.sentence for clue in clues) or (_nothing_differs(case),),
        hint=clues[0].hint if clues else f"look at it while it trains: ssh {late.node} {_watch(case)}",
    )


def _watch(case: Case) -> str:
    return "top -b -n 1" if case.on_cpu else "nvidia-smi dmon -c 10"


def _nothing_differs(case: Case) -> str:
    compared = name_compared(case)
    slower = f"{said}; " if (said := compute_longer(case)) else ""
    if not compared:
        return f"{slower}nothing else that {case.node} recorded of itself can be compared with {case.they}"
    return f"{slower}nothing else that was compared with {case.they} differs enough: {', '.join(compared)}"


def _case(late: _Late, slow: Collection[int], seen: _Seen) -> Case:
    """The late workers beside those of other nodes that are not late; on one node, beside its others."""
    workers = {worker.rank: worker for worker in seen.split.workers}
    elsewhere = [node for node in seen.observed.nodes if node.name != late.node and not set(node.ranks) & set(slow)]
    ranks = [rank for node in elsewhere for rank in node.ranks] or [rank for rank in workers if rank not in slow]
    names = {node.name for node in elsewhere}
    unit, work = _work(seen.exposure)
    return Case(
        node=late.node,
        they=next(iter(names)) if len(names) == 1 else "the others",
        late_ms=statistics.median(late.late_us) / 1000,
        on_cpu=seen.exposure.device == "cpu",
        mine=tuple(workers[rank] for rank in late.ranks if rank in workers),
        theirs=tuple(workers[rank] for rank in ranks if rank in workers),
        work=work,
        work_unit=unit,
        use=next((use for use in seen.uses if use.node == late.node), None),
        others=tuple(use for use in seen.uses if use.node in names),
    )


def _work(exposure: Exposure) -> tuple[str, dict[int, float]]:
    """What each worker had to do in a step, in the mean: tokens, else samples; empty where some worker does not say."""
    units: dict[str, Callable[[StepSample], int | None]] = {
        "tokens": lambda record: plausible_count(record.tokens),
        "samples": lambda record: plausible_count(record.samples),
    }
    for unit, count in units.items():
        counts = {
            rank: [known for step in exposure.steps if (known := count(step[rank].record)) is not None]
            for rank in exposure.steps[0]
        }
        if all(len(known) == len(exposure.steps) for known in counts.values()):
            return unit, {rank: statistics.fmean(known) for rank, known in counts.items()}
    return "tokens", {}
