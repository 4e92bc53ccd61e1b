"""Stragglers: workers that the others wait for in many steps, with the likely cause. Pure.

`exposure` gives the waits. A cause has figures of both sides: what is the same everywhere makes nobody late.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec

from multinode.cluster.hostfile import fold_numbers
from multinode.findings.rule import RuleGroup
from multinode.profile.exposure import Exposure, WorkerStep
from multinode.profile.figures import LikelyCause, Peers, Straggler, Waiting
from multinode.profile.likely_causes import Beside, CauseRules, compare_machines
from multinode.profile.machine_use import GpuUse, NodeUse
from multinode.profile.observed import Observed
from multinode.profile.step_split import StepSplit, WorkerSplit
from multinode.stats.estimate import half_width, known_max, known_mean, known_median
from multinode.stats.unknown import Unknown, or_none, or_zero
from multinode.units import format_figure, format_ms

# A delay below a twentieth of the step is not noticeable.
_LATE = 0.05
# Alternating nodes are late in half of the steps, or fewer with more nodes.
_OFTEN = 0.7
# By chance, one of two nodes is late in 7 of 10 steps every third time, so its lateness must also exceed its own
# variation. At twice the half-width of its 95% interval, chance does so about once in a thousand nodes.
_HALF_WIDTHS = 2
_LEAST_STEPS = 4
# Minimum steps to tell that nodes alternate.
_LEAST_TURNS = 10
# From this share of bytes sent by rooted calls on, waits depend on the root, not on the slowest worker.
_ROOTED = 0.25
# A cause must explain half of the delay; otherwise another one is more important.
_EXPLAINS = 0.5
# From this ratio on it is said as one, below it as a percentage.
_MUCH_SLOWER = 1.5
_MORE_WORK = 1.05
_FULL_PERCENT = 90
_FEWER_CORES = 0.8
# A worker that waits almost all the time says nothing about the rest.
_LEAST_BUSY = 0.02
_COMPARED = {"data": "waits for batches", "cpus": "processors", "gpus": "GPUs", "disk": "waits for a disk"}

STRAGGLERS = RuleGroup("Stragglers")
_SLOWER = STRAGGLERS.rule(
    "slower",
    about="a node whose own work takes longer than that of its peers",
    message="{node} is {by} slower: {they} waited {peers_waiting_share:.0%} of the time",
    figures=("peers_waiting_share",),
)
_WAITED_FOR = STRAGGLERS.rule(
    "waited-for",
    about="a node that the others wait for, if it has more work or if its slowdown is unknown",
    message="the others wait {late_ms} per step for {node} ({share:.1%} of the step)",
)

CAUSES = CauseRules("Likely causes: a straggler compared with its peers")
_NOTHING_DIFFERS = CAUSES.cause(
    "nothing_differs",
    cause="unknown",
    about="no cause found: none of the compared figures explains the delay",
    message="{longer}no difference from {they} explains the delay (compared: {looked_at})",
    hint="watch the node during training: ssh {node} {watch!s}",
    figures=("ranks", "compute_ms", "peers_compute_ms", "compared", "device"),
)
_NOTHING_TO_COMPARE = CAUSES.cause(
    "nothing_to_compare",
    cause="unknown",
    about="no cause found: no figure was recorded for both the node and its peers",
    message="{longer}no other figures were recorded for both {node} and {they}",
    hint="watch the node during training: ssh {node} {watch!s}",
    figures=("ranks", "compute_ms", "peers_compute_ms", "device"),
)
_EVEN_WORK = (
    "give every worker the same amount of work: use the same batch size on every node, and group samples by length "
    "(group_by_length) or pack them (packing)"
)
_MORE = {
    unit: CAUSES.cause(
        f"more_{unit}",
        cause="work",
        about=f"workers with more {unit} per step than their peers",
        message=f"{{workers}} had {{{unit}_per_step:.0f}} {unit} per step, compared with "
        f"{{peers_{unit}_per_step:.0f}} on {{they}}",
        hint=_EVEN_WORK,
        figures=("ranks", f"{unit}_per_step", f"peers_{unit}_per_step"),
    )
    for unit in ("tokens", "samples")
}
_SLOW_DATA = CAUSES.cause(
    "slow_data",
    cause="data",
    about="workers that wait longer for batches than their peers",
    message="{workers} waited {data_ms} per step for batches, compared with {peers_data_ms} on {they}",
    hint="check the disk from which {node!s} reads its data: ssh {node!s} iostat -x 1 5; if it is slow, use more data "
    "loader workers (dataloader_num_workers)",
    figures=("ranks", "data_ms", "peers_data_ms"),
)
_BUSY_CPUS = CAUSES.cause(
    "busy_cpus",
    cause="cpu",
    about="a node with busy CPUs, on which the job used fewer cores than on its peers",
    message="the job used {cores} cores on {node}{when}, compared with {peers_cores} on {they}; the CPUs of "
    "{node} were {cpu_busy_percent:.0f}% busy",
    hint="check what else runs there: ssh {node} top -b -n 1",
    figures=("job_cores", "peers_job_cores", "cpu_busy_percent", "device"),
)
_FEWER_CORES_USED = CAUSES.cause(
    "fewer_cores",
    cause="cpu",
    about="a node on which the job used fewer cores than on its peers",
    message="the job used {cores} cores on {node}{when}, compared with {peers_cores} on {they}",
    hint="check whether a cgroup, taskset or OMP_NUM_THREADS limits the job to fewer cores on {node!s}",
    figures=("job_cores", "peers_job_cores", "device"),
)


class _StragglerInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of the search for causes."""

    observed: Observed
    exposure: Exposure
    split: StepSplit
    uses: Sequence[NodeUse]
    rooted: float


