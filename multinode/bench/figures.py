"""The document of `bench`: nodes, workers, speeds, and their figures; tests with FLOPs or bytes, and data sheets."""

from __future__ import annotations

import math

import msgspec

from multinode.figures.figure import Figure, Row
from multinode.findings.finding import Finding
from multinode.model.flops import Peak, peak_of
from multinode.profile.figures import LikelyCause, Peers
from multinode.profile.machine_use import GpuUse
from multinode.records.benchmark import DEVICE_DTYPES
from multinode.records.samples import SpeedSample
from multinode.render.sheet import figure
from multinode.stats.estimate import Estimate
from multinode.stats.unknown import UNMEASURED, Unknown, or_none
from multinode.units import UNKNOWN

SLOW_BELOW = 0.9
"""Share of the peers' median below which a device is slow."""


class DeviceSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of a device in one test and phase."""

    value: Estimate  # in the test's unit: median of the timings; over repeats, the mean of the medians
    cv: float  # standard deviation of the timings over their mean
    timings: int
    of_peak: float | None = None  # share of the data sheet's figure; None if unknown
    of_peers: float | None = None  # share of the median of like devices elsewhere; None without any
    slow: bool = False  # whether that share is too low, and its interval excludes 1
    # whether launching a call from Python takes as long as the call: the figure is then a lower bound
    launch_bound: bool = False
    clock_mhz: float | None = None  # of the GPU while it was timed, median of its samples; also `power_w`
    power_w: float | None = None


Speeds = tuple[DeviceSpeed | None, ...]
"""Of the tests that a column joins, each the fastest; None where a test was not measured."""
TFLOPS = Figure[Speeds](
    "tflop_per_s", "speed", "TFLOP/s", form="figure", about="TFLOP per second, median of the timings of a test"
)
MEMORY_RATE = Figure[Speeds](
    "gb_per_s", "speed", "GB/s", form="figure", about="GB read and written per second, median of the timings"
)


def speed_in(speed: Figure[Speeds], title: str) -> Figure[Speeds]:
    """The speed in some tests, as a figure of its own.

    As an interval it has only the mark of a slow device; otherwise also that of a lower bound, and, if it has a unit,
    the share of the data sheet's figure.
    """
    own = msgspec.structs.replace(speed, name=title, title=title)
    cell = lambda row: " / ".join(_tell_speed(own, each) for each in or_none(row[own]) or ())  # noqa: E731
    return msgspec.structs.replace(own, cell=cell)


def _tell_speed(column: Figure[Speeds], speed: DeviceSpeed | None) -> str:
    if speed is None:
        return UNKNOWN
    share = f" {OF_SHEET.text(speed.of_peak)}" if column.unit and speed.of_peak is not None else ""
    marks = "" if column.form == "interval" else f"{_bound(speed)}{share}"
    return f"{column.text(speed.value)}{marks}{'!' if speed.slow else ''}"


def _bound(speed: DeviceSpeed) -> str:
    return "~" if speed.launch_bound else ""


def _best(row: Row) -> str:
    return _tell_bounded(BEST, or_none(row[BEST]))


def _worst(row: Row) -> str:
    return _tell_bounded(WORST, or_none(row[WORST]))


def _tell_bounded(column: Figure[DeviceSpeed], speed: DeviceSpeed | None) -> str:
    return UNKNOWN if speed is None else f"{column.text(speed.value)}{_bound(speed)}"


def _sensors(row: Row) -> str:
    return "/".join(figure(value, ".0f") for value in or_none(row[SENSORS]) or ())


BEST = Figure[DeviceSpeed](
    "best",
    "best",
    TFLOPS.unit,
    form="figure",
    about="speed of the fastest worker",
    cell=_best,
)
WORST = Figure[DeviceSpeed](
    "worst",
    "worst",
    TFLOPS.unit,
    form="figure",
    about="speed of the slowest worker",
    cell=_worst,
)
MEDIAN = Figure[float]("median", "median", TFLOPS.unit, form="figure", about="median speed of the workers")
WHOSE_BEST = Figure[str]("whose_best", "whose", about="node and rank of the fastest worker")
WHOSE_WORST = Figure[str]("whose_worst", "whose", about="node and rank of the slowest worker")
OF_SHEET = Figure[float](
    "of_peak", "of sheet", form="percent", about=("best speed as a share of the rate in the data sheet")
)
CV = Figure[float](
    "cv",
    "cv",
    form="share",
    about="coefficient of variation of the timings, median of the workers",
)
SENSORS = Figure[tuple[float | None, ...]](
    "sensors",
    "at",
    "MHz/W",
    form="figure",
    about="median clock and power of the GPU during the test",
    cell=_sensors,
)


class BenchTest(msgspec.Struct, frozen=True, kw_only=True):
    """One test on one device."""

    kind: str  # `matmul`, `memory`, `bus` or `layers`
    name: str  # in words; also `label`, with its type
    label: str
    dtype: str
    size: str  # rows of the matrices; of a layer batch x sequence; of memory the buffer in MiB
    unit: str  # of its speeds: `TFLOP/s` (1e12) or `GB/s` (1e9), read and written
    peak: float | Unknown = UNMEASURED  # by the data sheet, in `unit`
    peak_source: str = ""
    alone: DeviceSpeed | None = None  # while no other worker of any node measured, if that was possible
    together: DeviceSpeed | None = None  # while all of them did
    error: Finding | None = None  # why it could not be measured, if so

    @property
    def key(self) -> tuple[str, str]:
        """Identifies the same test of another device."""
        return self.label, self.size

    @property
    def speeds(self) -> tuple[DeviceSpeed, ...]:
        """Its speeds in the measured phases."""
        return tuple(speed for speed in (self.alone, self.together) if speed is not None)

    def speed(self, phase: str) -> DeviceSpeed | None:
        """Its speed in a phase."""
        return self.alone if phase == "alone" else self.together


LABEL = Figure[str]("label", "test", about="name of the test, with its element type")
DTYPE = Figure[str]("dtype", "type", about="element type of a test")
MATRIX_ROWS = Figure[str]("size", "rows", form="digits", about="number of rows of each matrix")
PHASE = Figure[str]("phase", "phase", about="whether workers were measured one at a time or all at once")
WHOSE = Figure[str](
    "whose", "whose", about="a worker that could not run the test, and the number of other such workers"
)
WHY = Figure[str]("error", "why", about="why a test could not be measured")


class WorkerUse(msgspec.Struct, frozen=True, kw_only=True):
    """Use of a worker's device and node during one phase; None if unknown."""

    seconds: float  # duration of its measurement
    gpu: GpuUse | None = None
    # of all cores of the node, mean; also `cpu_steal_percent`, taken by the hypervisor
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
    torch: str | None = None  # version; also `cuda`
    cuda: str | None = None
    tests: tuple[BenchTest, ...] = ()  # in order of measurement
    use: dict[str, WorkerUse] = {}  # of device and node, by phase
    gpu_holders: tuple[str, ...] = ()  # other processes that held memory of its GPU before, in words


