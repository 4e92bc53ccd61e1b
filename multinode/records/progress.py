"""RunProgress: the figures of the live table: steps, time left, NIC rates, GPUs, from the records as they arrive."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from multinode.figures.figure import Figure
from multinode.records.benchmark import CollectiveTest, time_left_s
from multinode.records.log import FIRST_STEP
from multinode.records.plan import LaunchPlan
from multinode.records.run import Stall
from multinode.records.samples import (
    AveragingSample,
    CollectiveSample,
    DdpSample,
    DeviceWaitSample,
    GpuSample,
    ListeningSample,
    LossSample,
    ModelSample,
    NicSample,
    Sample,
    SpeedSample,
    StepSample,
    WorkerSample,
)
from multinode.units import BITS_PER_BYTE

_Key = TypeVar("_Key")
_Device = TypeVar("_Device")

# Recent enough to follow, steady enough to read.
RECENT_STEPS = 10
# If nodes average every H-th step, whole rounds are followed unless they are too long.
_MOST_FOLLOWED = 4096
# Counters of a step may arrive some steps later.
_KEPT_STEPS = 3 * RECENT_STEPS
# More interfaces, GPUs or records per step than any node has are dropped.
_MOST_DEVICES = 256
_MOST_OF_STEP = 1000
# Phases in which the host is blocked in collectives: between nodes, and inside one of several.
BLOCKED = ("comm", "comm_local")


class StepRecords(msgspec.Struct, kw_only=True):
    """The records of one step of one worker; None has not arrived."""

    step: StepSample | None = None
    ddp: list[DdpSample] = []
    wait: DeviceWaitSample | None = None

    def take(self, sample: StepSample | DdpSample | DeviceWaitSample) -> None:
        """Add one; DDP records several per step for several iterations or modules."""
        if isinstance(sample, StepSample):
            self.step = sample
        elif isinstance(sample, DeviceWaitSample):
            self.wait = self.wait or sample
        elif len(self.ddp) < _MOST_OF_STEP:
            self.ddp.append(sample)

    def exposed_us(self, source: str, *, host_waits: bool) -> float | None:
        """Exposed communication, including waits for stragglers; None if the source does not record it.

        Args:
            source: `ddp`: DDP's counters, plus calls beside them; `device`: waits of the compute stream;
                `host`: time
                that the host was blocked in collectives.
            host_waits: whether the host waits for the end of a collective, as it does without a GPU.
        """
        if source == "device":
            return self._waited_us
        if source != "ddp":
            return self._blocked_us if host_waits else None
        beside_us = self.beside_us(host_waits=host_waits)
        if not self.ddp or beside_us is None:
            return None
        return sum(max(0.0, worker.comm_us - worker.overlap_us) for worker in self.ddp) + beside_us

    def beside_us(self, *, host_waits: bool) -> float | None:
        """The part in calls beside DDP's reducer; None if they were not timed.

        Args:
            host_waits: as for `exposed_us`.
        """
        if host_waits:
            return self._blocked_us or 0.0
        return 0.0 if self.wait is None else self._waited_us

    def local_us(self, *, host_waits: bool) -> float:
        """The part of `exposed_us` in calls of groups inside the node.

        Args:
            host_waits: as for `exposed_us`.
        """
        if host_waits:
            return self._phases_us.get("comm_local", 0.0)
        return self.wait.local_us if self.wait is not None else 0.0

    @property
    def _waited_us(self) -> float | None:
        # A call that was not timed may have been the longest.
        wait = self.wait
        return wait.wait_us if wait is not None and wait.calls >= wait.of_calls else None

    @property
    def _blocked_us(self) -> float | None:
        if self.step is None or self.step.phases_us is None:
            return None
        return sum(self._phases_us.get(phase, 0.0) for phase in BLOCKED)

    @property
    def _phases_us(self) -> dict[str, float]:
        return (self.step.phases_us if self.step is not None else None) or {}


class RecentSteps(msgspec.Struct, kw_only=True):
    """The most recent steps of one worker, ascending. Not a summary."""

    last_step: int | None = None  # the last finished step; None before the first
    steps: dict[int, StepRecords] = {}  # replaced, never changed: another thread may be drawing it

    def take(self, sample: StepSample | DdpSample | DeviceWaitSample) -> None:
        """Add a record; a step number that does not grow means that the worker was restarted."""
        if isinstance(sample, StepSample):
            if self.last_step is not None and sample.step <= self.last_step:
                self.steps = {}
            self.last_step = sample.step
        if sample.step not in self.steps:
            numbers = sorted([*self.steps, sample.step])[-_KEPT_STEPS:]
            self.steps = {number: self.steps.get(number) or StepRecords() for number in numbers}
        if sample.step in self.steps:
            self.steps[sample.step].take(sample)

    def exposed_share(self, *, host_waits: bool) -> float | None:
        """Exposed communication over step time, from the best source available; None without one."""
        phases = [step.step.phases_us or {} for step in self.steps.values() if step.step is not None]
        blocks = any(name in phase for phase in phases for name in BLOCKED)
        sources = ("ddp", "device", "host") if blocks else ("ddp", "device")
        for source in sources:
            both = [
                (exposed_us, step.step.step_time_us)
                for step in self.steps.values()
                if step.step is not None
                and step.step.step_time_us is not None
                and (exposed_us := step.exposed_us(source, host_waits=host_waits)) is not None
            ][-RECENT_STEPS:]
            if both:
                return min(1.0, sum(exposed_us for exposed_us, _ in both) / sum(took_us for _, took_us in both))
        return None

    @property
    def tokens_and_time(self) -> tuple[int, float]:
        """Tokens of the recent steps that record them, and their time in microseconds."""
        both = [
            (step.step.tokens, step.step.step_time_us)
            for step in self.steps.values()
            if step.step is not None and step.step.tokens is not None and step.step.step_time_us is not None
        ][-RECENT_STEPS:]
        return sum(tokens for tokens, _ in both), sum(took_us for _, took_us in both)


# Ten years: a longer estimate helps nobody.
_LONGEST_LEFT_S = 10 * 365 * 86400
# Counters include headers, and reading them is not instantaneous; larger figures are not of this link.
_OVER_LINK = 1.05


class NicRate(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic of a NIC between two samples; both rates are None if its counters restarted."""

    sample: NicSample  # the later one
    in_gbit_per_s: float | None = None  # as counted, including headers; also `out_gbit_per_s`
    out_gbit_per_s: float | None = None

    @property
    def busier_gbit_per_s(self) -> float | None:
        """The busier direction; None before it is known."""
        return _largest([self.in_gbit_per_s, self.out_gbit_per_s])


