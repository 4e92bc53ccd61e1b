"""MemoryNeed: what the model's states take of a worker's memory, by strategy and precision. Pure.

Counts parameters, gradients, Adam's states and DDP's buckets. Activations depend on the batch and the model's code;
they, workspaces and what CUDA keeps for itself are not counted.
"""

from __future__ import annotations

import msgspec

from multinode.traffic.algorithms import Layout
from multinode.traffic.traffic import Strategy, TrafficInputs

COUNTED = "parameters, gradients, Adam's states and DDP's buckets; activations are not counted"

_BYTES_PER_GIB = 1 << 30
_FP32_BYTES, _HALF_BYTES = 4, 2
_ADAM_BYTES = 2 * _FP32_BYTES
_SHARES_OPTIMIZER = frozenset(set(Strategy) - {Strategy.DDP})
_SHARES_GRADIENTS = frozenset(
    {Strategy.ZERO2, Strategy.ZERO3, Strategy.FSDP, Strategy.SHARD_GRAD_OP, Strategy.HYBRID_SHARD}
)
_SHARES_PARAMETERS = frozenset({Strategy.ZERO3, Strategy.FSDP, Strategy.HYBRID_SHARD})
_DEEPSPEED = frozenset({Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3})


class StatePlacement(msgspec.Struct, frozen=True, kw_only=True):
    """How the states are kept.

    Attributes:
        half: whether the training computes in bf16 or fp16.
        frozen_bits: of one parameter that is not trained; None is 16 of a training in half, else 32.
        optimizer_elsewhere: whether the optimizer's states lie in the node's own memory, or on a disk; likewise
            `parameters_elsewhere`.
    """

    half: bool = False
    frozen_bits: int | None = None
    optimizer_elsewhere: bool = False
    parameters_elsewhere: bool = False


class MemoryNeed(msgspec.Struct, frozen=True, kw_only=True):
    """Of one worker, in GiB.

    Attributes:
        parameters_gib: trained and frozen.
        gradients_gib: of what is trained.
        optimizer_gib: Adam's two moments, and the fp32 copy that DeepSpeed's workers step on.
        buckets_gib: into which DDP copies the gradients.
    """

    parameters_gib: float
    gradients_gib: float
    optimizer_gib: float
    buckets_gib: float = 0.0

    @property
    def total_gib(self) -> float:
        """All of them."""
        return self.parameters_gib + self.gradients_gib + self.optimizer_gib + self.buckets_gib


def memory_need(
    strategy: Strategy, load: TrafficInputs, layout: Layout, placement: StatePlacement
) -> MemoryNeed | None:
    """What the states take; None where the number of parameters is not known.

    With T trained and F frozen parameters on n workers, in bytes, as the engines keep them:

    - DDP: 4T, gradients 4T, Adam 8T, buckets 4T (torch copies each gradient into its bucket unless it is told to use
      views). What is trained is fp32 whatever it computes in, as LLaMA-Factory and autocast have it.
    - ZeRO-1 in half: 2T, gradients 2T, (4 + 8)T/n (Rajbhandari et al. 2020); in fp32 4T and 4T. ZeRO-2: gradients /n.
      ZeRO-3: parameters /n as well, frozen ones included.
    - FSDP: 4T, 4T and 8T, all /n, frozen parameters too; SHARD_GRAD_OP keeps the parameters whole; hybrid shard
      divides by the workers of a node.
    """
    if load.parameters is None:
        return None
    workers = layout.workers_per_node if strategy is Strategy.HYBRID_SHARD else layout.workers
    trained, frozen = load.trainable, max(0, load.parameters - load.trainable)
    deepspeed = strategy in _DEEPSPEED
    width = _HALF_BYTES if deepspeed and placement.half else _FP32_BYTES
    frozen_bits = placement.frozen_bits or 8 * (_HALF_BYTES if placement.half else _FP32_BYTES)
    parameters = trained * width + frozen * frozen_bits / 8
    optimizer = trained * (_ADAM_BYTES + (_FP32_BYTES if deepspeed else 0))
    return MemoryNeed(
        parameters_gib=0.0
        if placement.parameters_elsewhere
        else _gib(parameters, workers, strategy, _SHARES_PARAMETERS),
        gradients_gib=_gib(trained * width, workers, strategy, _SHARES_GRADIENTS),
        optimizer_gib=0.0 if placement.optimizer_elsewhere else _gib(optimizer, workers, strategy, _SHARES_OPTIMIZER),
        buckets_gib=trained * width / _BYTES_PER_GIB if strategy is Strategy.DDP and layout.workers > 1 else 0.0,
    )


def _gib(size_bytes: float, workers: int, strategy: Strategy, shared: frozenset[Strategy]) -> float:
    return size_bytes / (workers if strategy in shared else 1) / _BYTES_PER_GIB