def _device(row: Row) -> str:
    worker: BenchWorker = row.item
    place = f"GPU {worker.gpu}" if worker.gpu is not None else worker.device
    return f"{place}: {worker.name or 'unknown'}"


WORKER = Figure[int]("rank", "worker", form="digits", about="rank of a worker on its node")
DEVICE = Figure[str]("device", "device", about="type and name of a worker's device", cell=_device)
THREADS = Figure[int]("threads", "threads", form="digits", about="number of torch's threads on a CPU")
CORES = Figure[int]("cores", "cores", form="digits", about="CPU cores that a worker may use")
CAPABILITY = Figure[str]("capability", "kernels for", about="GPU architecture for which a worker's kernels are built")
TORCH = Figure[str]("torch", "torch", about="version of torch")


class BenchNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node."""

    node: str
    node_rank: int
    workers: tuple[BenchWorker, ...] = ()  # on it, as far as they identified themselves
    runs: dict[str, str] = {}  # the run of each phase
    failures: tuple[Finding, ...] = ()  # phases that failed

    @property
    def is_measured(self) -> bool:
        """Whether anything was measured."""
        return any(test.speeds for worker in self.workers for test in worker.tests)


class Anomaly(Finding, frozen=True, kw_only=True):
    """A device below its expected speed: what was measured, and how to fix the likeliest cause."""

    causes: tuple[LikelyCause, ...]  # the differences, likeliest first

    @property
    def cause(self) -> str:
        """The likeliest, as in `LikelyCause`."""
        return self.causes[0].cause if self.causes else "unknown"

    @property
    def text(self) -> str:
        """One sentence with its cause."""
        because = f"likely cause: {self.causes[0].message}" if self.causes else "no recorded data explains it"
        return f"{self.message}; {because}"


class Slow(Anomaly, frozen=True, kw_only=True):
    """A node, or a worker of it, slower than its peers."""

    node: str
    rank: int | None = None  # of the worker, if the others of the node are not slow; None means all
    ratios: dict[str, dict[str, float]]  # median share of the peers' speed, by phase and kind of test
    peers: Peers


class Drop(Anomaly, frozen=True, kw_only=True):
    """Workers that are slower when all measure than alone."""

    nodes: tuple[str, ...]
    ratio: float  # median over workers and tests of the speed together over that alone


class BelowSheet(Anomaly, frozen=True, kw_only=True):
    """Devices far below their data sheet."""

    device: str
    label: str  # of their best test
    of_peak: float  # its share of the data sheet's figure
    workers: tuple[str, ...]  # as `node0/1`


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `bench`."""

    schema: str = "multinode.bench/3"
    run_id: str
    phases: tuple[str, ...]  # in order
    nodes: tuple[BenchNode, ...]  # in node-rank order
    slow: tuple[Slow, ...] = ()  # nodes and workers slower than their peers, the slowest first
    drops: tuple[Drop, ...] = ()
    below_sheet: tuple[BelowSheet, ...] = ()
    unmeasured: tuple[Finding, ...] = ()  # parts that could not be measured, or not yet
    outcome: Finding | None = None  # how many devices are as fast as their peers; None if one is slow
    notes: tuple[Finding, ...] = ()  # how it was measured
    # unmeasured parts when this was stored, in order, the first possibly in progress; empty when complete
    left: tuple[str, ...] = ()

    @property
    def workers(self) -> tuple[BenchWorker, ...]:
        """Workers of all nodes."""
        return tuple(worker for node in self.nodes for worker in node.workers)

    @property
    def anomalies(self) -> tuple[Anomaly, ...]:
        """All devices below their expected speed."""
        return (*self.slow, *self.drops, *self.below_sheet)


