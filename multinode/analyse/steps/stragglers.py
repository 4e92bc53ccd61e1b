"""Stragglers: workers that the others wait for, step after step, and what is the likely cause. Pure.

How long a worker waited is `exposure`'s. A clue has figures of both sides: what is the same everywhere makes nobody
late.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import msgspec

from multinode.analyse.run.observed import Observed
from multinode.analyse.steps.exposure import Exposure, WorkerStep
from multinode.analyse.steps.step_split import StepSplit, WorkerSplit
from multinode.analyse.telemetry.machine_use import GpuUse, NodeUse
from multinode.analyse.traffic.calls import read_calls, rooted_part
from multinode.core.run.samples import StepSample
from multinode.core.text.plausible import plausible_count

__all__ = [
    "Case",
    "Clue",
    "Straggler",
    "Waiting",
    "compute_longer",
    "find_clues",
    "find_stragglers",
    "find_waiting",
    "name_compared",
]

# A cause has to account for half of the delay: what explains less has company, and that would be the cause.
_EXPLAINS = 0.5
_MORE_WORK = 1.05
# Parts of the time. Sampled at 1 Hz over some tens of seconds, a tenth is a few samples: less is noise.
_HELD_MORE = 0.1
_STOLEN_MORE_PERCENT = 5
_IOWAIT_MORE_PERCENT = 10
_FULL_PERCENT = 90
_FEWER_CORES = 0.8
_SLOWER_CLOCK = 0.95
_THROTTLED_MORE = 0.2
_LITTLE_MEMORY_GIB = 1.0
# Of a worker that waits nearly always, nothing can be said about the time in which it does not.
_LEAST_BUSY = 0.02


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A late node beside the others.

    Attributes:
        they: the others in words.
        late_ms: what the others wait for it a step.
        on_cpu: whether its workers train on processors.
        mine: the late workers' steps; `theirs` those of the workers that are compared with them.
        work: mean tokens (else samples: `work_unit`) a step, by rank; empty is unknown.
        use: of its machine; None is unknown. `others` of the other nodes.
    """

    node: str
    they: str
    late_ms: float
    on_cpu: bool
    mine: tuple[WorkerSplit, ...]
    theirs: tuple[WorkerSplit, ...]
    work: dict[int, float] = {}
    work_unit: str = "tokens"
    use: NodeUse | None = None
    others: tuple[NodeUse, ...] = ()


