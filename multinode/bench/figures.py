"""The document of `bench`: nodes, workers, tests, speeds. Data only."""

from __future__ import annotations

import msgspec

from multinode.profile.likely_causes import LikelyCause, Peers
from multinode.profile.machine_use import GpuUse
from multinode.stats.estimate import Bounds


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of a device in one test and phase.

    Attributes:
        value: in the test's unit: median of the timings; over repeats, the mean of the medians.
        interval: its 95% confidence interval.
        cv: standard deviation of the timings over their mean.
        of_peak: share of the data sheet's figure; None if unknown.
        of_peers: share of the median of like devices elsewhere; None without any.
        slow: whether that share is too low, and its interval excludes 1.
        launch_bound: whether launching a call from Python takes as long as the call: the figure is then a lower bound.
    """

    value: float
    interval: Bounds | None = None
    cv: float
    timings: int
    of_peak: float | None = None
    of_peers: float | None = None
    slow: bool = False
    launch_bound: bool = False


class BenchTest(msgspec.Struct, frozen=True, kw_only=True):
    """One test on one device.

    Attributes:
        kind: `matmul`, `memory`, `bus` or `layers`.
        name: in words; likewise `label`, with its type.
        size: rows of the matrices; of a layer batch x sequence; of memory the buffer in MiB.
        unit: of its speeds: `TFLOP/s` (1e12) or `GB/s` (1e9), read and written.
        peak: by the data sheet, in `unit`; None if unknown, with `peak_reason`.
        alone: while no other worker of any node measured, if that was possible.
        together: while all of them did.
        error: why it could not be measured, if so.
    """

    kind: str
    name: str
    label: str
    dtype: str
    size: str
    unit: str
    peak: float | None = None
    peak_source: str = ""
    peak_reason: str = ""
    alone: Speed | None = None
    together: Speed | None = None
    error: str | None = None

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
    """Use of a worker's device and node during one phase; None if unknown.

    Attributes:
        seconds: duration of its measurement.
        cpu_busy_percent: of all cores of the node, mean; likewise `cpu_steal_percent`, taken by the hypervisor.
        job_cores: cores used by all workers of the node, mean.
        quota_cores: processors that the cgroup allows; None also if unlimited.
        throttled_share: fraction of time in which the cgroup was throttled.
    """

    seconds: float
    gpu: GpuUse | None = None
    cpu_busy_percent: float | None = None
    cpu_steal_percent: float | None = None
    job_cores: float | None = None
    quota_cores: float | None = None
    throttled_share: float | None = None


class BenchWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One worker and its device.

    Attributes:
        rank: on its node.
        device: `cpu` or `cuda`.
        name: of the device; None if unknown.
        gpu: index of the GPU; None for a CPU, or if unknown.
        threads: of torch, for a CPU.
        cores: that it may run on; `node_cores`, all of its node.
        capability: target of its kernels.
        torch: version; likewise `cuda`.
        tests: in order of measurement.
        use: of device and node, by phase.
        gpu_holders: other processes that held memory of its GPU before, in words.
    """

    rank: int
    device: str
    name: str | None = None
    gpu: int | None = None
    threads: int | None = None
    cores: int | None = None
    node_cores: int | None = None
    capability: str | None = None
    torch: str | None = None
    cuda: str | None = None
    tests: tuple[BenchTest, ...] = ()
    use: dict[str, WorkerUse] = {}
    gpu_holders: tuple[str, ...] = ()


class BenchNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node.

    Attributes:
        workers: on it, as far as they identified themselves.
        runs: the run of each phase.
        failures: reason of failed phases, by phase.
    """

    node: str
    node_rank: int
    workers: tuple[BenchWorker, ...] = ()
    runs: dict[str, str] = {}
    failures: dict[str, str] = {}

    @property
    def is_measured(self) -> bool:
        """Whether anything was measured."""
        return any(test.speeds for worker in self.workers for test in worker.tests)


class Anomaly(msgspec.Struct, frozen=True, kw_only=True):
    """A device below its expected speed: a sentence, and the differences, likeliest first."""

    text: str = ""
    likely_causes: tuple[LikelyCause, ...] = msgspec.field(name="clues")


class Slow(Anomaly, frozen=True, kw_only=True):
    """A node, or a worker of it, slower than its peers.

    Attributes:
        rank: of the worker, if the others of the node are not slow; None means all.
        ratios: median share of the peers' speed, by phase and kind of test.
        compared_with: the kind of peers; `peers` in words.
        cause: the likeliest: `cpu`, `threads`, `gpu_heat`, `gpu_power`, `gpu_clocks`, `pcie`, `other_load`, `device`,
            `software`; otherwise `unknown`.
    """

    node: str
    rank: int | None = None
    ratios: dict[str, dict[str, float]]
    compared_with: Peers | None = None
    peers: str = ""
    cause: str


class Drop(Anomaly, frozen=True, kw_only=True):
    """Workers that are slower when all measure than alone.

    Attributes:
        ratio: median over workers and tests of the speed together over that alone.
        cause: `gpu_heat`, `gpu_power`, `gpu_clocks`, `shared_processors`, `cpu`, `unknown`.
    """

    nodes: tuple[str, ...]
    ratio: float
    cause: str


class BelowSheet(Anomaly, frozen=True, kw_only=True):
    """Devices far below their data sheet.

    Attributes:
        label: of their best test.
        of_peak: its share of the data sheet's figure.
        workers: as `node0/1`.
    """

    device: str
    label: str
    of_peak: float
    workers: tuple[str, ...]


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `bench`.

    Attributes:
        phases: in order.
        nodes: in node-rank order.
        slow: nodes and workers slower than their peers, the slowest first.
        verdict: main findings, one sentence each.
        notes: how it was measured.
        left: unmeasured parts when this was stored, in order, the first possibly in progress; empty when complete.
    """

    schema: str = "multinode.bench/1"
    run_id: str
    phases: tuple[str, ...]
    nodes: tuple[BenchNode, ...]
    slow: tuple[Slow, ...] = ()
    drops: tuple[Drop, ...] = ()
    below_sheet: tuple[BelowSheet, ...] = ()
    verdict: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    @property
    def workers(self) -> tuple[BenchWorker, ...]:
        """Workers of all nodes."""
        return tuple(worker for node in self.nodes for worker in node.workers)

    @property
    def anomalies(self) -> tuple[Anomaly, ...]:
        """All findings."""
        return (*self.slow, *self.drops, *self.below_sheet)
