"""Bench causes: what differs between a slow device and its peers, or between all at once and one alone. Pure.

Who is slow is `slow_devices`'. What machines and their GPUs say is judged by the table of `telemetry.likely_causes`.
The words are `profile.words`'.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from multinode.bench.figures import BenchWorker, WorkerUse
from multinode.profile.likely_causes import (
    THROTTLES,
    Beside,
    LikelyCause,
    Peers,
    compare_machines,
    known_figures,
)
from multinode.stats.estimate import known_median

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
        they: the others; `peers` their workers.
        peer_phase: in which they were not slow; the same without.
    """

    node: str
    me: BenchWorker
    phase: str
    they: Peers
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

    @property
    def beside(self) -> Beside:
        """Its machine beside theirs."""
        return Beside(
            node=self.node,
            they=self.they,
            use=self.use,
            others=self.others,
            gpus=[self.use.gpu] if self.use.gpu is not None else [],
            peers=[use.gpu for use in self.others if use.gpu is not None],
            clocks_tell=False,
        )


def find_causes(case: Case) -> tuple[LikelyCause, ...]:
    """All that differs, the likeliest cause first."""
    return (
        *_unlike(case, "device"),
        *compare_machines(case.beside),
        *_threads(case),
        *_holders(case),
        *_others_load(case),
        *_unlike(case, "software"),
    )


def sensor_causes(worker: BenchWorker) -> Iterator[LikelyCause]:
    """What a GPU's own sensors say, beside no other."""
    gpu = next((use.gpu for use in worker.use.values() if use.gpu is not None), None)
    if worker.gpu_holders:
        holders = ", ".join(worker.gpu_holders)
        yield LikelyCause(cause="other_load", code="own_gpu_in_use", figures={"holders": holders})
    if gpu is None:
        return
    for one in THROTTLES:
        if one.share(gpu) >= _THROTTLED:
            figures = known_figures(throttled_share=one.share(gpu))
            yield LikelyCause(cause=one.cause, code=f"own_{one.cause}", figures=figures)
    clock, most = gpu.sm_clock_mhz, gpu.sm_clock_max_mhz
    if clock is not None and most is not None and clock < _SLOWER_THAN_MOST * most:
        figures = known_figures(sm_clock_mhz=clock, sm_clock_max_mhz=most)
        yield LikelyCause(cause="gpu_clocks", code="own_gpu_clocks", figures=figures)


def shared_processors(case: Case) -> LikelyCause | None:
    """Processors that are all busy, of which a node's own workers have a part: others compute on them."""
    worker, got, busy = case.me, case.use.job_cores, case.use.cpu_busy_percent
    if worker.device != "cpu" or worker.cores is None or got is None or busy is None:
        return None
    if busy < _FULL_PERCENT or got >= _SHARED_BELOW * worker.cores:
        return None
    return case.beside.cause(
        "shared_processors",
        "shared_processors",
        job_cores=got,
        node_cores=worker.node_cores or worker.cores,
        # Where its workers may run on some of them only.
        cores=None if worker.node_cores in {None, worker.cores} else worker.cores,
    )


def _threads(case: Case) -> Iterator[LikelyCause]:
    if case.me.device != "cpu":
        return
    for name in ("threads", "cores"):
        mine, theirs = getattr(case.me, name), known_median(getattr(peer, name) for peer in case.peers)
        if mine is not None and theirs is not None and mine < _FEWER_CORES * theirs:
            yield case.beside.cause("threads", f"few_{name}", **{name: mine, f"peers_{name}": theirs})


def _holders(case: Case) -> Iterator[LikelyCause]:
    if case.me.gpu_holders and not any(peer.gpu_holders for peer in case.peers):
        yield case.beside.cause("other_load", "gpu_in_use", holders=", ".join(case.me.gpu_holders))


def _others_load(case: Case) -> Iterator[LikelyCause]:
    mine = _others_cores(case.me, case.use)
    theirs = known_median(map(_others_cores, case.peers, case.others))
    if mine is None or case.me.node_cores is None or mine < (theirs or 0.0) + _OTHERS_MORE * case.me.node_cores:
        return
    yield case.beside.cause(
        "other_load",
        "other_load",
        others_cores=mine,
        peers_others_cores=theirs,
        node_cores=case.me.node_cores,
    )


def _unlike(case: Case, cause: str) -> Iterator[LikelyCause]:
    """What none of the others has."""
    for name in _UNLIKE[cause]:
        mine, theirs = getattr(case.me, name), {getattr(peer, name) for peer in case.peers}
        if mine is not None and None not in theirs and mine not in theirs:
            figures = {name: str(mine), f"peers_{name}": ", ".join(sorted(map(str, theirs)))}
            yield case.beside.cause(cause, f"other_{name}", **figures)


_UNLIKE = {"device": ("name",), "software": ("torch", "cuda", "capability")}


def _others_cores(worker: BenchWorker, use: WorkerUse) -> float | None:
    """Cores of the node that were busy and not for the job, which may be confined to some of them."""
    if use.cpu_busy_percent is None or use.job_cores is None or worker.node_cores is None:
        return None
    return max(0.0, use.cpu_busy_percent / 100 * worker.node_cores - use.job_cores)
