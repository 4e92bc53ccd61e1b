"""Samples: what the workers and the sampler on a node recorded, one JSON object a line. Raw; nothing is trimmed here.

Untrusted: a line that is not one of these is passed over and counted, never an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

__all__ = [
    "BenchmarkSample",
    "CardBytes",
    "CollectiveSample",
    "CpuSample",
    "ExceptionSample",
    "GpuSample",
    "LossSample",
    "NcclSample",
    "NicSample",
    "Sample",
    "StepSample",
    "TrainEndSample",
    "WorkerSample",
    "parse_samples",
]


class WorkerSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="worker"):
    """A worker that began to train.

    Attributes:
        rank: global rank; likewise `local_rank` and `world_size`.
        time_s: the node's wall clock.
        source: what counts its steps: `trainer`, `deepspeed` or `optimizer`.
        versions: of torch and, where imported, transformers and deepspeed.
    """

    rank: int
    local_rank: int
    world_size: int
    time_s: float
    source: str
    versions: dict[str, str] = {}


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
    """

    rank: int
    step: int
    time_s: float
    mono_ns: int
    step_time_us: float | None = None
    total_steps: int | None = None
    samples: int | None = None


class LossSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="loss"):
    """A loss that the framework logged; None is NaN or infinity: the training has diverged."""

    rank: int
    step: int
    loss: float | None


class TrainEndSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="train_end"):
    """The end of a training, with the figures that the framework reports itself.

    Attributes:
        rank: global rank.
        time_s: the node's wall clock.
        train_runtime_s: the Trainer's own.
        train_samples_per_s: the Trainer's own: nominal, warm-up included, cluster-wide.
    """

    rank: int
    time_s: float
    train_runtime_s: float | None = None
    train_samples_per_s: float | None = None


class ExceptionSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="exception"):
    """An exception that ended a worker."""

    rank: int
    time_s: float
    type: str
    message: str
    traceback: str = ""


class NicSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="nic"):
    """Counters of a network card, since the card came up."""

    time_s: float
    mono_ns: int
    ifname: str
    rx_bytes: int
    tx_bytes: int
    rx_packets: int
    tx_packets: int


class CpuSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="cpu"):
    """The node's processors and memory."""

    time_s: float
    mono_ns: int
    busy_percent: float | None = None
    memory_available_gib: float | None = None


class GpuSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="gpu"):
    """One GPU."""

    time_s: float
    mono_ns: int
    index: int
    sm_percent: float | None = None
    memory_used_gib: float | None = None
    power_w: float | None = None
    sm_clock_mhz: float | None = None
    temperature_c: float | None = None


class CardBytes(msgspec.Struct, frozen=True, kw_only=True):
    """What a card's counters grew by.

    Attributes:
        tx_bytes: sent; likewise `rx_bytes`, received. Ethernet headers are counted, frame check sequences are not.
        tx_packets: likewise; None where packets are not counted (RDMA, which counts payload).
    """

    tx_bytes: int
    rx_bytes: int
    tx_packets: int | None = None
    rx_packets: int | None = None


class CollectiveSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="collective"):
    """One message of a collective benchmark on one worker.

    Attributes:
        rank: global rank; likewise `local_rank`.
        collective: which.
        dtype: nccl-tests' name of the element type; `redop` that of the reduction, `none` where nothing is reduced.
        size_bytes: S as nccl-tests counts it, rounded down to what divides among the workers.
        count: elements, as nccl-tests counts them: of one worker's share where there are shares.
        times_us: every timed iteration, in order.
        num_wrong: elements whose value was not exact; None where they were not verified.
        cards: by network card, what passed it while `card_iters` iterations ran; of a node's first worker only.
        card_iters: iterations that `cards` covers.
        index: of the message in the request.
    """

    rank: int
    local_rank: int = 0
    collective: str
    dtype: str
    redop: str = "sum"
    size_bytes: int
    count: int
    times_us: tuple[float, ...]
    num_wrong: int | None = None
    cards: dict[str, CardBytes] | None = None
    card_iters: int = 0
    index: int = 0


class BenchmarkSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="benchmark"):
    """A worker of a collective benchmark that began.

    Attributes:
        rank: global rank.
        world_size: how many workers.
        backend: `nccl` or `gloo`.
        timer: what timed the iterations: `clock` (the processor's monotonic clock) or `cuda` (CUDA events).
        device: the GPU's name, or None.
    """

    rank: int
    world_size: int
    backend: str
    timer: str = "clock"
    device: str | None = None


class NcclSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="nccl"):
    """What NCCL wrote down about its connections in one worker: the telling lines of its log."""

    rank: int
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
)

_DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Sample)


def parse_samples(lines: Iterable[bytes]) -> Iterator[Sample]:
    """The samples in JSON lines; a torn or foreign line is passed over."""
    for line in lines:
        try:
            yield _DECODER.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
