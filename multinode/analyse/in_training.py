"""In-training bandwidth: what the training's own all-reduces reach, beside nccl-test's at the same sizes. Pure."""

from __future__ import annotations

import msgspec

__all__ = ["Alone", "InTraining"]


class Alone(msgspec.Struct, frozen=True, kw_only=True):
    """What nccl-test measured for the same messages on the same nodes.

    Attributes:
        run_id: of the nccl-test.
        busbw_gb_per_s: factor x the bytes of the messages / the sum of their times.
    """

    run_id: str
    busbw_gb_per_s: float


class InTraining(msgspec.Struct, frozen=True, kw_only=True):
    """busbw of the training's all-reduces.

    Attributes:
        busbw_gb_per_s: factor x bytes of a step's all-reduces / the time that they took; None is unknown.
        source: `trace` (spans of a profiler window) or `ddp span` (first bucket to last, waiting for buckets included: a
            lower bound, good where the link is the limit) or `blocked` (host blocked in calls that hide nothing).
        alone: nccl-test's figure, where a run of the same nodes and workers is stored.
        sentence: both in words.
        reason: why there is none.
    """

    busbw_gb_per_s: float | None = None
    source: str | None = None
    alone: Alone | None = None
    sentence: str = ""
    reason: str = ""