class Clue(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that may make the node late: cause and hint as Straggler has them, and a sentence with figures."""

    cause: str
    sentence: str
    hint: str


def find_clues(case: Case) -> tuple[Clue, ...]:
    """All that differs, the best evidence first; the first names the cause."""
    found = [*_more_work(case), *_data(case)]
    if case.use is not None:
        for look in _MACHINE:
            found += look(case, case.use)
    return tuple(found)


def name_compared(case: Case) -> tuple[str, ...]:
    """What was known of both sides and could be compared, in words."""
    workers = (*case.mine, *case.theirs)
    known = {
        case.work_unit: all(worker.rank in case.work for worker in workers),
        "waits for batches": all(worker.data_ms is not None for worker in workers),
        "processors": _both_know(case, lambda use: use.job_cores is not None),
        "GPUs": case.use is not None and bool(_peers(case, case.use)),
        "waits for a disk": _both_know(case, lambda use: use.cpu_iowait_percent is not None),
        "memory": _both_know(case, lambda use: use.memory_available_gib is not None),
    }
    return tuple(name for name, is_known in known.items() if is_known)


def compute_longer(case: Case) -> str:
    """That it computed longer, in words, which is what is to be explained and no cause; empty where it did not."""
    mine = max((worker.compute_ms for worker in case.mine if worker.compute_ms is not None), default=None)
    theirs = _median(worker.compute_ms for worker in case.theirs)
    if mine is None or theirs is None or mine - theirs < _EXPLAINS * case.late_ms:
        return ""
    return f"{_workers(case)} computed {mine:.0f} ms a step where {case.they} computed {theirs:.0f} ms"


def _both_know(case: Case, knows: Callable[[NodeUse], bool]) -> bool:
    return case.use is not None and knows(case.use) and any(knows(other) for other in case.others)


def _more_work(case: Case) -> Iterator[Clue]:
    mine = [case.work[worker.rank] for worker in case.mine if worker.rank in case.work]
    theirs = _median(case.work.get(worker.rank) for worker in case.theirs)
    if not mine or theirs is None or max(mine) <= _MORE_WORK * theirs:
        return
    busy_ms = max(_busy_ms(worker) for worker in case.mine)
    if busy_ms * (1 - theirs / max(mine)) >= _EXPLAINS * case.late_ms:
        yield Clue(
            cause="work",
            sentence=f"{_workers(case)} had {max(mine):.0f} {case.work_unit} a step where {case.they} had {theirs:.0f}",
            hint="give every worker as much: the same batch size on every node, and samples of like length together "
            "(group_by_length) or packed (packing)",
        )


def _data(case: Case) -> Iterator[Clue]:
    mine = max((worker.data_ms for worker in case.mine if worker.data_ms is not None), default=None)
    theirs = _median(worker.data_ms for worker in case.theirs)
    if mine is not None and theirs is not None and mine - theirs >= _EXPLAINS * case.late_ms:
        yield Clue(
            cause="data",
            sentence=f"{_workers(case)} waited {mine:.0f} ms a step for batches where {case.they} waited "
            f"{theirs:.0f} ms",
            hint=f"look at where {case.node} reads its data, and how fast: ssh {case.node} iostat -x 1 5; more loader "
            "workers (dataloader_num_workers) hide a slow disk",
        )


def _held(case: Case, use: NodeUse) -> Iterator[Clue]:
    """By its cgroup, which has no figures where there is no limit."""
    theirs = _median(other.throttled_share for other in case.others)
    if use.throttled_share is None or not case.others or use.throttled_share < (theirs or 0.0) + _HELD_MORE:
        return
    limit = f" ({_figure(use.quota_cores)} cores)" if use.quota_cores is not None else ""
    beside = f"{case.they} had for {theirs:.0%}" if theirs is not None else f"{case.they} had no limit to be seen"
    yield Clue(
        cause="cpu",
        sentence=f"{case.node} had used up its cgroup's processor limit{limit} for {use.throttled_share:.0%} of the "
        f"time where {beside}",
        hint=f"raise the processor limit of the job on {case.node}: CPUQuota= of systemd, --cpus of docker, limits.cpu "
        "of a pod, --cpus-per-task of Slurm",
    )


def _stolen(case: Case, use: NodeUse) -> Iterator[Clue]:
    mine, theirs = use.cpu_steal_percent, _median(other.cpu_steal_percent for other in case.others)
    if mine is not None and theirs is not None and mine >= theirs + _STOLEN_MORE_PERCENT:
        yield Clue(
            cause="cpu",
            sentence=f"the hypervisor took {mine:.0f} % of {case.node}'s processor time where it took {theirs:.0f} % "
            f"on {case.they}",
            hint=f"{case.node} shares its processors with other virtual machines: give it dedicated ones, or do "
            "without it",
        )


def _gpus(case: Case, use: NodeUse) -> Iterator[Clue]:
    """Clocks and NVML's reasons for them: a power cap that costs no clocks, or is reached everywhere, delays nobody."""
    peers = _peers(case, use)
    mine = min((gpu.sm_clock_mhz for gpu in use.gpus if gpu.sm_clock_mhz is not None), default=None)
    theirs = _median(gpu.sm_clock_mhz for gpu in peers)
    slower = None if mine is None or theirs is None else mine < _SLOWER_CLOCK * theirs
    if slower is False or not peers:
        return
    for cause, word, what, hint in _THROTTLES:
        held = max((_throttled(gpu, word) for gpu in use.gpus), default=0.0)
        held_there = _median(_throttled(gpu, word) for gpu in peers) or 0.0
        if held >= held_there + _THROTTLED_MORE:
            yield Clue(
                cause=cause,
                sentence=f"{what} held a GPU of {case.node} back for {held:.0%} of the time, those of {case.they} for "
                f"{held_there:.0%}",
                hint=hint.format(node=case.node),
            )
    if slower:
        yield Clue(
            cause="gpu_clocks",
            sentence=f"a GPU of {case.node} ran at {mine:.0f} MHz where {case.they} ran at {theirs:.0f} MHz",
            hint=f"see what holds its clocks: ssh {case.node} nvidia-smi -q -d CLOCK,PERFORMANCE",
        )


_THROTTLES = (
    (
        "gpu_heat",
        "thermal",
        "heat",
        "cool it: fans, dust, the cards beside it; see ssh {node} nvidia-smi -q -d TEMPERATURE,PERFORMANCE",
    ),
    (
        "gpu_power",
        "power",
        "a power limit",
        "compare the power limits of the nodes: ssh {node} nvidia-smi -q -d POWER,PERFORMANCE",
    ),
)


def _throttled(gpu: GpuUse, word: str) -> float:
    return max((share for reason, share in gpu.throttle.items() if word in reason), default=0.0)


def _narrow_pcie(case: Case, use: NodeUse) -> Iterator[Clue]:
    peers = _peers(case, use)
    narrow = next((gpu for gpu in use.gpus if gpu.pcie_reduced), None)
    wide = next((gpu for gpu in peers if not gpu.pcie_reduced), None)
    if narrow is not None and wide is not None:
        yield Clue(
            cause="pcie",
            sentence=f"GPU {narrow.index} of {case.node} had PCIe {narrow.pcie or 'with lanes missing'} where "
            f"{case.they} had {wide.pcie or 'all lanes'}",
            hint="reseat the card, or give it a slot with all lanes; see "
            f"ssh {case.node} nvidia-smi --query-gpu=index,pcie.link.width.current,pcie.link.width.max --format=csv",
        )


def _disk(case: Case, use: NodeUse) -> Iterator[Clue]:
    mine, theirs = use.cpu_iowait_percent, _median(other.cpu_iowait_percent for other in case.others)
    if mine is not None and theirs is not None and mine >= theirs + _IOWAIT_MORE_PERCENT:
        yield Clue(
            cause="disk",
            sentence=f"processors of {case.node} waited for a disk {mine:.0f} % of the time where {case.they} waited "
            f"{theirs:.0f} %",
            hint=f"see which disk it is: ssh {case.node} iostat -x 1 5",
        )


def _memory(case: Case, use: NodeUse) -> Iterator[Clue]:
    mine, theirs = use.memory_available_gib, _median(other.memory_available_gib for other in case.others)
    if mine is not None and theirs is not None and mine < _LITTLE_MEMORY_GIB <= theirs:
        yield Clue(
            cause="memory",
            sentence=f"{case.node} had {_figure(mine)} GiB of memory left where {case.they} had {_figure(theirs)} GiB",
            hint=f"see what takes it, and whether it swaps: ssh {case.node} 'free -h; ps aux --sort=-rss | head'; what "
            "a container may use `free` does not know, multinode check does",
        )


def _fewer_cores(case: Case, use: NodeUse) -> Iterator[Clue]:
    """Fewer processors than the others while it did not wait: others took them, or it may use no more."""
    mine, theirs = _cores(case, use), _median(_cores(case, other) for other in case.others)
    crowded = use.cpu_busy_percent is not None and use.cpu_busy_percent >= _FULL_PERCENT
    # A GPU's host has cores to spare: fewer say something only where there are none left.
    if mine is None or theirs is None or mine >= _FEWER_CORES * theirs or not (crowded or case.on_cpu):
        return
    when = " while it computed" if case.on_cpu else ""
    why = f", and {use.cpu_busy_percent:.0f} % of its processors' time is taken" if crowded else ""
    yield Clue(
        cause="cpu",
        sentence=f"{case.node}'s job used {_figure(mine)} cores{when} where {_figure(theirs)} were used on "
        f"{case.they}{why}",
        hint=f"see who else computes there: ssh {case.node} top -b -n 1"
        if crowded
        else f"see whether the job may use fewer processors on {case.node}: a cgroup, taskset, OMP_NUM_THREADS",
    )


def _cores(case: Case, use: NodeUse) -> float | None:
    """Cores that the job used; of a training on CPUs, while it did not wait, for who waits for its peers uses none."""
    own = [worker for worker in (*case.mine, *case.theirs) if worker.rank in use.ranks]
    if use.job_cores is None or not own:
        return None
    if not case.on_cpu:
        return use.job_cores
    busy = statistics.fmean(1 - _waiting_ms(worker) / worker.step_ms for worker in own)
    return use.job_cores / busy if busy >= _LEAST_BUSY else None


# Best evidence first. Fewer cores may follow from waiting for a disk, and therefore come last.
_MACHINE: tuple[Callable[[Case, NodeUse], Iterable[Clue]], ...] = (
    _held,
    _stolen,
    _gpus,
    _narrow_pcie,
    _disk,
    _memory,
    _fewer_cores,
)


def _peers(case: Case, use: NodeUse) -> Sequence[GpuUse]:
    """GPUs to compare with: of the other nodes, else all of this one."""
    return [gpu for other in case.others for gpu in other.gpus] or use.gpus


def _workers(case: Case) -> str:
    """`rank 1 on node1`, `ranks 2, 3 on node1`."""
    numbers = ", ".join(str(worker.rank) for worker in case.mine)
    return f"rank{'' if len(case.mine) == 1 else 's'} {numbers} on {case.node}"


def _waiting_ms(worker: WorkerSplit) -> float:
    return (worker.exposed_ms or 0.0) + (worker.wait_ms or 0.0)


def _busy_ms(worker: WorkerSplit) -> float:
    return worker.step_ms - _waiting_ms(worker) - (worker.data_ms or 0.0)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _figure(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.3g}"  # noqa: PLR2004 - from here on decimals say nothing


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
