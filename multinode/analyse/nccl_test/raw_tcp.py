"""RawTcp: what TCP reached between the nodes' cards without any collective. Data only; `preflight` measures it."""

from __future__ import annotations

import msgspec

from multinode.analyse.nccl_test.pair_speeds import PairSpeed

__all__ = ["RawTcp", "RoundTrip"]


class RoundTrip(msgspec.Struct, frozen=True, kw_only=True):
    """Round trips of a small message on one TCP connection, seen from `source`.

    Attributes:
        target: who sends the message back.
        median_us: None where they failed; likewise `p95_us`.
    """

    source: str
    target: str
    median_us: float | None = None
    p95_us: float | None = None
    error: str | None = None


class RawTcp(msgspec.Struct, frozen=True, kw_only=True):
    """All of it.

    Attributes:
        one: every node sends to the next while it receives from the one before, over one connection.
        several: likewise over several.
        connections: how many those are; 0 where nothing was measured.
        latency: round trips along the same ring.
        pairs: every pair, both ways, disjoint pairs at once; empty where that was not asked for.
    """

    one: tuple[PairSpeed, ...] = ()
    several: tuple[PairSpeed, ...] = ()
    connections: int = 0
    latency: tuple[RoundTrip, ...] = ()
    pairs: tuple[PairSpeed, ...] = ()
