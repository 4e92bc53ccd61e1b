"""Bench figures: what `bench` found out, as its document has it: nodes, workers, tests, speeds. Data only."""

from __future__ import annotations

import msgspec

from multinode.profile.likely_causes import LikelyCause, Peers
from multinode.profile.machine_use import GpuUse
from multinode.stats.estimate import Bounds


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """How fast a device was in one test and phase.

    Attributes:
        value: in the test's unit: the median of the timings, of several repeats the mean of their medians.
        interval: its 95 % confidence interval.
        cv: standard deviation of the timings over their mean.
        of_peak: as a share of the data sheet's figure; None where that is not known.
        of_peers: as a share of the median of like devices elsewhere; None where there is none.
        slow: whether that is too little, and the interval of the share does not reach 1.
        launch_bound: whether a call on a GPU took so little that launching it from Python takes as long: the figure is
            then a lower bound of the GPU's.
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
        peak: by the data sheet, in `unit`; None where it is not known, with `peak_reason`.
        alone: while no other worker of any node measured; None where that was not, or could not be measured.
        together: while all of them did.
        error: why it could not be measured, as the node has it; None where it could.
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
        """What it has in common with the same test of another device."""
        return self.label, self.size

    @property
    def speeds(self) -> tuple[Speed, ...]:
        """Of the phases in which it was measured."""
        return tuple(speed for speed in (self.alone, self.together) if speed is not None)

    def speed(self, phase: str) -> Speed | None:
        """Its speed in a phase."""
        return self.alone if phase == "alone" else self.together


class WorkerUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker's device and node did while it measured in one phase; None is unknown.

    Attributes:
        seconds: for how long it measured.
        cpu_busy_percent: of all cores of the node, mean; likewise `cpu_steal_percent`, taken by the hypervisor.
        job_cores: cores that all workers of the node used, mean.
        quota_cores: processors that the control group allows; None is no limit, too.
        throttled_share: part of the time in which it had used them up.
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
        name: of the device; None is unknown.
        gpu: the GPU's index; None of a processor, or unknown.
        threads: that torch computes with; of a processor.
        cores: that it may run on; `node_cores`, all of its node.
        capability: what its kernels are built for.
        torch: version; likewise `cuda`.
        tests: in the order in which they were made.
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
        workers: on it, as far as they said what they are.
        runs: the run of each phase.
        failures: why a phase did not end well there, by phase.
    """

    node: str
    node_rank: int
    workers: tuple[BenchWorker, ...] = ()
    runs: dict[str, str] = {}
    failures: dict[str, str] = {}

    @property
    def is_measured(self) -> bool:
        """Whether anything was measured on it."""
        return any(test.speeds for worker in self.workers for test in worker.tests)


class Anomaly(msgspec.Struct, frozen=True, kw_only=True):
    """A device that is not as fast as it should be: a sentence, and what differs, likeliest first."""

    text: str = ""
    likely_causes: tuple[LikelyCause, ...] = msgspec.field(name="clues")


class Slow(Anomaly, frozen=True, kw_only=True):
    """A node, or one worker of it, that is slower than its peers.

    Attributes:
        rank: the worker's, where the others of the node are not slow; None is all of them.
        ratios: by phase and kind of test, the median share of what the peers reach.
        compared_with: who they are; `peers` in words.
        cause: the likeliest: `cpu`, `threads`, `gpu_heat`, `gpu_power`, `gpu_clocks`, `pcie`, `other_load`,
            `device`, `software`; `unknown` without any.
    """

    node: str
    rank: int | None = None
    ratios: dict[str, dict[str, float]]
    compared_with: Peers | None = None
    peers: str = ""
    cause: str


class Drop(Anomaly, frozen=True, kw_only=True):
    """Workers that are slower while all of them measure than each of them alone.

    Attributes:
        ratio: median over workers and tests of the speed together over that alone.
        cause: `gpu_heat`, `gpu_power`, `gpu_clocks`, `shared_processors`, `cpu`, `unknown`.
    """

    nodes: tuple[str, ...]
    ratio: float
    cause: str


class BelowSheet(Anomaly, frozen=True, kw_only=True):
    """Devices that stay far below their data sheet.

    Attributes:
        label: of the test in which they come closest.
        of_peak: the best share of the data sheet's figure.
        workers: whose, as `node0/1`.
    """

    device: str
    label: str
    of_peak: float
    workers: tuple[str, ...]


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `bench` found out.

    Attributes:
        phases: that were made, in this order.
        nodes: in node-rank order.
        slow: nodes and workers slower than their peers, the slowest first.
        verdict: what there is to say first, a sentence each.
        notes: how it was measured.
        left: what was not measured when this was stored, in order, and the first of it perhaps under way; empty of a
            bench that came to its end.
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
        """Of all nodes."""
        return tuple(worker for node in self.nodes for worker in node.workers)

    @property
    def anomalies(self) -> tuple[Anomaly, ...]:
        """All that is not as fast as it should be."""
        return (*self.slow, *self.drops, *self.below_sheet)
