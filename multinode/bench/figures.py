"""The document of `bench`: nodes, workers, tests, speeds. Data only."""

from __future__ import annotations

import msgspec

from multinode.profile.likely_causes import LikelyCause, Peers
from multinode.profile.machine_use import GpuUse
from multinode.stats.estimate import Bounds


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of a device in one test and phase."""

    value: float  # in the test's unit: median of the timings; over repeats, the mean of the medians
    interval: Bounds | None = None  # its 95% confidence interval
    cv: float  # standard deviation of the timings over their mean
    timings: int
    of_peak: float | None = None  # share of the data sheet's figure; None if unknown
    of_peers: float | None = None  # share of the median of like devices elsewhere; None without any
    slow: bool = False  # whether that share is too low, and its interval excludes 1
    # whether launching a call from Python takes as long as the call: the figure is then a lower bound
    launch_bound: bool = False


class BenchTest(msgspec.Struct, frozen=True, kw_only=True):
    """One test on one device."""

    kind: str  # `matmul`, `memory`, `bus` or `layers`
    name: str  # in words; likewise `label`, with its type
    label: str
    dtype: str
    size: str  # rows of the matrices; of a layer batch x sequence; of memory the buffer in MiB
    unit: str  # of its speeds: `TFLOP/s` (1e12) or `GB/s` (1e9), read and written
    peak: float | None = None  # by the data sheet, in `unit`; None if unknown, with `peak_reason`
    peak_source: str = ""
    peak_reason: str = ""
    alone: Speed | None = None  # while no other worker of any node measured, if that was possible
    together: Speed | None = None  # while all of them did
    error: str | None = None  # why it could not be measured, if so

    @property
    def key(self) -> tuple[str, str]:
        """Identifies the same test of another device."""
        return self.label, self.size

    @property
    def speeds(self) -> tuple[Speed, ...]:
        """Its speeds in the measured phases."""
        return tuple(speed for speed in (self.alone, self.together) if speed is not None)

    def speed(self, phase: str) -> Speed | None:
        """Its speed in a phase."""
        return self.alone if phase == "alone" else self.together


class WorkerUse(msgspec.Struct, frozen=True, kw_only=True):
    """Use of a worker's device and node during one phase; None if unknown."""

    seconds: float  # duration of its measurement
    gpu: GpuUse | None = None
    # of all cores of the node, mean; likewise `cpu_steal_percent`, taken by the hypervisor
    cpu_busy_percent: float | None = None
    cpu_steal_percent: float | None = None
    job_cores: float | None = None  # cores used by all workers of the node, mean
    quota_cores: float | None = None  # processors that the cgroup allows; None also if unlimited
    throttled_share: float | None = None  # fraction of time in which the cgroup was throttled


class BenchWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One worker and its device."""

    rank: int  # on its node
    device: str  # `cpu` or `cuda`
    name: str | None = None  # of the device; None if unknown
    gpu: int | None = None  # index of the GPU; None for a CPU, or if unknown
    threads: int | None = None  # of torch, for a CPU
    cores: int | None = None  # that it may run on; `node_cores`, all of its node
    node_cores: int | None = None
    capability: str | None = None  # target of its kernels
    torch: str | None = None  # version; likewise `cuda`
    cuda: str | None = None
    tests: tuple[BenchTest, ...] = ()  # in order of measurement
    use: dict[str, WorkerUse] = {}  # of device and node, by phase
    gpu_holders: tuple[str, ...] = ()  # other processes that held memory of its GPU before, in words


class BenchNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node."""

    node: str
    node_rank: int
    workers: tuple[BenchWorker, ...] = ()  # on it, as far as they identified themselves
    runs: dict[str, str] = {}  # the run of each phase
    failures: dict[str, str] = {}  # reason of failed phases, by phase

    @property
    def is_measured(self) -> bool:
        """Whether anything was measured."""
        return any(test.speeds for worker in self.workers for test in worker.tests)


class Anomaly(msgspec.Struct, frozen=True, kw_only=True):
    """A device below its expected speed: a sentence, and the differences, likeliest first."""

    text: str = ""
    likely_causes: tuple[LikelyCause, ...] = msgspec.field(name="clues")


class Slow(Anomaly, frozen=True, kw_only=True):
    """A node, or a worker of it, slower than its peers."""

    node: str
    rank: int | None = None  # of the worker, if the others of the node are not slow; None means all
    ratios: dict[str, dict[str, float]]  # median share of the peers' speed, by phase and kind of test
    compared_with: Peers | None = None  # the kind of peers; `peers` in words
    peers: str = ""
    # the likeliest: `cpu`, `threads`, `gpu_heat`, `gpu_power`, `gpu_clocks`, `pcie`, `other_load`, `device`,
    # `software`; otherwise `unknown`
    cause: str


class Drop(Anomaly, frozen=True, kw_only=True):
    """Workers that are slower when all measure than alone."""

    nodes: tuple[str, ...]
    ratio: float  # median over workers and tests of the speed together over that alone
    cause: str  # `gpu_heat`, `gpu_power`, `gpu_clocks`, `shared_processors`, `cpu`, `unknown`


class BelowSheet(Anomaly, frozen=True, kw_only=True):
    """Devices far below their data sheet."""

    device: str
    label: str  # of their best test
    of_peak: float  # its share of the data sheet's figure
    workers: tuple[str, ...]  # as `node0/1`


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `bench`."""

    schema: str = "multinode.bench/1"
    run_id: str
    phases: tuple[str, ...]  # in order
    nodes: tuple[BenchNode, ...]  # in node-rank order
    slow: tuple[Slow, ...] = ()  # nodes and workers slower than their peers, the slowest first
    drops: tuple[Drop, ...] = ()
    below_sheet: tuple[BelowSheet, ...] = ()
    verdict: tuple[str, ...] = ()  # main findings, one sentence each
    notes: tuple[str, ...] = ()  # how it was measured
    # unmeasured parts when this was stored, in order, the first possibly in progress; empty when complete
    left: tuple[str, ...] = ()

    @property
    def workers(self) -> tuple[BenchWorker, ...]:
        """Workers of all nodes."""
        return tuple(worker for node in self.nodes for worker in node.workers)

    @property
    def anomalies(self) -> tuple[Anomaly, ...]:
        """All findings."""
        return (*self.slow, *self.drops, *self.below_sheet)