def nic_rate(before: NicSample, after: NicSample) -> NicRate:
    """The rate between two samples of one NIC."""
    received, sent = after.rx_bytes - before.rx_bytes, after.tx_bytes - before.tx_bytes
    if received < 0 or sent < 0 or after.mono_ns <= before.mono_ns:
        return NicRate(sample=after)
    # Bits in a nanosecond are Gbit in a second.
    bits = BITS_PER_BYTE / (after.mono_ns - before.mono_ns)
    return NicRate(sample=after, in_gbit_per_s=received * bits, out_gbit_per_s=sent * bits)


class NodeProgress(msgspec.Struct, kw_only=True):
    """One node, now. Its dictionaries are replaced, never changed: another thread may be drawing them."""

    name: str
    node_rank: int
    ranks: tuple[int, ...]
    state: str = "waiting"  # `waiting`, `starting`, `running`, `stopping`, `ended` or `lost`
    message: str = ""  # a short line on the state, such as how it ended
    stage: str = ""  # what its workers do before their first step; empty while their program starts and imports
    port: int | None = None  # on which it answers requests; None until it listens there
    step: int | None = None  # last step finished by a worker of this node; for a benchmark, messages or tests measured
    total_steps: int | None = None
    recent_us: tuple[float, ...] = ()  # the most recent step times of its first worker, oldest first
    # steps per round of averaging between nodes; None if gradients are reduced in each step
    round_steps: int | None = None
    samples_per_step: int | None = None  # of a whole one, of all its workers; None if unknown
    loss: float | None = None  # the last one logged; NaN if it was not finite
    nics: dict[str, NicRate] = {}  # its NICs, by name
    # of the busiest NIC between its last two samples. A bond and its NICs count the same bytes, so they are not added
    # up.
    net_in_gbit_per_s: float | None = None
    net_out_gbit_per_s: float | None = None  # of the busiest NIC between its last two samples
    ifname: str | None = None
    link_gbit_per_s: float | None = None
    gpus: dict[int, GpuSample] = {}
    workers: dict[int, RecentSteps] = {}
    device: str | None = None  # `cpu` or `cuda`; None if unknown
    test: CollectiveTest | None = None  # the running collective test; None for other jobs

    @property
    def doing(self) -> str:
        """Its state in a few words, with the stage until the first step."""
        if self.message or self.step is not None or self.state not in {"waiting", "running"}:
            return self.message or self.state
        if self.port is not None:
            return f"ready: listens on port {self.port}"
        return "connecting" if self.state == "waiting" else f"running, {self.stage or 'importing'}"

    @property
    def left_s(self) -> float | None:
        """Estimated remaining time at the recent pace; None if unknown."""
        if self.step is None or self.total_steps is None or self.step_time_us is None:
            return None
        if self.test is not None:
            return time_left_s(self.test, self.step, self.recent_us[-1])
        left_s = max(0, self.total_steps - self.step) * self.step_time_us / 1e6
        return left_s if left_s < _LONGEST_LEFT_S else None

    @property
    def step_time_us(self) -> float | None:
        """Median of the recent steps; for rounds the mean, as few steps contain all of the communication."""
        if not self.recent_us:
            return None
        return statistics.median(self.recent_us) if self.round_steps is None else statistics.fmean(self.recent_us)

    @property
    def samples_per_s(self) -> float | None:
        """Nominal samples per second of this node's workers, over the recent steps."""
        took_us = sum(self.recent_us)
        if self.samples_per_step is None or took_us <= 0:
            return None
        return self.samples_per_step * len(self.recent_us) / took_us * 1e6

    @property
    def tgs(self) -> float | None:
        """Tokens per second and worker, including padding, over the recent steps."""
        rates = [worker.tokens_and_time for worker in self.workers.values()]
        tokens, took_us = (sum(numbers) for numbers in zip(*rates, strict=True)) if rates else (0, 0.0)
        return tokens / took_us * 1e6 if tokens and took_us > 0 else None

    @property
    def exposed_share(self) -> float | None:
        """Exposed communication over step time, of its worker that waited least."""
        host_waits = self.device == "cpu" or (self.device is None and not self.gpus)
        shares = [worker.exposed_share(host_waits=host_waits) for worker in self.workers.values()]
        return min((share for share in shares if share is not None), default=None)

    @property
    def link_share(self) -> float | None:
        """The busier direction of the data NIC as a share of its link speed.

        The rate of another NIC, such as an RDMA port, does not belong to this link.
        """
        nic = self.nics.get(self.ifname) if self.ifname is not None else None
        rate = nic.busier_gbit_per_s if nic is not None else None
        if rate is None or not self.link_gbit_per_s:
            return None
        share = rate / self.link_gbit_per_s
        return share if share <= _OVER_LINK else None

    @property
    def gpu_percent(self) -> float | None:
        """Mean SM utilization of the node's GPUs."""
        return _mean([gpu.sm_percent for gpu in self.gpus.values()])

    @property
    def gpu_memory_gib(self) -> float | None:
        """Memory in use on the fullest of its GPUs, by all processes."""
        return _largest([gpu.memory_used_gib for gpu in self.gpus.values()])

    @property
    def gpu_power_w(self) -> float | None:
        """Mean power draw of the node's GPUs."""
        return _mean([gpu.power_w for gpu in self.gpus.values()])

    @property
    def gpu_temperature_c(self) -> float | None:
        """The hottest of its GPUs."""
        return _largest([gpu.temperature_c for gpu in self.gpus.values()])

    def take(self, samples: Iterable[Sample]) -> None:
        """Add what these samples say."""
        for sample in samples:
            self._take(sample)

    def _take(self, sample: Sample) -> None:  # noqa: C901, PLR0912 - one line a kind of record
        match sample:
            case StepSample():
                self._take_step(sample)
            case DdpSample() | DeviceWaitSample():
                self._take_of_step(sample)
            case CollectiveSample():
                self._take_message(sample)
            case SpeedSample():
                if sample.rank in self.ranks and self.test is None and sample.times_us:
                    self.step, self.recent_us = sample.index + 1, (statistics.median(sample.times_us),)
            case LossSample():
                self.loss = math.nan if sample.loss is None else sample.loss
            case NicSample():
                self._take_nic(sample)
            case GpuSample():
                self.gpus = _with_device(self.gpus, sample.index, sample)
            case AveragingSample():
                self.round_steps = max(1, min(sample.every, _MOST_FOLLOWED))
            case ListeningSample():
                self.port = sample.port
            case WorkerSample():
                self.stage = FIRST_STEP
            case ModelSample(device=str()):
                self.device = sample.device
            case _:
                pass

    def _take_step(self, sample: StepSample) -> None:
        # A node reports only on its own workers, and a collective test has messages instead of steps.
        if self.test is not None or not self._take_of_step(sample) or sample.rank != self.ranks[0]:
            return
        round_steps = self.round_steps or 1
        followed = round_steps * math.ceil(RECENT_STEPS / round_steps)
        self.step, self.total_steps = sample.step, sample.total_steps
        took_us = () if sample.step_time_us is None else (sample.step_time_us,)
        self.recent_us = (*self.recent_us, *took_us)[-followed:]
        # An epoch's last step may have fewer, and would make the rate jump.
        samples = sample.samples * len(self.ranks) if sample.samples is not None else None
        self.samples_per_step = max(self.samples_per_step or 0, samples) if samples is not None else None

    def _take_of_step(self, sample: StepSample | DdpSample | DeviceWaitSample) -> bool:
        if sample.rank not in self.ranks:
            return False
        if sample.rank not in self.workers:
            self.workers = {**self.workers, sample.rank: RecentSteps()}
        self.workers[sample.rank].take(sample)
        return True

    def _take_message(self, sample: CollectiveSample) -> None:
        step = sample.index + 1
        if self.test is None or sample.rank != self.ranks[0] or not 0 < step <= len(self.test.messages):
            return
        if sample.times_us:
            self.step, self.recent_us = step, (statistics.median(sample.times_us),)

    def _take_nic(self, sample: NicSample) -> None:
        before = self.nics.get(sample.ifname)
        rate = nic_rate(before.sample, sample) if before is not None else NicRate(sample=sample)
        self.nics = _with_device(self.nics, sample.ifname, rate)
        busiest = max(self.nics.values(), key=lambda nic: nic.busier_gbit_per_s or 0.0)
        self.net_in_gbit_per_s, self.net_out_gbit_per_s = busiest.in_gbit_per_s, busiest.out_gbit_per_s


