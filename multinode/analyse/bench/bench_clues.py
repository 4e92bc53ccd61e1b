"""Bench clues: what differs between a slow device and its like, or between all at once and one alone. Pure.

Who is slow is `bench_slow`'s. A clue has figures of both sides: what is the same everywhere makes nobody slow.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from multinode.analyse.bench.bench_figures import BenchWorker, WorkerUse
from multinode.analyse.steps.stragglers import Clue
from multinode.analyse.telemetry.gpus import GpuUse

__all__ = ["Case", "find_clues", "throttled"]

# Parts of the time.
_HELD_MORE = 0.1
_THROTTLED_MORE = 0.1
_SLOWER_CLOCK = 0.95
_STOLEN_MORE_PERCENT = 5
_FULL_PERCENT = 90
# Of the node's cores.
_OTHERS_MORE = 0.25
_FEWER_CORES = 0.9


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A slow device beside its like, or beside itself in another phase.

    Attributes:
        me: the slow worker.
        phase: in which it was slow.
        they: the others in words; `peers` their workers.
        peer_phase: in which they were not slow.
    """

    node: str
    me: BenchWorker
    phase: str
    they: str
    peers: tuple[BenchWorker, ...]
    peer_phase: str

    @property
    def use(self) -> WorkerUse | None:
        """What the device and its node did."""
        return self.me.use.get(self.phase)

    @property
    def others(self) -> tuple[WorkerUse, ...]:
        """What those of the others did, as far as it is known."""
        return tuple(peer.use[self.peer_phase] for peer in self.peers if self.peer_phase in peer.use)


def find_clues(case: Case) -> tuple[Clue, ...]:
    """All that differs, the likeliest cause first."""
    return tuple(clue for look in _LOOKS for clue in look(case))


def throttled(gpu: GpuUse, word: str) -> float:
    """Part of the time in which a reason with this word in it held its clocks down."""
    return max((share for reason, share in gpu.throttle.items() if word in reason), default=0.0)


def _device(case: Case) -> Iterator[Clue]:
    names = {peer.name for peer in case.peers}
    if case.me.name is not None and None not in names and case.me.name not in names:
        yield Clue(
            cause="device",
            sentence=f"{case.node} has {case.me.name} where {case.they} had {', '.join(sorted(map(str, names)))}",
            hint="in one training the slower device sets the pace: train on like ones, or give it less work",
        )


def _quota(case: Case) -> Iterator[Clue]:
    mine, theirs = _known(case.use, "throttled_share"), _median(one.throttled_share for one in case.others)
    if mine is None or mine < (theirs or 0.0) + _HELD_MORE:
        return
    quota = _known(case.use, "quota_cores")
    limit = f" of {quota:.3g} {'core' if quota == 1 else 'cores'}" if quota is not None else ""
    beside = f"{case.they} for {theirs:.0%}" if theirs is not None else f"{case.they} had no limit to be seen"
    yield Clue(
        cause="cpu",
        sentence=f"a control group's processor quota{limit} held {case.node} back for {mine:.0%} of the time, {beside}",
        hint=f"raise the processor limit of jobs on {case.node}: CPUQuota= of systemd, --cpus of docker, limits.cpu of "
        "a pod, --cpus-per-task of Slurm",
    )


def _threads(case: Case) -> Iterator[Clue]:
    if case.me.device != "cpu":
        return
    for name, hint in (
        ("threads", f"OMP_NUM_THREADS decides: set env.OMP_NUM_THREADS= alike for every node, {case.node} included"),
        ("cores", f"see what its workers may run on: ssh {case.node} nproc; a cpuset or taskset takes cores away"),
    ):
        mine, theirs = getattr(case.me, name), _median(getattr(peer, name) for peer in case.peers)
        if mine is not None and theirs is not None and mine < _FEWER_CORES * theirs:
            yield Clue(
                cause="threads",
                sentence=f"{case.node} computes with {mine} {name} where {case.they} had {theirs:g}",
                hint=hint,
            )


def _gpu(case: Case) -> Iterator[Clue]:
    mine, theirs = _gpu_of(case.use), [gpu for gpu in map(_gpu_of, case.others) if gpu is not None]
    if mine is None or not theirs:
        return
    for cause, word, what, hint in _THROTTLES:
        held, held_there = throttled(mine, word), statistics.median(throttled(gpu, word) for gpu in theirs)
        if held >= held_there + _THROTTLED_MORE:
            yield Clue(
                cause=cause,
                sentence=f"{what} held its clocks down for {held:.0%} of the time, those of {case.they} for "
                f"{held_there:.0%}{_degrees(mine, theirs)}",
                hint=hint.format(node=case.node),
            )
    clock, clock_there = mine.sm_clock_mhz, _median(gpu.sm_clock_mhz for gpu in theirs)
    if clock is not None and clock_there is not None and clock < _SLOWER_CLOCK * clock_there:
        most = f" of {mine.sm_clock_max_mhz:.0f}" if mine.sm_clock_max_mhz is not None else ""
        yield Clue(
            cause="gpu_clocks",
            sentence=f"GPU {mine.index} of {case.node} ran at {clock:.0f}{most} MHz where {case.they} ran at "
            f"{clock_there:.0f} MHz",
            hint=f"see what holds its clocks: ssh {case.node} nvidia-smi -q -d CLOCK,PERFORMANCE",
        )


