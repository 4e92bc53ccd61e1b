"""PublishedBenchmarks: what a paper or a post tells of a training, as a file has it. Data only; strict about keys.

What predictions can start from, `predict.published_benchmarks` makes of it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

_ETHERNET_MTU = 1500
# Above these a figure is a slip of the pen; products stay far from what a float can hold.
_Positive = Annotated[float, Meta(gt=0, le=1e12)]
_Count = Annotated[int, Meta(gt=0, le=1 << 20)]
# As many as the options of `predict` take.
_Fleet = Annotated[int, Meta(gt=0, le=1024)]
_Parameters = Annotated[int, Meta(gt=0, le=10**14)]


class Lora(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A LoRA adapter: its rank, and the modules that it is put on; `all` alone is every linear module."""

    rank: _Count
    targets: tuple[str, ...] = ("all",)


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is trained: its shape, or how many parameters.

    Attributes:
        name: for people.
        shape: its config.json, or what of it decides its size.
        parameters: in all; needed of a strategy that gathers them, where there is no shape.
        trainable: of them; where there is no shape.
        lora: the adapter, beside a shape.
    """

    name: str = "the model"
    shape: dict[str, Any] | None = None
    parameters: _Parameters | None = None
    trainable: _Parameters | None = None
    lora: Lora | None = None


class Network(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The link of a node: its rate, the payload that a stream was measured to carry one way, or both.

    Attributes:
        gbit_per_s: of its NIC, of all its NICs together.
        payload_mb_per_s: as a file copy tells it; or `payload_gbit_per_s`, as iperf3 does.
    """

    gbit_per_s: _Positive | None = None
    payload_mb_per_s: _Positive | None = None
    payload_gbit_per_s: _Positive | None = None
    mtu: Annotated[int, Meta(ge=576, le=65536)] = _ETHERNET_MTU
    rdma: bool = False


class Speed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How fast some workers were: exactly one of step time, samples or tokens per second, and what all samples took.

    Attributes:
        workers_per_node: where all nodes have as many; else `workers`, one figure a node.
        per_device_batch: where it is another one than that of the file; likewise `accumulation`.
        step_time_ms: of an optimizer step.
        samples_per_s: of all workers; likewise `tokens_per_s`, for `tokens_per_sample` of the file.
        tgs: tokens per GPU and second: of one worker.
        runtime_s: of the whole training, for `samples` of the file.
    """

    nodes: _Fleet = 1
    workers_per_node: _Fleet | None = None
    workers: tuple[_Fleet, ...] = ()
    per_device_batch: _Positive | None = None
    accumulation: _Count | None = None
    step_time_ms: _Positive | None = None
    samples_per_s: _Positive | None = None
    tokens_per_s: _Positive | None = None
    tgs: _Positive | None = None
    runtime_s: _Positive | None = None


class PublishedBenchmarks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of published figures.

    Attributes:
        title: for people.
        optimizer_within_node: of zero1, whether its states are shared out among the workers of each node alone, as
            InternLM and others have it; what was updated is then gathered inside the nodes. None is not told.
        gradient_bytes: of one element on the wire; else 4 under DDP, and as the precision has it under the others.
        per_device_batch: samples of a worker's micro-batch.
        accumulation: micro-batches per step.
        overlap: whether gradients are reduced while others are computed.
        bucket_mib: the most gradients that are reduced at once: 25 is torch's default. Without it nobody knows what is
            sent when the last of them is there.
        tokens_per_sample: padded.
        samples: of the whole training, all epochs; for `runtime_s`.
        network: between the nodes.
        several_nodes: how fast several nodes were; it is held against the model, which does not know it.
    """

    title: str = "published figures"
    model: Model
    strategy: Literal["ddp", "zero1", "zero2", "zero3", "fsdp", "shard_grad_op", "hybrid_shard"]
    optimizer_within_node: bool | None = None
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    gradient_bytes: Literal[2, 4] | None = None
    per_device_batch: _Positive
    accumulation: _Count = 1
    overlap: bool = True
    bucket_mib: _Positive | None = None
    tokens_per_sample: _Positive | None = None
    samples: _Positive | None = None
    network: Network
    backend: Literal["nccl", "gloo"] = "nccl"
    single_node: Speed
    several_nodes: Speed | None = None
