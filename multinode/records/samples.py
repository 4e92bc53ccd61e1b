"""Samples: records of the workers and of the sampler on a node, one JSON object per line. Raw and untrimmed.

Untrusted: a line of another form, or out of bounds, is skipped and counted, never an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import msgspec

from multinode.decoding import convert, decode_json, is_printable_json, printable_values
from multinode.stats.unknown import Unknown

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
"""A node's count, 0 or more. Larger figures are invalid: sums of these stay within a float."""
Total = Annotated[float, msgspec.Meta(ge=0, le=1 << 60)]
"""A node's sum, 0 or more, not necessarily whole."""
Us = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
"""A part of a step, at most eleven days."""
TookUs = Annotated[float, msgspec.Meta(ge=1e-3, le=1e12)]
"""A duration of at least a nanosecond: what is divided by it stays within a float, too."""
Percent = Annotated[float, msgspec.Meta(ge=0, le=100)]
Gauge = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
"""A reading of a machine: cores, watts, MHz or GiB."""
Celsius = Annotated[float, msgspec.Meta(ge=-100, le=250)]


class NoteSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="note"):
    """Something that could not be recorded, and why; `rank` is None if the node's sampler reports it."""

    message: str
    rank: Count | None = None
    # what is missing as a result: `gpus` or `cgroup` samples, or a lever (`compression`) that changed nothing; or empty
    lacks: str = ""


class TokenWork(msgspec.Struct, frozen=True, kw_only=True, tag_field="is", tag="work"):
    """The weights of a model that one token is multiplied with; FLOPs per token follow from them."""

    trained: Count = 0  # that are trained
    passed: Count = 0  # frozen, with a gradient that passes through them
    frozen: Count = 0  # frozen, before all that is trained
    attention_width: Count | None = None  # of the queries, all layers together that see all tokens; None if unknown
    sliding_width: Count = 0  # of the queries, all layers together that see the last `window` tokens
    window: Count = 0
    experts: str = ""  # that a token is sent to, `2 of 8`: their share is counted; empty without experts
    left_out: Count = 0  # parameters of encoders of images and sound, which see no tokens
    recomputed: Count = 0  # of all of them, those whose forward pass is repeated in the backward pass

    @property
    def active(self) -> int:
        """All weights that one token is multiplied with."""
        return self.trained + self.passed + self.frozen


class ModelSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="model"):
    """What is trained and how it is distributed over the workers; the last one of a worker counts."""

    rank: Count  # global rank
    wrapper: str  # `ddp`, `deepspeed`, `fsdp` (FullyShardedDataParallel), `fsdp2` (fully_shard) or `none`
    zero_stage: Count | None = None  # DeepSpeed's; None without it
    parameters: Count  # of the whole model, sharded or not
    trainable: Count  # parameters with gradients
    dtypes: dict[str, Count] = {}  # number of parameters by dtype (`bfloat16`)
    trainable_dtypes: dict[str, Count] = {}  # number of trainable parameters by dtype
    accumulation: Count | None = None  # micro-batches per step, if the framework reports it
    dataset_samples: Count | None = None  # samples in the training set, over all workers, if the Trainer reports it
    device: str | None = None  # `cpu` or `cuda`; `device_name` is the GPU's name
    device_name: str | None = None
    device_uuid: str | None = None  # the GPU's own id; workers that share it tell the same
    # of accelerate (`bf16`, `fp16` or `fp8`), else of torch.autocast; None without either
    mixed_precision: str | None = None
    tf32: bool | None = None  # whether a GPU multiplies fp32 matrices as tf32; None if unknown
    # settings that decide the communication: for DDP `bucket_cap_mb`, `find_unused_parameters`, `static_graph`,
    # `comm_hooks`; for DeepSpeed `overlap_comm`, `reduce_bucket_size`, `communication_dtype` and others; for FSDP
    # `reshard_after_forward`
    settings: dict[str, str | int | float | bool | None] = {}
    token_work: TokenWork | Unknown | None = None  # of one worker's model; None if its modules are unknown


class GroupSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="group"):
    """A process group in which this worker has called a collective."""

    rank: Count  # global rank of the worker
    group: str  # its name, unique in this worker
    ranks: tuple[Count, ...]  # its global ranks, in the group's order
    backend: str  # `nccl` or `gloo`, as in torch


