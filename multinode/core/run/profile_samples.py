"""What the instrumentation in a training worker records beside its steps: model, process groups, traffic, DDP, trace.

Raw, as `samples` has them all; read by `parse_samples` there. Nothing is computed here.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

__all__ = [
    "CallCount",
    "Count",
    "DdpSample",
    "DeviceWaitSample",
    "GroupSample",
    "ModelSample",
    "NoteSample",
    "TraceSample",
    "TrafficSample",
]

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
"""What a node counts, from nothing on. A larger figure is none: sums of these stay far from what a float can hold."""


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
        accumulation: micro-batches a step, where the framework says.
        dataset_samples: samples of the training's data set, of all workers together, where the Trainer says.
        device: `cpu` or `cuda`; `device_name` the GPU's name.
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
    size_bytes: float
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
    forward_us: float
    backward_us: float
    comm_us: float
    overlap_us: float


class DeviceWaitSample(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="device_wait"):
    """How long a GPU's computing stream waited in the collectives of one step, by CUDA events; comes some steps later.

    Attributes:
        rank: global rank.
        wait_us: in all.
        calls: how many calls were timed, of `of_calls`.
    """

    rank: Count
    step: Count
    wait_us: float
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
