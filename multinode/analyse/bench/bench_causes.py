"""Bench causes: what differs between a slow device and its peers, or between all at once and one alone. Pure.

Who is slow is `slow_devices`'. What machines and their GPUs say is judged by the table of `telemetry.likely_causes`.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from multinode.analyse.bench.bench_figures import BenchWorker, WorkerUse
from multinode.analyse.stats.spread import known_median
from multinode.analyse.telemetry.likely_causes import THROTTLES, Beside, LikelyCause, compare_machines

__all__ = ["Case", "find_causes", "sensor_causes", "shared_processors"]

_FULL_PERCENT = 90
# Of the cores that a worker may run on: who has fewer of them, while all of the node are busy, shares them.
_SHARED_BELOW = 0.8
# Beside no other device: of the clocks that it could have, and of the time.
_SLOWER_THAN_MOST = 0.9
_THROTTLED = 0.2
# Of the node's cores.
_OTHERS_MORE = 0.25
_FEWER_CORES = 0.9
_NOTHING = WorkerUse(seconds=0.0)


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A slow device beside its peers, or beside itself in another phase.

    Attributes:
        me: the slow worker.
        phase: in which it was slow.
        they: the others in words; `peers` their workers.
        peer_phase: in which they were not slow; the same without.
    """

    node: str
    me: BenchWorker
    phase: str
    they: str
    peers: tuple[BenchWorker, ...]
    peer_phase: str | None = None

    @property
    def use(self) -> WorkerUse:
        """What the device and its node did."""
        return self.me.use.get(self.phase, _NOTHING)

    @property
    def others(self) -> tuple[WorkerUse, ...]:
        """What those of the others did."""
        return tuple(peer.use.get(self.peer_phase or self.phase, _NOTHING) for peer in self.peers)


def find_causes(case: Case) -> tuple[LikelyCause, ...]:
    """All that differs, the likeliest cause first."""
    beside = Beside(
        node=case.node,
        they=case.they,
        use=case.use,
        others=case.others,
        gpus=[case.use.gpu] if case.use.gpu is not None else [],
        peers=[use.gpu for use in case.others if use.gpu is not None],
        clocks_tell=False,
    )
    return (
        *_unlike(case, "device"),
        *compare_machines(beside),
        *_threads(case),
        *_holders(case),
        *_others_load(case),
        *_unlike(case, "software"),
    )


def sensor_causes(worker: BenchWorker) -> Iterator[LikelyCause]:
    """What a GPU's own sensors say, beside no other."""
    gpu = next((use.gpu for use in worker.use.values() if use.gpu is not None), None)
    if worker.gpu_holders:
        yield LikelyCause(
            cause="other_load",
            sentence=f"before the measurement it was used by {', '.join(worker.gpu_holders)}",
            hint="see whose process it is, and whether it may be ended: nvidia-smi",
        )
    if gpu is None:
        return
    for one in THROTTLES:
        if one.share(gpu) >= _THROTTLED:
            yield LikelyCause(
                cause=one.cause,
                sentence=f"its clocks were throttled by {one.what} for {one.share(gpu):.0%} of the time",
                hint="nvidia-smi -q -d TEMPERATURE,POWER,PERFORMANCE",
            )
    clock, most = gpu.sm_clock_mhz, gpu.sm_clock_max_mhz
    if clock is not None and most is not None and clock < _SLOWER_THAN_MOST * most:
        yield LikelyCause(
            cause="gpu_clocks",
            sentence=f"it ran at {clock:.0f} of {most:.0f} MHz",
            hint="nvidia-smi -q -d CLOCK,PERFORMANCE; nvidia-smi -rgc resets clocks that were set by hand",
        )


def shared_processors(case: Case) -> LikelyCause | None:
    """Processors that are all busy, of which a node's own workers have a part: others compute on them."""
    worker, got, busy = case.me, case.use.job_cores, case.use.cpu_busy_percent
    if worker.device != "cpu" or worker.cores is None or got is None or busy is None:
        return None
    if busy < _FULL_PERCENT or got >= _SHARED_BELOW * worker.cores:
        return None
    own = "them" if worker.node_cores in {None, worker.cores} else f"the {worker.cores} that they may run on"
    return LikelyCause(
        cause="shared_processors",
        sentence=f"all {worker.node_cores or worker.cores} cores that {case.node} sees were busy, and its own workers "
        f"used {got:.1f} of {own}",
        hint="nodes on one machine share its cores: compare them alone",
    )


def _threads(case: Case) -> Iterator[LikelyCause]:
    if case.me.device != "cpu":
        return
    for name, hint in (
        ("threads", f"set env.OMP_NUM_THREADS= in the hostfile to the same for every node, {case.node} included"),
        ("cores", f"see what its workers may run on: ssh {case.node} nproc; a cpuset or taskset takes cores away"),
    ):
        mine, theirs = getattr(case.me, name), known_median(getattr(peer, name) for peer in case.peers)
        if mine is not None and theirs is not None and mine < _FEWER_CORES * theirs:
            yield LikelyCause(
                cause="threads",
                sentence=f"{case.node} uses {mine} {name}, {case.they} {theirs:g}",
                hint=hint,
            )


def _holders(case: Case) -> Iterator[LikelyCause]:
    if case.me.gpu_holders and not any(peer.gpu_holders for peer in case.peers):
        yield LikelyCause(
            cause="other_load",
            sentence=f"before the measurement its GPU was used by {', '.join(case.me.gpu_holders)}",
            hint=f"see whose process it is, and whether it may be ended: ssh {case.node} nvidia-smi",
        )


def _others_load(case: Case) -> Iterator[LikelyCause]:
    mine = _others_cores(case.me, case.use)
    theirs = known_median(map(_others_cores, case.peers, case.others))
    if mine is None or case.me.node_cores is None or mine < (theirs or 0.0) + _OTHERS_MORE * case.me.node_cores:
        return
    beside = f", {theirs:.1f} of those of {case.they}" if theirs is not None else ""
    yield LikelyCause(
        cause="other_load",
        sentence=f"other processes used {mine:.1f} of {case.node}'s {case.me.node_cores} cores{beside}",
        hint=f"see what else runs there: ssh {case.node} top",
    )


def _unlike(case: Case, cause: str) -> Iterator[LikelyCause]:
    """What none of the others has."""
    fields, hint = _UNLIKE[cause]
    for name, words in fields.items():
        mine, theirs = getattr(case.me, name), {getattr(peer, name) for peer in case.peers}
        if mine is not None and None not in theirs and mine not in theirs:
            yield LikelyCause(
                cause=cause,
                sentence=f"{case.node} has {words}{mine}, {case.they} {', '.join(sorted(map(str, theirs)))}",
                hint=hint.format(node=case.node),
            )


_UNLIKE = {
    "device": (
        {"name": ""},
        "in one training the slower device sets the pace: train on equal devices, or give it less work",
    ),
    "software": (
        {"torch": "torch ", "cuda": "torch built with CUDA ", "capability": "kernels for "},
        "install the same versions on {node} as on the others, and measure again",
    ),
}


def _others_cores(worker: BenchWorker, use: WorkerUse) -> float | None:
    """Cores of the node that were busy and not for the job, which may be confined to some of them."""
    if use.cpu_busy_percent is None or use.job_cores is None or worker.node_cores is None:
        return None
    return max(0.0, use.cpu_busy_percent / 100 * worker.node_cores - use.job_cores)