_THROTTLES = (
    (
        "gpu_heat",
        "thermal",
        "heat",
        "cool it: fans, dust, the cards beside it; ssh {node} nvidia-smi -q -d TEMPERATURE",
    ),
    ("gpu_power", "power", "a power limit", "compare the power limits: ssh {node} nvidia-smi -q -d POWER,PERFORMANCE"),
)


def _degrees(mine: GpuUse, theirs: Sequence[GpuUse]) -> str:
    there = _median(gpu.temperature_c for gpu in theirs)
    return f" ({mine.temperature_c:.0f} C and {there:.0f} C)" if mine.temperature_c is not None and there else ""


def _pcie(case: Case) -> Iterator[Clue]:
    mine, theirs = _gpu_of(case.use), [gpu for gpu in map(_gpu_of, case.others) if gpu is not None]
    wide = next((gpu for gpu in theirs if gpu.pcie is not None and not gpu.pcie_reduced), None)
    if mine is not None and wide is not None and mine.pcie is not None and mine.pcie != wide.pcie:
        if not mine.pcie_reduced and not _is_slower_link(mine.pcie, wide.pcie or ""):
            return
        yield Clue(
            cause="pcie",
            sentence=f"GPU {mine.index} of {case.node} has PCIe {mine.pcie} where {case.they} had {wide.pcie}",
            hint="seat the card anew, or look for a riser or a slot with fewer lanes; ssh "
            f"{case.node} nvidia-smi -q -d PERFORMANCE -i {mine.index}",
        )


def _is_slower_link(mine: str, theirs: str) -> bool:
    """By what stands before the `of`: `gen 3 x8`, each generation twice as fast."""
    rates = [_link_rate(text.split(" of ")[0]) for text in (mine, theirs)]
    return rates[0] < rates[1]


def _link_rate(words: str) -> int:
    gen, _, width = words.removeprefix("gen ").partition(" x")
    return int(width) << int(gen) if gen.isdecimal() and width.isdecimal() else 0


def _holders(case: Case) -> Iterator[Clue]:
    if case.me.gpu_holders and not any(peer.gpu_holders for peer in case.peers):
        yield Clue(
            cause="other_load",
            sentence=f"before the measurement its GPU was held by {', '.join(case.me.gpu_holders)}",
            hint=f"see whose it is, and whether it may go: ssh {case.node} nvidia-smi",
        )


def _stolen(case: Case) -> Iterator[Clue]:
    mine, theirs = _known(case.use, "cpu_steal_percent"), _median(one.cpu_steal_percent for one in case.others)
    if mine is not None and theirs is not None and mine >= theirs + _STOLEN_MORE_PERCENT:
        yield Clue(
            cause="cpu",
            sentence=f"the hypervisor took {mine:.0f} % of {case.node}'s processor time where {case.they} lost "
            f"{theirs:.0f} %",
            hint=f"{case.node} shares its processors with other virtual machines: give it dedicated ones",
        )


def _others_load(case: Case) -> Iterator[Clue]:
    mine = _others_cores(case.me, case.use)
    theirs = _median(_others_cores(peer, peer.use.get(case.peer_phase)) for peer in case.peers)
    if mine is None or case.me.node_cores is None or mine < (theirs or 0.0) + _OTHERS_MORE * case.me.node_cores:
        return
    beside = f" where they had {theirs:.1f} of those of {case.they}" if theirs is not None else ""
    yield Clue(
        cause="other_load",
        sentence=f"other processes had {mine:.1f} of {case.node}'s {case.me.node_cores} cores{beside}",
        hint=f"see what else runs there: ssh {case.node} top",
    )


def _software(case: Case) -> Iterator[Clue]:
    for name, words in (("torch", "torch"), ("cuda", "torch built with CUDA"), ("capability", "kernels for")):
        mine, theirs = getattr(case.me, name), {getattr(peer, name) for peer in case.peers}
        if mine is not None and None not in theirs and mine not in theirs:
            yield Clue(
                cause="software",
                sentence=f"{case.node} has {words} {mine} where {case.they} had {', '.join(sorted(map(str, theirs)))}",
                hint=f"bring the training environment of {case.node} to that of the others, and measure again",
            )


_LOOKS: tuple[Callable[[Case], Iterator[Clue]], ...] = (
    _device,
    _quota,
    _threads,
    _gpu,
    _holders,
    _stolen,
    _others_load,
    _pcie,
    _software,
)


def _others_cores(worker: BenchWorker, use: WorkerUse | None) -> float | None:
    """Cores of the node that were busy and not for the job, which may be confined to some of them."""
    busy, job = _known(use, "cpu_busy_percent"), _known(use, "job_cores")
    if busy is None or job is None or worker.node_cores is None:
        return None
    return max(0.0, busy / 100 * worker.node_cores - job)


def _gpu_of(use: WorkerUse | None) -> GpuUse | None:
    return use.gpu if use is not None else None


def _known(use: WorkerUse | None, name: str) -> float | None:
    value: float | None = getattr(use, name, None)
    return value


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
