"""Causes of a slow device: differences from its peers, or between phases. Pure.

`judge` finds slow devices; `likely_causes` judges machines and GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from multinode.bench.figures import BenchWorker, WorkerUse
from multinode.profile.figures import LikelyCause, Peers
from multinode.profile.likely_causes import THROTTLES, Beside, compare_machines
from multinode.stats.estimate import known_median

_FULL_PERCENT = 90
# Share of a worker's cores below which, with all cores of the node busy, it shares them.
_SHARED_BELOW = 0.8
# Without peers: shares of the maximum clocks, and of the time.
_SLOWER_THAN_MOST = 0.9
_THROTTLED = 0.2
# Of the node's cores.
_OTHERS_MORE = 0.25
_FEWER_CORES = 0.9
_HOLDER = "find the process, and whether you may stop it: "
_NOTHING = WorkerUse(seconds=0.0)


class SlowDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A slow device and its peers, or itself in another phase."""

    node: str
    me: BenchWorker  # the slow worker
    phase: str  # in which it was slow
    they: Peers  # the peers; `peers` their workers
    peers: tuple[BenchWorker, ...]
    peer_phase: str | None = None  # their phase; the same if empty
    write_hint: Callable[[str], str] = str  # adapts a hint to the way the node is reached

    @property
    def use(self) -> WorkerUse:
        """Use of the device and its node."""
        return self.me.use.get(self.phase, _NOTHING)

    @property
    def others(self) -> tuple[WorkerUse, ...]:
        """Use of the peers'."""
        return tuple(peer.use.get(self.peer_phase or self.phase, _NOTHING) for peer in self.peers)

    @property
    def beside(self) -> Beside:
        """Its machine and theirs."""
        return Beside(
            node=self.node,
            they=self.they,
            use=self.use,
            others=self.others,
            gpus=[self.use.gpu] if self.use.gpu is not None else [],
            peers=[use.gpu for use in self.others if use.gpu is not None],
            clocks_tell=False,
            write_hint=self.write_hint,
        )


def find_causes(case: SlowDevice) -> tuple[LikelyCause, ...]:
    """All differences, the likeliest cause first."""
    return (
        *_unlike(case, "device"),
        *compare_machines(case.beside),
        *_threads(case),
        *_holders(case),
        *_others_load(case),
        *_unlike(case, "software"),
    )


def sensor_causes(worker: BenchWorker) -> Iterator[LikelyCause]:
    """Causes according to a GPU's own sensors."""
    gpu = next((use.gpu for use in worker.use.values() if use.gpu is not None), None)
    if worker.gpu_holders:
        holders = ", ".join(worker.gpu_holders)
        yield LikelyCause(
            cause="other_load",
            code="own_gpu_in_use",
            figures={"holders": holders},
            sentence=f"before the measurement {holders} used it",
            hint=f"{_HOLDER}nvidia-smi",
        )
    if gpu is None:
        return
    for throttle in THROTTLES:
        share = throttle.share(gpu)
        if share >= _THROTTLED:
            yield LikelyCause(
                cause=throttle.cause,
                code=f"own_{throttle.cause}",
                figures={"throttled_share": share},
                sentence=f"its clocks were throttled ({throttle.name}) for {share:.0%} of the time",
                hint="nvidia-smi -q -d TEMPERATURE,POWER,PERFORMANCE",
            )
    clock, most = gpu.sm_clock_mhz, gpu.sm_clock_max_mhz
    if clock is not None and most is not None and clock < _SLOWER_THAN_MOST * most:
        yield LikelyCause(
            cause="gpu_clocks",
            code="own_gpu_clocks",
            figures={"sm_clock_mhz": clock, "sm_clock_max_mhz": most},
            sentence=f"it ran at {clock:.0f} of {most:.0f} MHz",
            hint="nvidia-smi -q -d CLOCK,PERFORMANCE; nvidia-smi -rgc resets manually set clocks",
        )


def usual_cause(kind: str) -> LikelyCause:
    """The usual causes of a GPU below its data sheet in products (`matmul`) or `memory`."""
    clocks = kind == "matmul"
    return LikelyCause(
        cause="usual",
        code=f"usual_{kind}",
        sentence=(
            "usual causes are a lowered power limit, heat, manually set clocks, other users of the GPU, and a torch "
            "build without kernels for it"
        )
        if clocks
        else "usual causes are manually set memory clocks, optional error correction, and other users of the GPU",
        hint=f"nvidia-smi -q -d CLOCK,{'POWER,PERFORMANCE' if clocks else 'ECC'} on the node while bench runs",
    )