KINDS = {
    "matmul": "matrix products",
    "memory": "memory bandwidth",
    "bus": "transfers to the GPU",
    "layers": "transformer layers",
}
"""Kinds of tests that are judged together, in words."""
_LAYERS = {"bert": "BERT", "gpt2": "GPT-2", "t5_encoder": "T5 encoder", "t5_decoder": "T5 decoder"}
# Bytes moved, in multiples of a buffer, read and written. As in STREAM, write-allocate reads are not counted.
_MEMORY = {"copy": 2, "triad": 3}
_BUS = {"to_device": "to GPU", "from_device": "from GPU"}
_GIGA, _TERA = 1e9, 1e12
_BACKWARD = 3
# A multiply and an add.
_FLOP = 2
# Of no device that there will be.
_MOST_WORK = 1e24


class TestKey(msgspec.Struct, frozen=True, kw_only=True):
    """Identifies the timings of one test."""

    # Keeps pytest from collecting it as a test.
    __test__ = False

    kind: str  # of KINDS
    name: str  # in words: `4096`, `copy`, `BERT forward`; also `label`, with its type
    label: str
    dtype: str  # of DEVICE_DTYPES
    size: str = ""  # rows of the matrices; of a layer, batch and sequence: `16 x 512`; otherwise empty


class TestWork(msgspec.Struct, frozen=True, kw_only=True):
    """Amount of FLOPs or bytes per call; its rate has this unit, in `scale` of them."""

    amount: float
    unit: str
    scale: float