_Group = tuple[str, tuple[int, ...]]
"""A node and its workers to compare with the others, or one worker on a single node."""


class _Late(msgspec.Struct, frozen=True, kw_only=True):
    """The late workers of a node, and the wait of the others by step."""

    node: str
    ranks: tuple[int, ...]
    late_us: tuple[float, ...]


def find_stragglers(
    observed: Observed, exposure: Exposure, split: StepSplit, uses: Sequence[NodeUse], rooted: float
) -> tuple[Straggler, ...]:
    """The late nodes in node-rank order with the likely cause; empty if unknown.

    Workers end a step together, so a late one waits less than the others. The worker of each node that waits least is
    compared with the median of the other nodes. If more than half are late, the others are just fast. If rooted calls
    send much, waiting less is no sign of lateness.

    Args:
        observed: the run.
        exposure: of it.
        split: of that.
        uses: of the nodes' machines.
        rooted: share of bytes of such calls (`rooted_part`).
    """
    groups = _groups(observed)
    if isinstance(exposure.source, Unknown) or len(exposure.steps) < _LEAST_STEPS or len(groups) < 2:  # noqa: PLR2004 - a peer
        return ()
    late = [lateness for group in groups if (lateness := _late(exposure, group, groups)) is not None]
    if 2 * len(late) > len(groups):
        return ()
    seen = _StragglerInputs(observed=observed, exposure=exposure, split=split, uses=uses, rooted=rooted)
    slow = frozenset(rank for lateness in late for rank in lateness.ranks)
    nodes = [_merged(late, node) for node in dict.fromkeys(lateness.node for lateness in late)]
    return tuple(straggler for node in nodes if (straggler := _straggler(node, slow, seen)) is not None)


def find_waiting(observed: Observed, exposure: Exposure) -> Waiting:
    """Waits between nodes in the steps with known exposure."""
    groups = [ranks for _, ranks in _groups(observed)]
    if isinstance(exposure.source, Unknown) or len(groups) < 2:  # noqa: PLR2004 - a peer
        return Waiting()
    waited = [[min(step[rank].exposed_us or 0.0 for rank in ranks) for ranks in groups] for step in exposure.steps]
    late_us = [statistics.median(others) - last for last, *others in map(sorted, waited)]
    return Waiting(late_ms=statistics.fmean(late_us) / 1000, take_turns=_take_turns(exposure, waited))


def _take_turns(exposure: Exposure, waited: Sequence[Sequence[float]]) -> bool:
    turns = []
    for step, least in zip(exposure.steps, waited, strict=True):
        matters_us = _LATE * _step_us(step)
        if max(least) - min(least) > matters_us:
            turns.append([wait_us - min(least) <= matters_us for wait_us in least])
    often = _OFTEN * len(turns)
    return len(turns) >= _LEAST_TURNS and all(sum(is_last) < often for is_last in zip(*turns, strict=True))


