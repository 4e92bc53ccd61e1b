"""Causes of a slow device: differences from its peers, or between phases. Pure.

`judge` finds slow devices; `likely_causes` judges machines and GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from multinode.bench.figures import BenchWorker, WorkerUse
from multinode.profile.figures import LikelyCause, Peers
from multinode.profile.likely_causes import HEAT, POWER_LIMIT, Beside, CauseRule, CauseRules, compare_machines
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
_NOTHING = WorkerUse(seconds=0.0)

_PACE = "the slowest device limits the training speed: train on identical devices, or give the slow device less work"
_SAME_VERSIONS = "install the same versions on {node!s} as on the other nodes, and measure again"
_HOLDER = "find the process, and stop it if you are allowed to: "

CAUSES = CauseRules("Likely causes: a device in bench")
_OTHER_DEVICE = CAUSES.cause(
    "other_name",
    cause="device",
    about="a device that is a different model from its peers",
    message="{node} has {name}, compared with {peers_name} on {they}",
    hint=_PACE,
    figures=("name", "peers_name"),
)
_OTHER_VERSIONS = (
    CAUSES.cause(
        "other_torch",
        cause="software",
        about="a node with a different version of torch from its peers",
        message="{node} has torch {torch}, compared with {peers_torch} on {they}",
        hint=_SAME_VERSIONS,
        figures=("torch", "peers_torch"),
    ),
    CAUSES.cause(
        "other_cuda",
        cause="software",
        about="a node whose torch was built with a different version of CUDA from that of its peers",
        message="torch on {node} was built with CUDA {cuda}, compared with {peers_cuda} on {they}",
        hint=_SAME_VERSIONS,
        figures=("cuda", "peers_cuda"),
    ),
    CAUSES.cause(
        "other_capability",
        cause="software",
        about="a node whose torch has kernels for a different architecture from that of its peers",
        message="torch on {node} has kernels for {capability}, compared with {peers_capability} on {they}",
        hint=_SAME_VERSIONS,
        figures=("capability", "peers_capability"),
    ),
)
_FEW_THREADS = CAUSES.cause(
    "few_threads",
    cause="threads",
    about="a node with fewer threads per worker than its peers",
    message="the number of threads per worker was {threads} on {node}, compared with {peers_threads:g} on {they}",
    hint="set env.OMP_NUM_THREADS= in the hostfile to the same value for every node, including {node!s}",
    figures=("threads", "peers_threads"),
)
_FEW_CORES = CAUSES.cause(
    "few_cores",
    cause="threads",
    about="a node with fewer cores per worker than its peers",
    message="a worker on {node} may use {cores} cores, compared with {peers_cores:g} on {they}",
    hint="check whether a cpuset or taskset limits the workers to fewer cores: ssh {node} nproc",
    figures=("cores", "peers_cores"),
)
_GPU_IN_USE = CAUSES.cause(
    "gpu_in_use",
    cause="other_load",
    about="a worker whose GPU was in use by another process, while the GPUs of its peers were free",
    message="{holders} used the GPU before the measurement",
    hint=_HOLDER + "ssh {node} nvidia-smi",
    figures=("holders",),
)
_OTHER_LOAD = CAUSES.cause(
    "other_load",
    about="a node on which other processes used more cores than on its peers",
    message="other processes used {others_cores:.1f} of {node}'s {node_cores} cores{there}",
    hint="check what else runs there: ssh {node} top",
    figures=("others_cores", "peers_others_cores", "node_cores"),
)
_SHARED_PROCESSORS = CAUSES.cause(
    "shared_processors",
    about="a node that shares its cores with other nodes on the same machine",
    message="all {node_cores} cores that {node} sees were busy, but its workers used only {job_cores:.1f} of {them}",
    hint="nodes on one machine share its cores: measure them one at a time",
    figures=("job_cores", "node_cores", "cores"),
)
_OWN_GPU_IN_USE = CAUSES.cause(
    "own_gpu_in_use",
    cause="other_load",
    about="a GPU below the speed in its data sheet, if another process used it",
    message="{holders} used the GPU before the measurement",
    hint=_HOLDER + "nvidia-smi",
    figures=("holders",),
)
_OWN_HEAT = CAUSES.cause(
    "own_gpu_heat",
    cause="gpu_heat",
    about="a GPU below the speed in its data sheet, if heat throttled it according to its sensors",
    message="heat throttled the GPU for {throttled_share:.0%} of the time",
    hint="nvidia-smi -q -d TEMPERATURE,POWER,PERFORMANCE",
    figures=("throttled_share",),
)
_OWN_POWER = CAUSES.cause(
    "own_gpu_power",
    cause="gpu_power",
    about="a GPU below the speed in its data sheet, if a power limit throttled it according to its sensors",
    message="a power limit throttled the GPU for {throttled_share:.0%} of the time",
    hint="nvidia-smi -q -d TEMPERATURE,POWER,PERFORMANCE",
    figures=("throttled_share",),
)
_OWN_CLOCKS = CAUSES.cause(
    "own_gpu_clocks",
    cause="gpu_clocks",
    about="a GPU below the speed in its data sheet, if its clocks were low",
    message="the GPU ran at {sm_clock_mhz:.0f} of {sm_clock_max_mhz:.0f} MHz",
    hint="nvidia-smi -q -d CLOCK,PERFORMANCE; to reset manually set clocks: nvidia-smi -rgc",
    figures=("sm_clock_mhz", "sm_clock_max_mhz"),
)
USUAL = {
    "matmul": CAUSES.cause(
        "usual_matmul",
        cause="usual",
        about="no cause found: the usual causes of slow matrix products",
        message="usual causes are a lowered power limit, heat, manually set clocks, other processes on the GPU, or a "
        "torch build without kernels for this GPU",
        hint="run this on the node during bench: nvidia-smi -q -d CLOCK,POWER,PERFORMANCE",
    ),
    "memory": CAUSES.cause(
        "usual_memory",
        cause="usual",
        about="no cause found: the usual causes of slow memory",
        message=(
            "usual causes are manually set memory clocks, optional error correction (ECC), or other processes on the "
            "GPU"
        ),
        hint="run this on the node during bench: nvidia-smi -q -d CLOCK,ECC",
    ),
}
"""The usual causes of a GPU below its data sheet, by kind of test."""


class SlowDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A slow device and its peers, or itself in another phase."""

    node: str
    me: BenchWorker  # the slow worker
    phase: str  # in which it was slow
    they: Peers  # the peers; `peers` their workers
    peers: tuple[BenchWorker, ...]
    peer_phase: str | None = None  # the peers' phase; None if it is `phase`
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
        *_unlike(case, _OTHER_DEVICE),
        *compare_machines(case.beside),
        *_threads(case),
        *_holders(case),
        *_others_load(case),
        *_unlike(case, *_OTHER_VERSIONS),
    )