class CallCount(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one kind and size."""

    # `all_reduce`, `all_gather`, `reduce_scatter`, `broadcast`, `all_to_all`, `reduce`, `gather`, `scatter`, `send`,
    # `recv` or `barrier`
    op: str
    group: str
    # S of one call as nccl-tests counts it: for an all-gather what every worker has afterwards, for a reduce-scatter
    # what it had before. The mean if sizes were summed up.
    size_bytes: Total
    count: Count
    # `call` for calls of torch.distributed, `ddp` for the buckets of DDP's reducer, which Python does not see
    source: str = "call"


class TrafficSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="traffic"):
    """The calls of a step, recorded once for all steps with the same calls (`StepSample.traffic` refers to it)."""

    rank: Count  # global rank
    traffic: Count  # its number in this worker, from 0
    calls: tuple[CallCount, ...]  # of a step; may be empty


class DdpSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="ddp"):
    """DDP's own counters of one step (`_get_ddp_logging_data`)."""

    rank: Count  # global rank
    step: Count
    iteration: Count  # DDP's number of it
    awaited: bool = False  # whether the host waited for the GPU in order to read it, beside DDP's first ten
    bucket_sizes_bytes: tuple[Count, ...]  # its buckets, in the order of their reduction
    forward_us: Us  # forward pass of the last micro-batch
    backward_us: Us  # backward computation, from the loss to the last gradient
    comm_us: Us  # from the start of the first bucket's reduction to the end of the last, including waits for buckets
    overlap_us: Us  # the part of it during the backward computation. Exposed is `comm_us - overlap_us`.


class AveragingSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="averaging"):
    """Nodes average their parameters every H-th optimizer step; gradients are reduced only inside a node."""

    rank: Count  # global rank
    nodes: Count  # number of nodes that average
    every: Count  # optimizer steps per round, H
    dtype: str | None = None  # `fp16` or `bf16`, in which changes are sent; None sends the parameters unchanged
    outer_lr: Total | None = None  # of DiLoCo's outer optimizer; None is local SGD
    momentum: Total = 0.0  # of the outer optimizer


class SyncSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="sync"):
    """The end of a round, when nodes average their parameters."""

    rank: Count  # global rank
    step: Count  # the step that includes it; the one after the last step if it ends the training
    steps: Count  # optimizer steps of the round; fewer than H if it was closed early
    reason: str  # `round`, or what closed it early: `checkpoint`, `evaluation`, `best model` or `end`
    # S of its all-reduces between nodes; 0 for a worker that gets its parameters from another on its node
    size_bytes: Count
    sync_us: Us  # duration, including waits for other nodes
    # norm of the difference between this node's parameters and the mean; from a node's first worker
    drift: Total | None = None


class DeviceWaitSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="device_wait"):
    """Time that a GPU's compute stream waited in the collectives of one step, by CUDA events; some steps late."""

    rank: Count  # global rank
    step: Count
    wait_us: Us  # in total
    local_us: Us = 0.0  # of it, in groups whose workers are all on this node, of several
    calls: Count  # number of timed calls, out of `of_calls`
    of_calls: Count
    dropped: Count = 0  # waits that were not timed because too many were not over yet


class TraceSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="trace"):
    """A window that torch.profiler recorded."""

    rank: Count  # global rank
    first_step: Count | None = None  # the first step in it
    last_step: Count | None = None  # the last step in it
    disturbed_to: Count | None = None  # the last step that recording and writing may have slowed down
    file: str | None = None  # name of the trace in the run directory's `traces`; None if it failed
    error: str | None = None


class DeviceSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="device"):
    """The device of a worker that starts to measure it."""

    rank: Count
    local_rank: Count = 0
    device: str  # `cpu` or `cuda`
    name: str | None = None  # from the driver, or from /proc/cpuinfo; None if unknown
    threads: Count | None = None  # torch's threads on a CPU
    cores: Count | None = None  # that the worker may use
    node_cores: Count | None = None  # all of the node
    capability: str | None = None  # target of its kernels: `sm_90`, `AVX512`
    memory_gib: Gauge | None = None  # of a GPU
    torch: str | None = None  # its version
    cuda: str | None = None  # version of CUDA that torch was built with


class SpeedSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="speed"):
    """One test on one worker's device, in one pass."""

    rank: Count  # global rank
    index: Count = 0  # of the test, counted from 0 over all passes
    # `matmul`, `copy`, `triad`, `to_device`, `from_device`, or a layer: `bert`, `gpt2`, `t5_encoder`, `t5_decoder`
    test: str
    dtype: str  # of DEVICE_DTYPES
    size: Count | None = None  # rows of the square matrices, or elements of each buffer
    width_bytes: Count | None = None  # of an element
    backward: bool = False  # for a layer, whether its backward pass is included
    batch: Count | None = None  # for a layer, samples
    sequence: Count | None = None  # for a layer, tokens per sample
    hidden: Count | None = None  # for a layer, its width
    feedforward: Count | None = None  # for a layer, inner width of its MLP
    attentions: Count | None = None  # for a layer, its number of attentions
    # of one call, each the mean over `calls` consecutive calls; all timings, in order
    times_us: tuple[TookUs, ...] = ()
    calls: Count = 1
    graph: bool = False  # whether the calls were replayed as a CUDA graph, without launches by Python
    began_mono_ns: Count | None = None  # the node's monotonic clock at the start of the timed calls
    ended_mono_ns: Count | None = None  # the node's monotonic clock at the end of the timed calls
    error: str | None = None  # why it could not be measured; None if it was


class WorkerSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="worker"):
    """A worker that started to train."""

    rank: Count
    local_rank: Count
    world_size: Count
    time_s: float  # the node's wall clock
    source: str  # what counts its steps: `trainer`, `deepspeed` or `optimizer`
    versions: dict[str, str] = {}  # of torch and, if imported, transformers and deepspeed
    begun_mono_ns: Count | None = None  # the node's monotonic clock at the start of this worker's interpreter
    # the kernel's boot id and the number of the network namespace: where they are equal, interfaces of one name are one
    network: str | None = None
    nccl_proto: str | None = None  # the value of NCCL_PROTO; None if it is not set


class NicBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Growth of a NIC's counters."""

    tx_bytes: Count  # sent, including Ethernet headers, without frame check sequences
    rx_bytes: Count  # received, including Ethernet headers, without frame check sequences
    tx_packets: Count | None = None  # None if packets are not counted (RDMA, which counts payload)
    rx_packets: Count | None = None  # None if packets are not counted


class StepSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="step"):
    """One optimizer step of one worker."""

    rank: Count  # global rank
    step: Count  # counted from 1
    time_s: float  # the node's wall clock at the end of the step
    mono_ns: Count  # the node's monotonic clock at the end of the step
    # since the end of the previous step (for the first: since the training started; None if unknown)
    step_time_us: TookUs | None = None
    total_steps: Count | None = None  # of the training; None if the framework does not report it
    # nominal samples of this worker in this step (per-device batch x accumulation); None if unknown
    samples: Count | None = None
    micro_steps: Count | None = None  # forward passes with gradients in this step
    tokens: Count | None = None  # tokens of this worker in this step, including padding
    effective_tokens: Count | None = None  # tokens without padding
    # sum of the squared lengths of its sequences, in tokens; each token attends only to its own sequence. Without
    # padding if that is known.
    squared_lengths: Count | None = None
    # the part of `tokens` whose masks were not counted: `effective_tokens` and `squared_lengths` assume that they are
    # like the counted masks. None is 0.
    estimated_tokens: Count | None = None
    # host time of this step by phase, innermost only: `data` (waiting for a batch), `forward`, `backward`, `optimizer`,
    # `comm` (blocked in a collective), `comm_local` (blocked in one of workers that are all on this node, of several).
    # The rest is not attributed.
    phases_us: dict[str, Us] | None = None
    # time that the training thread waited for a CPU core, as counted by the kernel, by phase; `host` is outside all
    # phases. None if unknown.
    core_wait_us: dict[str, Us] | None = None
    traffic: Count | None = None  # number of the TrafficSample with the calls of this step
    # counters of each NIC or RDMA port at the end of the step, since it came up; from a node's first worker, at most
    # ten times per second
    nics: dict[str, NicBytes] | None = None
    # peak allocation on the GPU, or resident memory of the process; at most once per second
    peak_memory_bytes: Count | None = None
    peak_reserved_bytes: Count | None = None  # peak reserved by torch's allocator on the GPU; at most once per second


class LossSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="loss"):
    """A loss logged by the framework; None is NaN or infinity: the training has diverged."""

    rank: Count
    step: Count
    loss: float | None


class EvaluationSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="evaluation"):
    """The loss of an evaluation on held-out data after this step; None is NaN or infinity."""

    rank: Count
    step: Count
    loss: float | None


class TrainEndSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="train_end"):
    """The end of a training, with the framework's own figures."""

    rank: Count  # global rank
    time_s: float  # the node's wall clock
    train_runtime_s: float | None = None  # the Trainer's own
    train_samples_per_s: float | None = None  # the Trainer's own: nominal, over all workers, including warm-up


class ExceptionSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="exception"):
    """An exception that ended a worker."""

    rank: Count
    time_s: float
    type: str
    message: str
    traceback: str = ""


class FlightSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="flight"):
    """The last collectives of a worker when it ended."""

    rank: Count
    flight: str  # JSON, as `ProcessDiagnosis.flight`
    source: str = "recorder"  # or `watchdog`, or `calls` for those that the worker wrote down itself


class NicSample(NicBytes, frozen=True, kw_only=True, tag_field="kind", tag="nic"):
    """Counters of a NIC or RDMA port (`mlx5_0/1`; no packets) since it came up.

    `carrier_changes` counts how often the link went up or down (for an RDMA port: down), `link_recoveries` how
    often an RDMA port recovered from errors, `symbol_errors` errors on its physical lanes.
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


class ListeningSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="listening"):
    """A process of the job listens on the port on which the job serves, for the first time."""

    port: Count


class NcclWarningSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="nccl_warning"):
    """A WARN line of NCCL's log, read after the job failed; `time_s` is the time of reading."""

    time_s: float
    message: str


class KernelSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="kernel"):
    """A line of the node's kernel log that may report failing hardware."""

    time_s: float
    message: str


class TcpSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="tcp"):
    """The node's TCP counters over all NICs, since it booted (/proc/net/snmp)."""

    time_s: float
    mono_ns: Count
    sent_segments: Count
    retransmitted_segments: Count


class CgroupSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="cgroup"):
    """The CPU limit of the job's cgroup, and how often it took effect, since the cgroup was created."""

    time_s: float  # the node's wall clock
    mono_ns: Count  # the node's monotonic clock
    # CPUs that the cgroup may use; None is unlimited
    quota_cores: Annotated[float, msgspec.Meta(gt=0, le=1e6)] | None = None
    throttled_us: Total  # time throttled
    periods: Count  # enforcement periods
    throttled_periods: Count  # periods in which it was throttled


class CpuSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="cpu"):
    """The node's CPUs and memory."""

    time_s: float  # the node's wall clock
    mono_ns: Count  # the node's monotonic clock
    busy_percent: Percent | None = None  # of all cores, since the previous sample
    iowait_percent: Percent | None = None  # idle while waiting for a disk, since the previous sample
    steal_percent: Percent | None = None  # taken by the hypervisor, since the previous sample
    job_cores: Gauge | None = None  # cores used by the job's processes since the previous sample
    memory_available_gib: Gauge | None = None  # memory that the job can still allocate
    memory_total_gib: Gauge | None = None  # limit of the machine or of the job's cgroups, whichever is smaller


class GpuSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="gpu"):
    """One GPU, from NVML."""

    time_s: float  # the node's wall clock
    mono_ns: Count  # the node's monotonic clock
    index: Count
    mig: bool = False  # whether MIG divides it: utilisation, memory, power and energy of the job's part are unknown
    sm_percent: Percent | None = None  # share of time with a kernel running; a waiting NCCL kernel counts as running
    memory_used_gib: Gauge | None = None  # by all processes
    memory_total_gib: Gauge | None = None  # of the GPU
    power_w: Gauge | None = None  # power draw
    power_limit_w: Gauge | None = None  # its limit
    sm_clock_mhz: Gauge | None = None  # current clock
    sm_clock_max_mhz: Gauge | None = None  # maximum clock
    temperature_c: Celsius | None = None  # of the chip
    pcie_gen: Count | None = None  # current generation
    pcie_gen_max: Count | None = None  # maximum of GPU and slot
    pcie_width: Count | None = None  # current lanes
    pcie_width_max: Count | None = None  # maximum lanes of GPU and slot
    pcie_rx_gb_per_s: float | None = None  # into the GPU, over the last 20 ms
    pcie_tx_gb_per_s: float | None = None  # out of the GPU, over the last 20 ms
    # reasons for reduced clocks, by NVML's names (`sw_power_cap`, `hw_thermal_slowdown`, ...)
    throttle: tuple[str, ...] = ()
    energy_j: Total | None = None  # since the driver was loaded
    ecc_uncorrected: Count | None = None  # uncorrectable memory errors since the driver was loaded


class CollectiveSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="collective"):
    """One message of a collective benchmark on one worker."""

    rank: Count
    local_rank: Count = 0
    collective: str
    dtype: str  # nccl-tests' name of the element type
    redop: str = "sum"  # nccl-tests' name of the reduction, `none` if nothing is reduced
    size_bytes: Count  # S as nccl-tests counts it, rounded down to a multiple of the workers
    count: Count  # elements as nccl-tests counts them: of one worker's share for collectives with shares
    times_us: tuple[TookUs, ...]  # all timed iterations, in order
    num_wrong: Count | None = None  # elements with a wrong value; None if they were not verified
    # traffic of each NIC during `nic_iters` iterations; only from a node's first worker
    nics: dict[str, NicBytes] | None = None
    nic_iters: Count = 0  # iterations that `nics` covers
    index: Count = 0  # of the message in the request


class BenchmarkSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="benchmark"):
    """A worker of a collective benchmark that started."""

    rank: Count  # global rank
    world_size: Count
    backend: str  # `nccl` or `gloo`
    timer: str = "clock"  # of the iterations: `clock` (monotonic clock of the CPU) or `cuda` (CUDA events)
    device: str | None = None  # the GPU's name, or None


class StreamResult(msgspec.Struct, frozen=True, kw_only=True):
    """What arrived over one TCP connection, without its start-up; None if it failed."""

    rdma_port: str | None = None  # the sending port, `mlx5_0:1`; None for TCP
    size_bytes: Count | None = None
    time_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None = None
    error: str | None = None


class StreamSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="stream"):
    """A raw stream from a node to the next between two turns of a collective; from a node's first worker."""

    rank: Count  # global rank
    index: Count  # of the message in the request
    network: str = "tcp"  # `tcp`, or `rdma` (perftest's ib_write_bw)
    results: tuple[StreamResult, ...]  # by connection or RDMA port, all at once


class PingSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="ping"):
    """Round trips of a small message from a node to the next before the first collective; from its first worker."""

    rank: Count
    times_us: tuple[TookUs, ...] = ()
    error: str | None = None


class NcclSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="nccl"):
    """What NCCL logged about the connections of one worker."""

    rank: Count
    lines: tuple[str, ...]


class NcclOpSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="nccl_op"):
    """One operation on one rank, as recorded by NCCL's Inspector plugin."""

    comm: str  # the communicator's id
    comm_rank: Count  # rank of this worker in the communicator
    comm_ranks: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]  # number of its ranks
    nodes: Count = 1  # number of its nodes
    op: str  # NCCL's name: `AllReduce`, `AllGather`, `ReduceScatter`, `Broadcast`, `Reduce`
    number: Count  # of the operation in its communicator; equal on all ranks
    size_bytes: Count  # of the call's buffer; for a gather or scatter, one rank's share
    time_us: TookUs  # its duration, by the GPU's clock if `timing` is `kernel_gpu`
    busbw_gb_per_s: Total = 0.0  # as computed by the plugin
    timing: str | None = None
    written_s: Total  # the node's wall clock when the record was written; the plugin does not record when it ran


Sample = (
    WorkerSample
    | StepSample
    | LossSample
    | EvaluationSample
    | TrainEndSample
    | ExceptionSample
    | FlightSample
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
    | ListeningSample
    | NcclWarningSample
    | DeviceSample
    | SpeedSample
)

_DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Sample)
# The longest text that the recorder writes is a traceback.
_LONGEST_TEXT = 16384


def parse_samples(lines: Iterable[bytes]) -> Iterator[Sample]:
    """The samples in JSON lines; torn or foreign lines are skipped.

    Texts become printable and, except for exceptions, one line; overlong ones are cut off.
    """
    for line in lines:
        try:
            is_printable = len(line) <= _LONGEST_TEXT and is_printable_json(line)
            yield _DECODER.decode(line) if is_printable else _decode_foreign(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue


def _decode_foreign(line: bytes) -> Sample:
    record = decode_json(line, object)
    raised = isinstance(record, dict) and record.get("kind") == "exception"
    with_lines = ("message", "traceback") if raised else ()
    return convert(printable_values(record, with_lines=with_lines, longest=_LONGEST_TEXT), Sample)  # type: ignore[arg-type]  # a union is no type


# Eleven days: no step takes longer, and sums of such figures stay within a float.
_LONGEST_US = 1e12
# A nanosecond: no clock is finer, and what is divided by it stays within a float, too.
_SHORTEST_US = 1e-3
_LARGEST_COUNT = 1 << 60


def plausible_us(value: float | None) -> float | None:
    """A duration in microseconds: 0, or from a nanosecond to eleven days; None for anything else."""
    # NaN is in no range; an integer of a thousand digits is compared before it becomes a float.
    return float(value) if value is not None and (value == 0 or _SHORTEST_US <= value <= _LONGEST_US) else None


def plausible_count(value: int | None) -> int | None:
    """A number of things; None if it is missing, negative or above 2**60."""
    return value if value is not None and 0 <= value <= _LARGEST_COUNT else None