def _groups(observed: Observed) -> list[_Group]:
    nodes = [(node.name, node.ranks) for node in observed.nodes if node.ranks]
    if len(nodes) == 1:
        ((name, ranks),) = nodes
        return [(name, (rank,)) for rank in ranks]
    return nodes


def _late(exposure: Exposure, group: _Group, groups: Sequence[_Group]) -> _Late | None:
    others = [other[1] for other in groups if other is not group]
    node, ranks = group
    late_us = _lateness(exposure, ranks, others)
    if not _stands_out(exposure, late_us):
        return None
    alone = tuple(rank for rank in ranks if _stands_out(exposure, _lateness(exposure, (rank,), others)))
    return _Late(node=node, ranks=alone or ranks, late_us=late_us)


def _lateness(exposure: Exposure, ranks: Sequence[int], others: Sequence[Sequence[int]]) -> tuple[float, ...]:
    waits = []
    for step in exposure.steps:
        waited = {rank: worker.exposed_us or 0.0 for rank, worker in step.items()}
        least = [min(waited[rank] for rank in other) for other in others]
        waits.append(statistics.median(least) - min(waited[rank] for rank in ranks))
    return tuple(waits)


def _stands_out(exposure: Exposure, late_us: Sequence[float]) -> bool:
    often = sum(late > _LATE * _step_us(step) for late, step in zip(late_us, exposure.steps, strict=True))
    return often >= _OFTEN * len(late_us) and statistics.fmean(late_us) > _HALF_WIDTHS * half_width(late_us)


def _step_us(step: dict[int, WorkerStep]) -> float:
    return statistics.median(worker.step_us for worker in step.values())


def _merged(late: Sequence[_Late], node: str) -> _Late:
    of_node = [lateness for lateness in late if lateness.node == node]
    return _Late(
        node=node,
        ranks=tuple(sorted(rank for lateness in of_node for rank in lateness.ranks)),
        late_us=tuple(max(step) for step in zip(*(lateness.late_us for lateness in of_node), strict=True)),
    )


def _straggler(late: _Late, slow: Collection[int], seen: _StragglerInputs) -> Straggler | None:
    case = _case(late, slow, seen)
    likely = _find_causes(case)
    if not likely and not _compute_longer(case) and seen.rooted >= _ROOTED:
        return None
    causes = likely or (_nothing_differs(case),)
    slower = None if causes[0].cause == "work" else _slower(case, seen.exposure)
    share = statistics.median(
        late_us / _step_us(step) for late_us, step in zip(late.late_us, seen.exposure.steps, strict=True)
    )
    waiting = _waiting_share(case) if slower is not None else None
    by = "" if slower is None else f"{slower:.1f}x" if slower >= _MUCH_SLOWER else f"{slower - 1:.0%}"
    values = {
        "by": by,
        "they": str(case.they),
        "peers_waiting_share": waiting,
        "late_ms": case.late_ms,
        "share": share,
    }
    rule = _WAITED_FOR if waiting is None else _SLOWER
    return Straggler(
        **rule.fields(late.node, values) | {"hint": causes[0].hint},
        ranks=late.ranks,
        late_ms=case.late_ms,
        share=share,
        slower=slower,
        causes=causes,
    )


def _slower(case: _Case, exposure: Exposure) -> float | None:
    """Its workers' own work for a sample over that of the others, where a user would notice; by steps where unknown."""
    samples = {
        rank: known_mean(step[rank].record.samples for step in exposure.steps) or 1.0 for rank in exposure.steps[0]
    }
    mine, theirs = (
        [(worker.step_ms - _waiting_ms(worker)) / samples[worker.rank] for worker in workers]
        for workers in (case.mine, case.theirs)
    )
    peers = known_median(theirs)
    slower = max(mine) / peers if mine and peers else 0.0
    return slower if slower >= 1 + _LATE else None


def _waiting_share(case: _Case) -> float | None:
    """Share of their steps in which the others waited, mean of their workers; None if unknown."""
    return known_mean(
        worker.wait_ms / worker.step_ms
        for worker in case.theirs
        if not isinstance(worker.wait_ms, Unknown) and worker.step_ms > 0
    )


