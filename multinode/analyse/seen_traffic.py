"""Seen traffic: what a step asked its collectives to carry, what the backend makes of that, and what the cards counted.

The backend's part is `algorithms`'; what a strategy should send, by theory, is `traffic`'s. Pure.
"""

from __future__ import annotations

import msgspec

__all__ = ["BytesPerStep", "SeenCall", "SeenTraffic"]


class SeenCall(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one kind, group size and message size in a step, of one worker.

    Attributes:
        op: as CallCount has it.
        ranks: workers in the group.
        nodes: nodes that they are on.
        backend: of the group, `nccl` or `gloo`; None is unknown.
        size_bytes: S of one call.
        count: calls a step, in the mean over the steps that count.
        source: as CallCount has it.
    """

    op: str
    ranks: int
    nodes: int
    backend: str | None
    size_bytes: float
    count: float
    source: str = "call"


class BytesPerStep(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one optimizer step, one way; medians or means over the steps that count.

    Attributes:
        calls: what the busiest worker asked to be sent: factor(op, ranks) x S, busbw's factors.
        expected: what the busiest node's card sends or receives for it, by the backend's own algorithms.
        card: payload that the busiest node's card counted in that direction, headers subtracted.
    """

    calls: float | None = None
    expected: float | None = None
    card: float | None = None


class SeenTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """What a step communicates.

    Attributes:
        bytes_per_step: three figures for the same step.
        calls: what the busiest worker called, most bytes first.
        explained: a sentence each: why the three differ, where they do by more than 3 % (calls and expected) or 5 %
            (expected and card); one that says that nothing explains it begins with "unexplained".
        missing: reason by name of every figure of `bytes_per_step` that is None.
    """

    bytes_per_step: BytesPerStep = BytesPerStep()
    calls: tuple[SeenCall, ...] = ()
    explained: tuple[str, ...] = ()
    missing: dict[str, str] = {}
