"""Samples: what the workers and the sampler on a node recorded, one JSON object a line. Raw; nothing is trimmed here.

Untrusted: a line that is not one of these is passed over and counted, never an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from multinode.core.run.device_samples import DeviceSample, SpeedSample
from multinode.core.run.profile_samples import (
    Count,
    DdpSample,
    DeviceWaitSample,
    GroupSample,
    ModelSample,
    NoteSample,
    TraceSample,
    TrafficSample,
)

__all__ = [
    "BenchmarkSample",
    "CardBytes",
    "CgroupSample",
    "CollectiveSample",
    "CpuSample",
    "ExceptionSample",
    "GpuSample",
    "KernelSample",
    "LossSample",
    "NcclSample",
    "NicSample",
    "Sample",
    "StepSample",
    "TcpSample",
    "TrainEndSample",
    "WorkerSample",
    "parse_samples",
]


class WorkerSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="worker"):
    """A worker that began to train.

    Attributes:
        time_s: the node's wall clock.
        source: what counts its steps: `trainer`, `deepspeed` or `optimizer`.
        versions: of torch and, where imported, transformers and deepspeed.
        begun_mono_ns: the node's monotonic clock when this worker's interpreter started.
    """

    rank: Count
    local_rank: Count
    world_size: Count
    time_s: float
    source: str
    versions: dict[str, str] = {}
    begun_mono_ns: Count | None = None


class CardBytes(msgspec.Struct, frozen=True, kw_only=True):
    """What a card's counters grew by.

    Attributes:
        tx_bytes: sent; likewise `rx_bytes`, received. Ethernet headers are counted, frame check sequences are not.
        tx_packets: likewise; None where packets are not counted (RDMA, which counts payload).
    """

    tx_bytes: Count
    rx_bytes: Count
    tx_packets: Count | None = None
    rx_packets: Count | None = None


class StepSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="step"):
    """One optimizer step of one worker.

    Attributes:
        rank: global rank.
        step: counted from 1.
        total_steps: of the training; None where the framework does not say.
        time_s: the node's wall clock at the step's end.
        mono_ns: the node's monotonic clock then.
        step_time_us: since the step before ended (the first: since the training began; None is unknown).
        samples: nominal samples of this worker in this step (per-device batch x accumulation); None is unknown.
        micro_steps: forward passes with gradients in this step.
        tokens: padded tokens of this worker in this step; `effective_tokens` those of them that are no padding.
        phases_us: host time of this step by what it was spent on, the innermost alone: `data` (waiting for a batch),
            `forward`, `backward`, `optimizer`, `comm` (blocked in a collective). The rest is nobody's.
        traffic: the number of the TrafficSample that says what this step called.
        cards: by network card (or RDMA port), its counters at the step's end, since the card came up; of a node's first
            worker, ten times a second at the most.
        peak_memory_bytes: allocated on the GPU so far, else resident in the worker's process; once a second at most.
    """

    rank: Count
    step: Count
    time_s: float
    mono_ns: Count
    step_time_us: float | None = None
    total_steps: Count | None = None
    samples: Count | None = None
    micro_steps: Count | None = None
    tokens: Count | None = None
    effective_tokens: Count | None = None
    phases_us: dict[str, float] | None = None
    traffic: Count | None = None
    cards: dict[str, CardBytes] | None = None
    peak_memory_bytes: Count | None = None


class LossSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="loss"):
    """A loss that the framework logged; None is NaN or infinity: the training has diverged."""

    rank: Count
    step: Count
    loss: float | None


class TrainEndSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="train_end"):
    """The end of a training, with the figures that the framework reports itself.

    Attributes:
        rank: global rank.
        time_s: the node's wall clock.
        train_runtime_s: the Trainer's own.
        train_samples_per_s: the Trainer's own: nominal, warm-up included, cluster-wide.
    """

    rank: Count
    time_s: float
    train_runtime_s: float | None = None
    train_samples_per_s: float | None = None


class ExceptionSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="exception"):
    """An exception that ended a worker."""

    rank: Count
    time_s: float
    type: str
    message: str
    traceback: str = ""


class NicSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="nic"):
    """Counters of a network card, or of an RDMA port (`mlx5_0/1`), which counts no packets, since it came up.

    `carrier_changes` counts how often its link went or came.
    """

    time_s: float
    mono_ns: Count
    ifname: str
    rx_bytes: Count
    tx_bytes: Count
    rx_packets: Count | None = None
    tx_packets: Count | None = None
    rx_errors: Count | None = None
    tx_errors: Count | None = None
    rx_dropped: Count | None = None
    tx_dropped: Count | None = None
    carrier_changes: Count | None = None


class KernelSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="kernel"):
    """A line of the node's kernel log that may tell of failing hardware."""

    time_s: float
    message: str


class TcpSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="tcp"):
    """The node's TCP counters, of all its cards together, since it started (/proc/net/snmp)."""

    time_s: float
    mono_ns: Count
    sent_segments: Count
    retransmitted_segments: Count


class CgroupSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="cgroup"):
    """What limits the job's processors, and how often it did, since the group was made.

    Attributes:
        time_s: the node's wall clock; `mono_ns` its monotonic clock.
        quota_cores: processors that the group may use; None is without limit.
        throttled_us: time in which it had used them up.
        periods: of enforcement; `throttled_periods` those in which it was held.
    """

    time_s: float
    mono_ns: Count
    quota_cores: float | None = None
    throttled_us: float
    periods: Count
    throttled_periods: Count


class CpuSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="cpu"):
    """The node's processors and memory.

    Attributes:
        time_s: the node's wall clock; `mono_ns` its monotonic clock.
        busy_percent: of all cores, since the sample before; likewise `iowait_percent`, idle while a disk was waited
            for, and `steal_percent`, taken by the hypervisor.
        job_cores: cores that the job's processes used since the sample before.
        memory_available_gib: what the job could still have; `memory_total_gib` is all that it may have, of the machine
            or of the control groups that it is in, whichever is less.
    """

    time_s: float
    mono_ns: Count
    busy_percent: float | None = None
    iowait_percent: float | None = None
    steal_percent: float | None = None
    job_cores: float | None = None
    memory_available_gib: float | None = None
    memory_total_gib: float | None = None


class GpuSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="gpu"):
    """One GPU, as NVML has it.

    Attributes:
        time_s: the node's wall clock; `mono_ns` its monotonic clock.
        sm_percent: part of the time in which a kernel ran; a waiting NCCL kernel runs, too.
        memory_used_gib: by all processes, of `memory_total_gib`.
        power_w: drawn; `power_limit_w` what it may.
        sm_clock_mhz: now; `sm_clock_max_mhz` the highest there is.
        temperature_c: of the chip.
        pcie_gen: now; likewise `pcie_width`, lanes; `pcie_gen_max` and `pcie_width_max` are what card and slot can do.
        pcie_rx_gb_per_s: into the GPU, over the last 20 ms; likewise `pcie_tx_gb_per_s`, out of it.
        throttle: what holds its clocks down, by NVML's names (`sw_power_cap`, `hw_thermal_slowdown`, ...).
        energy_j: drawn since the driver was loaded.
        ecc_uncorrected: memory errors that ECC could not correct, since the driver was loaded.
    """

    time_s: float
    mono_ns: Count
    index: Count
    sm_percent: float | None = None
    memory_used_gib: float | None = None
    memory_total_gib: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: float | None = None
    sm_clock_max_mhz: float | None = None
    temperature_c: float | None = None
    pcie_gen: Count | None = None
    pcie_gen_max: Count | None = None
    pcie_width: Count | None = None
    pcie_width_max: Count | None = None
    pcie_rx_gb_per_s: float | None = None
    pcie_tx_gb_per_s: float | None = None
    throttle: tuple[str, ...] = ()
    energy_j: float | None = None
    ecc_uncorrected: Count | None = None


class CollectiveSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="collective"):
    """One message of a collective benchmark on one worker.

    Attributes:
        dtype: nccl-tests' name of the element type; `redop` that of the reduction, `none` where nothing is reduced.
        size_bytes: S as nccl-tests counts it, rounded down to what divides among the workers.
        count: elements, as nccl-tests counts them: of one worker's share where there are shares.
        times_us: every timed iteration, in order.
        num_wrong: elements whose value was not exact; None where they were not verified.
        cards: by network card, what passed it while `card_iters` iterations ran; of a node's first worker only.
        card_iters: iterations that `cards` covers.
        index: of the message in the request.
    """

    rank: Count
    local_rank: Count = 0
    collective: str
    dtype: str
    redop: str = "sum"
    size_bytes: Count
    count: Count
    times_us: tuple[float, ...]
    num_wrong: Count | None = None
    cards: dict[str, CardBytes] | None = None
    card_iters: Count = 0
    index: Count = 0


class BenchmarkSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="benchmark"):
    """A worker of a collective benchmark that began.

    Attributes:
        rank: global rank.
        backend: `nccl` or `gloo`.
        timer: what timed the iterations: `clock` (the processor's monotonic clock) or `cuda` (CUDA events).
        device: the GPU's name, or None.
    """

    rank: Count
    world_size: Count
    backend: str
    timer: str = "clock"
    device: str | None = None


class NcclSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="nccl"):
    """What NCCL wrote down about its connections in one worker: the telling lines of its log."""

    rank: Count
    lines: tuple[str, ...]


Sample = (
    WorkerSample
    | StepSample
    | LossSample
    | TrainEndSample
    | ExceptionSample
    | NicSample
    | CpuSample
    | GpuSample
    | CollectiveSample
    | BenchmarkSample
    | NcclSample
    | NoteSample
    | ModelSample
    | GroupSample
    | TrafficSample
    | DdpSample
    | DeviceWaitSample
    | TraceSample
    | TcpSample
    | CgroupSample
    | KernelSample
    | DeviceSample
    | SpeedSample
)

_DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Sample)


def parse_samples(lines: Iterable[bytes]) -> Iterator[Sample]:
    """The samples in JSON lines; a torn or foreign line is passed over."""
    for line in lines:
        try:
            yield _DECODER.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
