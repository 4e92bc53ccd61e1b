"""PublishedBenchmarks: figures of a paper or post about a training, as a file. Data only; unknown keys are errors.

`predict.published_benchmarks` turns them into evidence.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from multinode.units import ETHERNET_MTU

# Larger figures are typing errors; products stay far from float limits.
_Positive = Annotated[float, Meta(gt=0, le=1e12)]
_Count = Annotated[int, Meta(gt=0, le=1 << 20)]
# The same limit as the options of `predict`.
_Fleet = Annotated[int, Meta(gt=0, le=1024)]
_Parameters = Annotated[int, Meta(gt=0, le=10**14)]


class Lora(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A LoRA adapter: its rank and target modules; `all` means every linear module."""

    rank: _Count
    targets: tuple[str, ...] = ("all",)


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The trained model: its shape, or its number of parameters."""

    name: str = "the model"  # for people
    shape: dict[str, Any] | None = None  # its config.json, or the part that decides its size
    parameters: _Parameters | None = None  # in total; needed without a shape for strategies that gather them
    trainable: _Parameters | None = None  # of them, without a shape
    lora: Lora | None = None  # the adapter, with a shape


class Network(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The link of a node: its rate, the measured one-way payload of a stream, or both."""

    gbit_per_s: _Positive | None = None  # of all its NICs together
    payload_mb_per_s: _Positive | None = None  # as from a file copy; or `payload_gbit_per_s`, as from iperf3
    payload_gbit_per_s: _Positive | None = None
    mtu: Annotated[int, Meta(ge=576, le=65536)] = ETHERNET_MTU
    rdma: bool = False


class Speed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speed of some workers: exactly one of step time, samples/s, tokens/s, and total runtime."""

    nodes: _Fleet = 1
    workers_per_node: _Fleet | None = None  # if equal on all nodes; otherwise `workers`, one number per node
    workers: tuple[_Fleet, ...] = ()
    per_device_batch: _Positive | None = None  # if it differs from that of the file; likewise `accumulation`
    accumulation: _Count | None = None
    step_time_ms: _Positive | None = None  # of an optimizer step
    # of all workers; likewise `tokens_per_s`, for `tokens_per_sample` of the file
    samples_per_s: _Positive | None = None
    tokens_per_s: _Positive | None = None
    tgs: _Positive | None = None  # tokens per GPU and second
    runtime_s: _Positive | None = None  # of the whole training, for `samples` of the file


class PublishedBenchmarks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of published figures."""

    title: str = "published figures"  # for people
    model: Model
    strategy: Literal["ddp", "zero1", "zero2", "zero3", "fsdp", "shard_grad_op", "hybrid_shard"]
    # for zero1, whether its states are sharded inside each node only, as in InternLM and others, with the updated
    # parameters gathered inside nodes. None if unknown.
    optimizer_within_node: bool | None = None
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    # per element on the wire; otherwise 4 with DDP, and by precision with the others
    gradient_bytes: Literal[2, 4] | None = None
    per_device_batch: _Positive  # samples per micro-batch of a worker
    accumulation: _Count = 1  # micro-batches per step
    overlap: bool = True  # whether gradient reduction overlaps with the backward pass
    # maximum size of a reduction: 25 is torch's default. Without it, the traffic after the last gradient is unknown.
    bucket_mib: _Positive | None = None
    tokens_per_sample: _Positive | None = None  # padded
    samples: _Positive | None = None  # of the whole training, all epochs; for `runtime_s`
    network: Network  # between the nodes
    backend: Literal["nccl", "gloo"] = "nccl"
    single_node: Speed
    several_nodes: Speed | None = None  # speed of several nodes, to test the model, which does not use it