def sensor_causes(worker: BenchWorker) -> Iterator[LikelyCause]:
    """Causes according to a GPU's own sensors."""
    gpu = next((use.gpu for use in worker.use.values() if use.gpu is not None), None)
    if worker.gpu_holders:
        yield _OWN_GPU_IN_USE.found(None, holders=", ".join(worker.gpu_holders))
    if gpu is None:
        return
    for throttle, rule in ((HEAT, _OWN_HEAT), (POWER_LIMIT, _OWN_POWER)):
        share = throttle.share(gpu)
        if share >= _THROTTLED:
            yield rule.found(None, throttled_share=share)
    clock, most = gpu.sm_clock_mhz, gpu.sm_clock_max_mhz
    if clock is not None and most is not None and clock < _SLOWER_THAN_MOST * most:
        yield _OWN_CLOCKS.found(None, sm_clock_mhz=clock, sm_clock_max_mhz=most)


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
    them = "them" if own is None else f"the {own} available to them"
    return case.beside.cause(_SHARED_PROCESSORS, job_cores=got, node_cores=cores, them=them, cores=own)


def _threads(case: SlowDevice) -> Iterator[LikelyCause]:
    if case.me.device != "cpu":
        return
    for name, rule in (("threads", _FEW_THREADS), ("cores", _FEW_CORES)):
        mine, theirs = getattr(case.me, name), known_median(getattr(peer, name) for peer in case.peers)
        if mine is not None and theirs is not None and mine < _FEWER_CORES * theirs:
            yield case.beside.cause(rule, **{name: mine, f"peers_{name}": theirs})


def _holders(case: SlowDevice) -> Iterator[LikelyCause]:
    if case.me.gpu_holders and not any(peer.gpu_holders for peer in case.peers):
        yield case.beside.cause(_GPU_IN_USE, holders=", ".join(case.me.gpu_holders))


def _others_load(case: SlowDevice) -> Iterator[LikelyCause]:
    mine = _others_cores(case.me, case.use)
    theirs = known_median(map(_others_cores, case.peers, case.others))
    if mine is None or case.me.node_cores is None or mine < (theirs or 0.0) + _OTHERS_MORE * case.me.node_cores:
        return
    there = f", compared with {theirs:.1f} on {case.they}" if theirs is not None else ""
    yield case.beside.cause(
        _OTHER_LOAD, others_cores=mine, peers_others_cores=theirs, there=there, node_cores=case.me.node_cores
    )


def _unlike(case: SlowDevice, *rules: CauseRule) -> Iterator[LikelyCause]:
    for rule in rules:
        name, _ = rule.figures
        mine, theirs = getattr(case.me, name), {getattr(peer, name) for peer in case.peers}
        if mine is not None and None not in theirs and mine not in theirs:
            others = ", ".join(sorted(map(str, theirs)))
            yield case.beside.cause(rule, **{name: str(mine), f"peers_{name}": others})


def _others_cores(worker: BenchWorker, use: WorkerUse) -> float | None:
    if use.cpu_busy_percent is None or use.job_cores is None or worker.node_cores is None:
        return None
    return max(0.0, use.cpu_busy_percent / 100 * worker.node_cores - use.job_cores)