def _nothing_differs(case: _Case) -> LikelyCause:
    compared, figures = _name_compared(case), _compute_longer(case)
    longer = ""
    if figures:
        mine, theirs = figures["compute_ms"], figures["peers_compute_ms"]
        longer = (
            f"{case.workers} computed {format_ms(float(mine))} per step, compared with {format_ms(float(theirs))} on "
            f"{case.they}; "
        )
    looked_at = ", ".join(_COMPARED.get(name, name) for name in compared)
    watch = "top -b -n 1" if case.on_cpu else "nvidia-smi dmon -c 10"
    return case.beside.cause(
        _NOTHING_DIFFERS if compared else _NOTHING_TO_COMPARE,
        longer=longer,
        looked_at=looked_at,
        watch=watch,
        **figures,
        compared=", ".join(compared),
        device="cpu" if case.on_cpu else "gpu",
    )


def _case(late: _Late, slow: Collection[int], seen: _StragglerInputs) -> _Case:
    workers = {worker.rank: worker for worker in seen.split.workers}
    elsewhere = [node for node in seen.observed.nodes if node.name != late.node and not set(node.ranks) & set(slow)]
    ranks = [rank for node in elsewhere for rank in node.ranks] or [rank for rank in workers if rank not in slow]
    names = {node.name for node in elsewhere}
    unit, work = _work(seen.exposure)
    return _Case(
        node=late.node,
        they=Peers(names=tuple(node.name for node in elsewhere)) if elsewhere else Peers(kind="workers"),
        late_ms=statistics.median(late.late_us) / 1000,
        on_cpu=seen.exposure.device == "cpu",
        mine=tuple(workers[rank] for rank in late.ranks if rank in workers),
        theirs=tuple(workers[rank] for rank in ranks if rank in workers),
        work=work,
        work_unit=unit,
        use=next((use for use in seen.uses if use.node == late.node), None),
        others=tuple(use for use in seen.uses if use.node in names),
        write_hint=seen.observed.write_hint,
    )


def _work(exposure: Exposure) -> tuple[str, dict[int, float]]:
    for unit in ("tokens", "samples"):
        counts = {
            rank: [count for step in exposure.steps if (count := getattr(step[rank].record, unit)) is not None]
            for rank in exposure.steps[0]
        }
        if all(len(numbers) == len(exposure.steps) for numbers in counts.values()):
            return unit, {rank: statistics.fmean(numbers) for rank, numbers in counts.items()}
    return "tokens", {}


class _Case(msgspec.Struct, frozen=True, kw_only=True):
    """A late node and the others."""

    node: str
    they: Peers
    late_ms: float  # wait of the others per step
    on_cpu: bool  # whether its workers train on CPUs
    mine: tuple[WorkerSplit, ...]  # steps of the late workers; `theirs` of the others
    theirs: tuple[WorkerSplit, ...]
    work: dict[int, float] = {}  # mean tokens (otherwise samples: `work_unit`) per step, by rank; empty if unknown
    work_unit: str = "tokens"
    use: NodeUse | None = None  # of its machine; None if unknown. `others` of the other nodes.
    others: tuple[NodeUse, ...] = ()
    write_hint: Callable[[str], str] = str

    @property
    def beside(self) -> Beside:
        """Its machine and theirs."""
        return Beside(
            node=self.node,
            they=self.they,
            use=self.use,
            others=self.others,
            gpus=self.use.gpus if self.use is not None else (),
            peers=_peers(self, self.use) if self.use is not None else (),
            write_hint=self.write_hint,
        )

    @property
    def ranks(self) -> str:
        """The late workers, as `2, 3`."""
        return fold_numbers([worker.rank for worker in self.mine])

    @property
    def workers(self) -> str:
        """The ranks with their node, as in `ranks 2, 3 on node1`."""
        return f"rank{'s' if len(self.mine) > 1 else ''} {self.ranks} on {self.node}"


def _find_causes(case: _Case) -> tuple[LikelyCause, ...]:
    causes = [*_more_work(case), *_data(case)]
    if case.use is not None:
        # Fewer cores may result from waiting for a disk, so they come last.
        causes += [*compare_machines(case.beside), *_fewer_cores(case, case.use)]
    return tuple(causes)