class TrainingTime(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a training with a time limit."""

    limit_s: float
    trained_s: float = 0.0  # since its first step; 0 before that

    @property
    def left_s(self) -> float | None:
        """Remaining time; None before the first step."""
        return max(0.0, self.limit_s - self.trained_s) if self.trained_s else None


class RunProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run, now."""

    run_id: str
    job: str
    world_size: int
    nodes: tuple[NodeProgress, ...]
    elapsed_s: float = 0.0
    stall: Stall | None = None  # the cause of a lasting standstill; None while the run makes progress
    training: TrainingTime | None = None  # progress towards the time limit; None without one
    # number of this attempt, of at most `attempts`, if the run is restarted on failure; otherwise None
    attempt: int | None = None
    attempts: int | None = None
    note: str = ""  # a one-line remark on the run; may be empty
    troubles: tuple[str, ...] = ()  # problems of this machine with following the run, one line each, latest last

    @property
    def left_s(self) -> float | None:
        """Estimated remaining time of the run; None if unknown.

        That of the slowest node, or the rest of the time limit if that is less.
        """
        running = [node for node in self.nodes if node.state == "running"]
        steps_s = _largest([node.left_s for node in running])
        time_s = self.training.left_s if self.training is not None and running else None
        return min((left_s for left_s in (steps_s, time_s) if left_s is not None), default=None)

    @property
    def exposed_share(self) -> float | None:
        """Exposed communication over step time, of the worker that waited least; the others wait for stragglers."""
        shares = [node.exposed_share for node in self.nodes]
        return min((share for share in shares if share is not None), default=None)


def start_progress(plan: LaunchPlan) -> RunProgress:
    """The progress of a run before anything has happened."""
    return RunProgress(
        run_id=plan.run_id,
        job=plan.job,
        world_size=plan.world_size,
        nodes=tuple(
            NodeProgress(
                name=place.node,
                node_rank=place.node_rank,
                ranks=place.ranks,
                ifname=place.endpoint.ifname,
                link_gbit_per_s=place.endpoint.link_gbit_per_s,
                test=plan.test if isinstance(plan.test, CollectiveTest) else None,
                total_steps=len(plan.test.messages) if isinstance(plan.test, CollectiveTest) else None,
            )
            for place in plan.places
        ),
    )


def _with_device(devices: Mapping[_Key, _Device], key: _Key, device: _Device) -> dict[_Key, _Device]:
    return {**devices, key: device} if key in devices or len(devices) < _MOST_DEVICES else {**devices}


def _mean(values: Sequence[float | None]) -> float | None:
    known_values = [value for value in values if value is not None]
    return statistics.fmean(known_values) if known_values else None


def _largest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


NODE_FIGURES: tuple[Figure[float], ...] = (
    Figure("step", about="last finished step of the node's workers"),
    Figure("total_steps", about="total number of training steps"),
    Figure("step_time_us", about="median step time of the last steps"),
    Figure(
        "samples_per_s", "samples", "(/s)", "tenths", "samples per second of the node's workers, over the last steps"
    ),
    Figure("tgs", "TGS", form="whole", about="tokens per second per worker, over the last steps"),
    Figure("loss", "loss", form="four_digits", about="last logged loss"),
    Figure(
        "exposed_share", "exposed", "comm", "percent", "exposed communication divided by step time, over the last steps"
    ),
    Figure("net_in_gbit_per_s", "net in", "Gbit/s", "thousandths", "receive rate of the node's busiest NIC"),
    Figure("net_out_gbit_per_s", "net out", "Gbit/s", "thousandths", "send rate of the node's busiest NIC"),
    Figure(
        "link_share",
        "of",
        "link",
        "percent",
        ("traffic of the data-plane NIC in its busier direction, as a share of the line rate"),
    ),
    Figure("gpu_percent", "SM", "(%)", "whole", "mean SM use of the node's GPUs"),
    Figure("gpu_memory_gib", "mem", "(GiB)", "tenths", "highest memory use of the node's GPUs"),
    Figure("gpu_power_w", "power", "(W)", "whole", "mean power draw per GPU"),
    Figure("gpu_temperature_c", "temp", "(C)", "whole", "temperature of the hottest GPU"),
    Figure("left_s", about="estimated time to the end of training"),
)
"""The figures of NodeProgress that are exported; the live table shows those that have a title."""
