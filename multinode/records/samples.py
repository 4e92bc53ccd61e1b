"""Samples: what the workers and the sampler on a node recorded, one JSON object a line. Raw; nothing is trimmed here.

Untrusted: a line that is not one of these is passed over and counted, never an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import msgspec

from multinode.decoding import convert, decode_json, printable_values

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
"""What a node counts, from nothing on. A larger figure is none: sums of these stay far from what a float can hold."""
Total = Annotated[float, msgspec.Meta(ge=0, le=1 << 60)]
"""Likewise, of what need not be whole."""
Us = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
"""A part of a step, up to eleven days."""
TookUs = Annotated[float, msgspec.Meta(ge=1e-3, le=1e12)]
"""What something took, from a nanosecond on: what is divided by it stays far from what a float can hold, too."""
Percent = Annotated[float, msgspec.Meta(ge=0, le=100)]
Gauge = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
"""What a gauge of a machine can show: cores, watts, MHz or GiB."""
Celsius = Annotated[float, msgspec.Meta(ge=-100, le=250)]


class NoteSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="note"):
    """Something that could not be recorded, and why; `rank` is None where a sampler of the node says so."""

    message: str
    rank: Count | None = None


class ModelSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="model"):
    """What is trained and how it is spread over the workers; the last one of a worker counts.

    Attributes:
        rank: global rank.
        wrapper: `ddp`, `deepspeed`, `fsdp` (FullyShardedDataParallel), `fsdp2` (fully_shard) or `none`.
        zero_stage: DeepSpeed's; None without it.
        parameters: of the whole model, sharded or not.
        trainable: those of them that have gradients.
        dtypes: parameters by the name of their dtype (`bfloat16`).
        trainable_dtypes: likewise of the trainable ones.
        accumulation: micro-batches per step, where the framework says.
        dataset_samples: samples of the training's data set, of all workers together, where the Trainer says.
        device: `cpu` or `cuda`; `device_name` the GPU's name.
        mixed_precision: in which accelerate multiplies matrices: `no`, `bf16`, `fp16` or `fp8`; None where it does not
            prepare the model.
        tf32: whether a GPU would multiply fp32 matrices as tf32; None is not known.
        settings: what decides the communication: of DDP `bucket_cap_mb`, `find_unused_parameters`, `static_graph`,
            `comm_hooks`; of DeepSpeed `overlap_comm`, `reduce_bucket_size`, `communication_dtype` and others; of FSDP
            `reshard_after_forward`.
    """

    rank: Count
    wrapper: str
    zero_stage: Count | None = None
    parameters: Count
    trainable: Count
    dtypes: dict[str, Count] = {}
    trainable_dtypes: dict[str, Count] = {}
    accumulation: Count | None = None
    dataset_samples: Count | None = None
    device: str | None = None
    device_name: str | None = None
    mixed_precision: str | None = None
    tf32: bool | None = None
    settings: dict[str, str | int | float | bool | None] = {}


class GroupSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="group"):
    """A process group that this worker has called a collective on.

    Attributes:
        rank: global rank of the worker.
        group: its name, unique in this worker.
        ranks: the global ranks in it, in the group's order.
        backend: `nccl` or `gloo`, as torch names it.
    """

    rank: Count
    group: str
    ranks: tuple[Count, ...]
    backend: str


class CallCount(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one kind and size.

    Attributes:
        op: `all_reduce`, `all_gather`, `reduce_scatter`, `broadcast`, `all_to_all`, `reduce`, `gather`, `scatter`,
            `send`, `recv` or `barrier`.
        size_bytes: S of one call as nccl-tests counts it: of an all-gather what every worker has afterwards, of a
            reduce-scatter what it had before. The mean, where sizes were summed up.
        source: `call` where torch.distributed was called, `ddp` for the buckets of DDP's reducer, which nothing in
            Python sees pass.
    """

    op: str
    group: str
    size_bytes: Total
    count: Count
    source: str = "call"


class TrafficSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="traffic"):
    """What steps of a worker called, told once for all steps that called the same (`StepSample.traffic` names it).

    Attributes:
        rank: global rank.
        traffic: its number, from 0, in this worker.
        calls: what a step called; empty is nothing.
    """

    rank: Count
    traffic: Count
    calls: tuple[CallCount, ...]


class DdpSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="ddp"):
    """DDP's own counters of one step (`_get_ddp_logging_data`).

    Attributes:
        rank: global rank.
        iteration: DDP's number of it.
        bucket_sizes_bytes: its buckets, in the order in which they are reduced.
        forward_us: of the last micro-batch's forward pass; likewise `backward_us`, the backward computation, from the
            loss to the last gradient.
        comm_us: from the first bucket's reduction to the end of the last one, waiting for buckets included.
        overlap_us: what of that passed while the backward computation went on. Exposed is `comm_us - overlap_us`.
    """

    rank: Count
    step: Count
    iteration: Count
    bucket_sizes_bytes: tuple[Count, ...]
    forward_us: Us
    backward_us: Us
    comm_us: Us
    overlap_us: Us


class AveragingSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="averaging"):
    """Nodes average their parameters every H-th optimizer step, and gradients inside the node alone.

    Attributes:
        rank: global rank.
        nodes: that average.
        every: optimizer steps of a round, H.
        dtype: in which changes travel, `fp16` or `bf16`; None sends the parameters as they are.
        outer_lr: of DiLoCo's outer optimizer; None is local SGD. `momentum` is its own.
    """

    rank: Count
    nodes: Count
    every: Count
    dtype: str | None = None
    outer_lr: Total | None = None
    momentum: Total = 0.0


class SyncSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="sync"):
    """The end of a round, in which nodes average their parameters.

    Attributes:
        rank: global rank.
        step: in whose time it falls; that after the last step where it ends the training.
        steps: optimizer steps of the round; fewer than H where it was closed early.
        reason: `round`, or what closed it early: `checkpoint`, `evaluation`, `best model` or `end`.
        size_bytes: S of its all-reduces between nodes; 0 of a worker that takes its node's from another.
        sync_us: that it took, waiting for other nodes included.
        drift: norm of the difference between this node's parameters and the mean of all; of a node's first worker.
    """

    rank: Count
    step: Count
    steps: Count
    reason: str
    size_bytes: Count
    sync_us: Us
    drift: Total | None = None


class DeviceWaitSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="device_wait"):
    """How long a GPU's computing stream waited in the collectives of one step, by CUDA events; comes some steps later.

    Attributes:
        rank: global rank.
        wait_us: in all.
        calls: how many calls of the step were timed, of `of_calls`.
    """

    rank: Count
    step: Count
    wait_us: Us
    calls: Count
    of_calls: Count


class TraceSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="trace"):
    """A window of torch.profiler that was recorded.

    Attributes:
        rank: global rank.
        first_step: the first step in it; `last_step` the last.
        disturbed_to: the last step that recording, ending and writing it may have slowed.
        file: the trace's name in the run directory's `traces`; None where it failed.
    """

    rank: Count
    first_step: Count | None = None
    last_step: Count | None = None
    disturbed_to: Count | None = None
    file: str | None = None
    error: str | None = None


class DeviceSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="device"):
    """The device of a worker that begins to measure it.

    Attributes:
        device: `cpu` or `cuda`.
        name: as the driver, or /proc/cpuinfo, calls it; None is unknown.
        threads: that torch computes with on a processor.
        cores: that the worker may run on; `node_cores`, all of the node.
        capability: what its kernels are built for: `sm_90`, `AVX512`.
        memory_gib: of a GPU.
        torch: its version; `cuda` that of the CUDA it was built with.
    """

    rank: Count
    local_rank: Count = 0
    device: str
    name: str | None = None
    threads: Count | None = None
    cores: Count | None = None
    node_cores: Count | None = None
    capability: str | None = None
    memory_gib: Gauge | None = None
    torch: str | None = None
    cuda: str | None = None


class SpeedSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="speed"):
    """One test on one worker's device, gone through once.

    Attributes:
        rank: global rank.
        index: of the test, counted from 0 over all repeats.
        test: `matmul`, `copy`, `triad`, `to_device`, `from_device`, or a layer: `bert`, `gpt2`, `t5_encoder`,
            `t5_decoder`.
        dtype: of DEVICE_DTYPES.
        size: rows of the square matrices, or elements of each buffer.
        width_bytes: of an element.
        backward: of a layer: whether its backward pass is timed, too.
        batch: of a layer, samples at once; likewise `sequence`, tokens of each, `hidden`, its width, `feedforward`,
            the inner width of its two linear maps, and `attentions`, how many it has.
        times_us: of one call, the mean over `calls` of them in a row; every timing, in order.
        graph: whether the calls were replayed as a CUDA graph, so that Python launched none of them.
        began_mono_ns: the node's monotonic clock when the timed calls began; `ended_mono_ns` when they ended.
        error: why it could not be measured; None where it was.
    """

    rank: Count
    index: Count = 0
    test: str
    dtype: str
    size: Count | None = None
    width_bytes: Count | None = None
    backward: bool = False
    batch: Count | None = None
    sequence: Count | None = None
    hidden: Count | None = None
    feedforward: Count | None = None
    attentions: Count | None = None
    times_us: tuple[TookUs, ...] = ()
    calls: Count = 1
    graph: bool = False
    began_mono_ns: Count | None = None
    ended_mono_ns: Count | None = None
    error: str | None = None


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
        estimated_tokens: those of `tokens` whose masks were not counted: in `effective_tokens` and `squared_lengths`
            they are taken to be as those before. None is none of them.
        squared_lengths: of its sequences, each token of which attends to its own sequence alone: the sum of the squares
            of their lengths, in tokens; padding is none where it is known.
        phases_us: host time of this step by what it was spent on, the innermost alone: `data` (waiting for a batch),
            `forward`, `backward`, `optimizer`, `comm` (blocked in a collective). The rest is nobody's.
        core_wait_us: what the thread that trains waited in this step for a core that others had, by the kernel's count
            and by phase, `host` outside of all; None is not known.
        traffic: the number of the TrafficSample that says what this step called.
        cards: by NIC (or RDMA port), its counters at the step's end, since the card came up; of a node's first
            worker, ten times per second at the most.
        peak_memory_bytes: allocated on the GPU so far, else resident in the worker's process; once a second at most.
        peak_reserved_bytes: reserved on the GPU by torch's allocator so far, allocated or not; likewise.
    """

    rank: Count
    step: Count
    time_s: float
    mono_ns: Count
    step_time_us: TookUs | None = None
    total_steps: Count | None = None
    samples: Count | None = None
    micro_steps: Count | None = None
    tokens: Count | None = None
    effective_tokens: Count | None = None
    squared_lengths: Count | None = None
    estimated_tokens: Count | None = None
    phases_us: dict[str, Us] | None = None
    core_wait_us: dict[str, Us] | None = None
    traffic: Count | None = None
    cards: dict[str, CardBytes] | None = None
    peak_memory_bytes: Count | None = None
    peak_reserved_bytes: Count | None = None


class LossSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="loss"):
    """A loss that the framework logged; None is NaN or infinity: the training has diverged."""

    rank: Count
    step: Count
    loss: float | None


class EvaluationSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="evaluation"):
    """The loss of an evaluation on held-out data after this step; None is NaN or infinity."""

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


class NicSample(CardBytes, frozen=True, kw_only=True, tag_field="kind", tag="nic"):
    """Counters of a NIC, or of an RDMA port (`mlx5_0/1`), which counts no packets, since it came up.

    `carrier_changes` counts how often its link went or came; of an RDMA port how often it went, and `link_recoveries`
    how often it was recovered from errors. `symbol_errors`, of an RDMA port, are errors on its physical lanes.
    """

    time_s: float
    mono_ns: Count
    ifname: str
    rx_errors: Count | None = None
    tx_errors: Count | None = None
    rx_dropped: Count | None = None
    tx_dropped: Count | None = None
    carrier_changes: Count | None = None
    link_recoveries: Count | None = None
    symbol_errors: Count | None = None


class NcclWarningSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="nccl_warning"):
    """A WARN line of NCCL's own log, read when the job had failed; `time_s` is when it was read."""

    time_s: float
    message: str


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
    quota_cores: Annotated[float, msgspec.Meta(gt=0, le=1e6)] | None = None
    throttled_us: Total
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
    busy_percent: Percent | None = None
    iowait_percent: Percent | None = None
    steal_percent: Percent | None = None
    job_cores: Gauge | None = None
    memory_available_gib: Gauge | None = None
    memory_total_gib: Gauge | None = None


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
    sm_percent: Percent | None = None
    memory_used_gib: Gauge | None = None
    memory_total_gib: Gauge | None = None
    power_w: Gauge | None = None
    power_limit_w: Gauge | None = None
    sm_clock_mhz: Gauge | None = None
    sm_clock_max_mhz: Gauge | None = None
    temperature_c: Celsius | None = None
    pcie_gen: Count | None = None
    pcie_gen_max: Count | None = None
    pcie_width: Count | None = None
    pcie_width_max: Count | None = None
    pcie_rx_gb_per_s: float | None = None
    pcie_tx_gb_per_s: float | None = None
    throttle: tuple[str, ...] = ()
    energy_j: Total | None = None
    ecc_uncorrected: Count | None = None


class CollectiveSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="collective"):
    """One message of a collective benchmark on one worker.

    Attributes:
        dtype: nccl-tests' name of the element type; `redop` that of the reduction, `none` where nothing is reduced.
        size_bytes: S as nccl-tests counts it, rounded down to what divides among the workers.
        count: elements, as nccl-tests counts them: of one worker's share where there are shares.
        times_us: every timed iteration, in order.
        num_wrong: elements whose value was not exact; None where they were not verified.
        cards: by NIC, what passed it while `card_iters` iterations ran; of a node's first worker only.
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
    times_us: tuple[TookUs, ...]
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


class StreamResult(msgspec.Struct, frozen=True, kw_only=True):
    """What arrived of a stream over one TCP connection, its beginning left out; None where it failed.

    Attributes:
        rdma_port: that which sent it, `mlx5_0:1`; None of TCP.
    """

    rdma_port: str | None = None
    size_bytes: Count | None = None
    time_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None = None
    error: str | None = None


class StreamSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="stream"):
    """A raw stream from a node to the next, between two turns of a collective; of a node's first worker.

    Attributes:
        rank: global rank.
        index: of the message in the request.
        network: `tcp`, or `rdma`: what perftest's ib_write_bw wrote.
        results: by connection, or by RDMA port; all of them streamed at once.
    """

    rank: Count
    index: Count
    network: str = "tcp"
    results: tuple[StreamResult, ...]


class PingSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="ping"):
    """Round trips of a small message from a node to the next, before the first collective; of its first worker."""

    rank: Count
    times_us: tuple[TookUs, ...] = ()
    error: str | None = None


class NcclSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="nccl"):
    """What NCCL wrote down about its connections in one worker: the telling lines of its log."""

    rank: Count
    lines: tuple[str, ...]


class NcclOpSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="nccl_op"):
    """One operation on one rank, as NCCL's Inspector plugin recorded it.

    Attributes:
        comm: the communicator's id; likewise `comm_ranks`, how many there are in it, on so many `nodes`.
        comm_rank: of this worker in the communicator.
        op: as NCCL names it: `AllReduce`, `AllGather`, `ReduceScatter`, `Broadcast`, `Reduce`.
        number: of the operation in its communicator; equal on all ranks.
        size_bytes: of the call's buffer, which of a gather or a scatter is one rank's share.
        time_us: that it took, by the GPU's clock where `timing` is `kernel_gpu`.
        busbw_gb_per_s: the plugin's own.
        written_s: the node's wall clock when the record was written; the plugin does not record when it ran.
    """

    comm: str
    comm_rank: Count
    comm_ranks: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    nodes: Count = 1
    op: str
    number: Count
    size_bytes: Count
    time_us: TookUs
    busbw_gb_per_s: Total = 0.0
    timing: str | None = None
    written_s: Total


Sample = (
    WorkerSample
    | StepSample
    | LossSample
    | EvaluationSample
    | TrainEndSample
    | ExceptionSample
    | NicSample
    | CpuSample
    | GpuSample
    | CollectiveSample
    | BenchmarkSample
    | NcclSample
    | NcclOpSample
    | StreamSample
    | PingSample
    | NoteSample
    | ModelSample
    | GroupSample
    | TrafficSample
    | DdpSample
    | AveragingSample
    | SyncSample
    | DeviceWaitSample
    | TraceSample
    | TcpSample
    | CgroupSample
    | KernelSample
    | NcclWarningSample
    | DeviceSample
    | SpeedSample
)

_DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Sample)
# The longest text that a recorder of ours writes is a traceback.
_LONGEST_TEXT = 16384
_DELETE = b"\x7f"


def parse_samples(lines: Iterable[bytes]) -> Iterator[Sample]:
    """The samples in JSON lines; a torn or foreign line is passed over.

    Their texts are printable, on one line but for what an exception said, and cut off where they are longer than any of
    ours.
    """
    for line in lines:
        try:
            yield _DECODER.decode(line) if _is_harmless(line) else _decode_foreign(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue


def _is_harmless(line: bytes) -> bool:
    """Whether no text in it can be other than short and printable, as in all but a few of our records.

    JSON has no control character as it is but DELETE; the others are escaped.
    """
    return len(line) <= _LONGEST_TEXT and line.isascii() and b"\\" not in line and _DELETE not in line


def _decode_foreign(line: bytes) -> Sample:
    record = decode_json(line, object)
    raised = isinstance(record, dict) and record.get("kind") == "exception"
    with_lines = ("message", "traceback") if raised else ()
    return convert(printable_values(record, with_lines=with_lines, longest=_LONGEST_TEXT), Sample)  # type: ignore[arg-type]  # a union is no type
