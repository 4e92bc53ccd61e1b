"""Scenario: what a prediction is asked for. Data only: `predict` answers it, and `scenarios` makes many of them."""

from __future__ import annotations

import msgspec

from multinode.analyse.collectives.traffic import Layout, Strategy
from multinode.analyse.prediction.carried_network import Link

__all__ = ["Scenario"]


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for.

    Attributes:
        per_device_batch: samples of a worker's micro-batch, above zero.
        accumulation: micro-batches a step.
        gradient_factor: what the bytes of gradients are multiplied with: 0.5 is a hook that sends fp32 as half.
        bucket_bytes: the most that a reduction carries at once; None as calibrated.
        overlap: whether computation may hide communication at all.
    """

    link: Link
    layout: Layout
    per_device_batch: float
    accumulation: int = 1
    strategy: Strategy = Strategy.DDP
    gradient_factor: float = 1.0
    bucket_bytes: float | None = None
    overlap: bool = True

    @property
    def samples(self) -> float:
        """Of one optimizer step, of all workers."""
        return self.layout.workers * self.per_device_batch * self.accumulation
