"""Throughput: samples and tokens a second over the steps that count. Pure."""

from __future__ import annotations

import msgspec

__all__ = ["Throughput"]


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """How fast a training is; sums over sums, never means of rates. None comes with a reason in the summary's `missing`.

    Attributes:
        samples_per_s: nominal, of all workers together.
        tokens_per_s: likewise, padding counted as the device computes it.
        effective_tokens_per_s: likewise without padding.
        tgs: tokens a second and worker (GPU), padding counted; `effective_tgs` without.
        tokens_per_sample: padded length of a sample, in the mean.
        micro_steps: forward passes a step, of one worker (gradient accumulation).
    """

    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    effective_tokens_per_s: float | None = None
    tgs: float | None = None
    effective_tgs: float | None = None
    tokens_per_sample: float | None = None
    micro_steps: float | None = None