def _name_compared(case: _Case) -> tuple[str, ...]:
    workers = (*case.mine, *case.theirs)
    evidence = {
        case.work_unit: all(worker.rank in case.work for worker in workers),
        "data": all(or_none(worker.data_ms) is not None for worker in workers),
        "cpus": _both_know(case, lambda use: or_none(use.job_cores) is not None),
        "gpus": case.use is not None and bool(_peers(case, case.use)),
        "disk": _both_know(case, lambda use: or_none(use.cpu_iowait_percent) is not None),
        "memory": _both_know(case, lambda use: or_none(use.memory_available_gib) is not None),
    }
    return tuple(name for name, is_known in evidence.items() if is_known)


def _compute_longer(case: _Case) -> dict[str, float | str]:
    mine = known_max(or_none(worker.compute_ms) for worker in case.mine)
    theirs = known_median(or_none(worker.compute_ms) for worker in case.theirs)
    if mine is None or theirs is None or mine - theirs < _EXPLAINS * case.late_ms:
        return {}
    return {"ranks": case.ranks, "compute_ms": mine, "peers_compute_ms": theirs}


def _both_know(case: _Case, knows: Callable[[NodeUse], bool]) -> bool:
    return case.use is not None and knows(case.use) and any(knows(other) for other in case.others)


def _more_work(case: _Case) -> Iterator[LikelyCause]:
    mine = [case.work[worker.rank] for worker in case.mine if worker.rank in case.work]
    theirs = known_median(case.work.get(worker.rank) for worker in case.theirs)
    if not mine or theirs is None or max(mine) <= _MORE_WORK * theirs:
        return
    busy_ms = max(_busy_ms(worker) for worker in case.mine)
    if busy_ms * (1 - theirs / max(mine)) >= _EXPLAINS * case.late_ms:
        unit = case.work_unit
        work: dict[str, object] = {f"{unit}_per_step": max(mine), f"peers_{unit}_per_step": theirs}
        yield case.beside.cause(_MORE[unit], workers=case.workers, ranks=case.ranks, **work)


def _data(case: _Case) -> Iterator[LikelyCause]:
    mine = known_max(or_none(worker.data_ms) for worker in case.mine)
    theirs = known_median(or_none(worker.data_ms) for worker in case.theirs)
    if mine is not None and theirs is not None and mine - theirs >= _EXPLAINS * case.late_ms:
        yield case.beside.cause(_SLOW_DATA, workers=case.workers, ranks=case.ranks, data_ms=mine, peers_data_ms=theirs)


def _fewer_cores(case: _Case, use: NodeUse) -> Iterator[LikelyCause]:
    mine, theirs = _cores(case, use), known_median(_cores(case, other) for other in case.others)
    busy = or_none(use.cpu_busy_percent)
    crowded = busy is not None and busy >= _FULL_PERCENT
    # A GPU's host has spare cores: fewer matter only if none are left.
    if mine is None or theirs is None or mine >= _FEWER_CORES * theirs or not (crowded or case.on_cpu):
        return
    yield case.beside.cause(
        _BUSY_CPUS if crowded else _FEWER_CORES_USED,
        cores=format_figure(mine),
        peers_cores=format_figure(theirs),
        when=" during compute" if case.on_cpu else "",
        job_cores=mine,
        peers_job_cores=theirs,
        cpu_busy_percent=busy,
        device="cpu" if case.on_cpu else "gpu",
    )


def _cores(case: _Case, use: NodeUse) -> float | None:
    own = [worker for worker in (*case.mine, *case.theirs) if worker.rank in use.ranks]
    job_cores = or_none(use.job_cores)
    if job_cores is None or not own:
        return None
    if not case.on_cpu:
        return job_cores
    busy = statistics.fmean(1 - _waiting_ms(worker) / worker.step_ms for worker in own)
    return job_cores / busy if busy >= _LEAST_BUSY else None


def _peers(case: _Case, use: NodeUse) -> Sequence[GpuUse]:
    return [gpu for other in case.others for gpu in other.gpus] or use.gpus


def _waiting_ms(worker: WorkerSplit) -> float:
    return or_zero(worker.exposed_ms) + or_zero(worker.wait_ms)


def _busy_ms(worker: WorkerSplit) -> float:
    return worker.step_ms - _waiting_ms(worker) - or_zero(worker.data_ms)