def shared_processors(case: SlowDevice) -> LikelyCause | None:
    """Fully busy processors that other processes use too."""
    worker, got, busy = case.me, case.use.job_cores, case.use.cpu_busy_percent
    if worker.device != "cpu" or worker.cores is None or got is None or busy is None:
        return None
    if busy < _FULL_PERCENT or got >= _SHARED_BELOW * worker.cores:
        return None
    cores = worker.node_cores or worker.cores
    # If its workers may use only some of them.
    own = None if cores == worker.cores else worker.cores
    used = f"{got:.1f} of {'them' if own is None else f'the {own} available to them'}"
    return case.beside.cause(
        "shared_processors",
        "shared_processors",
        f"all {cores} cores visible to {case.node} were busy, but its workers used {used}",
        "nodes on one machine share its cores: compare them alone",
        job_cores=got,
        node_cores=cores,
        cores=own,
    )


def _threads(case: SlowDevice) -> Iterator[LikelyCause]:
    if case.me.device != "cpu":
        return
    node = case.node
    texts = {
        "threads": (
            "threads per worker",
            f"set env.OMP_NUM_THREADS= in the hostfile to the same value for every node, including {node}",
        ),
        "cores": (
            "cores available to a worker",
            f"see the cores available to its workers: ssh {node} nproc; a cpuset or taskset reduces them",
        ),
    }
    for name, (meaning, hint) in texts.items():
        mine, theirs = getattr(case.me, name), known_median(getattr(peer, name) for peer in case.peers)
        if mine is not None and theirs is not None and mine < _FEWER_CORES * theirs:
            sentence = f"{meaning}: {mine} on {node}, {theirs:g} on {case.they}"
            yield case.beside.cause("threads", f"few_{name}", sentence, hint, **{name: mine, f"peers_{name}": theirs})


def _holders(case: SlowDevice) -> Iterator[LikelyCause]:
    if case.me.gpu_holders and not any(peer.gpu_holders for peer in case.peers):
        holders = ", ".join(case.me.gpu_holders)
        sentence = f"before the measurement {holders} used its GPU"
        hint = f"{_HOLDER}ssh {case.node} nvidia-smi"
        yield case.beside.cause("other_load", "gpu_in_use", sentence, hint, holders=holders)


def _others_load(case: SlowDevice) -> Iterator[LikelyCause]:
    mine = _others_cores(case.me, case.use)
    theirs = known_median(map(_others_cores, case.peers, case.others))
    if mine is None or case.me.node_cores is None or mine < (theirs or 0.0) + _OTHERS_MORE * case.me.node_cores:
        return
    there = f", {theirs:.1f} on {case.they}" if theirs is not None else ""
    yield case.beside.cause(
        "other_load",
        "other_load",
        f"other processes used {mine:.1f} of {case.node}'s {case.me.node_cores} cores{there}",
        f"see what else runs there: ssh {case.node} top",
        others_cores=mine,
        peers_others_cores=theirs,
        node_cores=case.me.node_cores,
    )


def _unlike(case: SlowDevice, cause: str) -> Iterator[LikelyCause]:
    hint = (
        "the slower device sets the pace of a training: train on identical devices, or give it less work"
        if cause == "device"
        else f"install the versions of the other nodes on {case.node}, and measure again"
    )
    for name, meaning in _UNLIKE[cause].items():
        mine, theirs = getattr(case.me, name), {getattr(peer, name) for peer in case.peers}
        if mine is not None and None not in theirs and mine not in theirs:
            others = ", ".join(sorted(map(str, theirs)))
            sentence = f"{case.node} has {meaning}{mine}, {case.they} {others}"
            yield case.beside.cause(
                cause, f"other_{name}", sentence, hint, **{name: str(mine), f"peers_{name}": others}
            )


_UNLIKE = {
    "device": {"name": ""},
    "software": {"torch": "torch ", "cuda": "torch built with CUDA ", "capability": "kernels for "},
}


def _others_cores(worker: BenchWorker, use: WorkerUse) -> float | None:
    if use.cpu_busy_percent is None or use.job_cores is None or worker.node_cores is None:
        return None
    return max(0.0, use.cpu_busy_percent / 100 * worker.node_cores - use.job_cores)