class DataSheet(msgspec.Struct, frozen=True, kw_only=True):
    """The data sheet's maximum for a test, in the test's unit."""

    peak: float | Unknown
    peak_source: str = ""


def key_of(sample: SpeedSample) -> TestKey | None:
    """The timed test; None if it was not requested, or its sizes are impossible."""
    if sample.dtype not in DEVICE_DTYPES or work_of(sample) is None:
        return None
    kind, name, size = "memory", sample.test, ""
    if sample.test == "matmul":
        kind, name, size = "matmul", str(sample.size), str(sample.size)
    elif sample.test in _LAYERS:
        way = "forward + backward" if sample.backward else "forward"
        kind, name, size = "layers", f"{_LAYERS[sample.test]} {way}", f"{sample.batch} x {sample.sequence}"
    elif sample.test in _BUS:
        kind, name = "bus", _BUS[sample.test]
    label = {"matmul": f"matmul {name} {sample.dtype}", "layers": f"{name} {sample.dtype}"}.get(kind, name)
    return TestKey(kind=kind, name=name, label=label, dtype=sample.dtype, size=size)


def work_of(sample: SpeedSample) -> TestWork | None:
    """The work of a call; None if unknown."""
    if sample.test == "matmul":
        # n x n by n x n: n multiply-adds per result.
        return _work(_FLOP * float(sample.size) ** 3 if sample.size else None, TFLOPS.unit, _TERA)
    if sample.test in _LAYERS:
        return _work(_layer_flops(sample), TFLOPS.unit, _TERA)
    parts = 1 if sample.test in _BUS else _MEMORY.get(sample.test)
    if parts is None or not sample.size or not sample.width_bytes:
        return None
    return _work(float(parts) * sample.size * sample.width_bytes, MEMORY_RATE.unit, _GIGA)


def sheet_of(device: str, name: str | None, key: TestKey) -> DataSheet:
    """The data sheet's figure for a test.

    Args:
        device: `cpu` or `cuda`.
        name: of the device.
        key: the test.
    """
    if key.kind == "bus":
        return DataSheet(peak=Unknown("bus bandwidth depends on GPU, slot and CPU: no data sheet lists it"))
    if device != "cuda":
        return DataSheet(peak=Unknown("no CPU data sheets are available"))
    peak = peak_of(name or "")
    if peak is None:
        return DataSheet(peak=Unknown(f"no data sheet of {name or 'this GPU'} is available"))
    figure, source = _figure(peak, key)
    if figure is None:
        return DataSheet(peak=Unknown("its data sheet's figure is missing"))
    return DataSheet(peak=figure, peak_source=source)


def _figure(peak: Peak, key: TestKey) -> tuple[float | None, str]:
    if key.kind == "memory":
        return peak.memory_gb_per_s, peak.others_source
    return peak.in_precision(key.dtype)


def _layer_flops(sample: SpeedSample) -> float | None:
    """Multiply-adds per token: 4 h^2 for attention projections, 2 s h for scores and mixture, 2 h f for the rest."""
    sizes = (sample.batch, sample.sequence, sample.hidden, sample.feedforward, sample.attentions)
    if None in sizes:
        return None
    batch, sequence, hidden, feedforward, attentions = (float(size or 0) for size in sizes)
    by_token = attentions * (4 * hidden**2 + 2 * sequence * hidden) + 2 * hidden * feedforward
    return _FLOP * batch * sequence * by_token * (_BACKWARD if sample.backward else 1)


def _work(amount: float | None, unit: str, scale: float) -> TestWork | None:
    if amount is None or not math.isfinite(amount) or not 0 < amount <= _MOST_WORK:
        return None
    return TestWork(amount=amount, unit=unit, scale=scale)
