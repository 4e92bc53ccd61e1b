"""Meeting: what came of the connections that nodes tried with each other. Data only; `reach` makes it."""

from __future__ import annotations

import msgspec

__all__ = ["Attempted", "Listening", "Meeting", "Pinged", "Streamed"]


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    """What a node's listeners could bind.

    Attributes:
        ports: bound: those that were asked for, then ephemeral ones.
        failed: reason by port, for those that were asked for and could not be bound.
    """

    node: str
    ports: tuple[int, ...] = ()
    failed: dict[int, str] = {}


class Attempted(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of `node` to connect to `peer` over the data plane.

    Attributes:
        addr: the peer's address.
        error: None is success; `refused`, `timed out`, `no route`, `wrong answer`, `large packets lost`, or the
            system's words.
        ms: time to the connection or to the failure.
        path_mtu: what the kernel knows of the path, in bytes.
    """

    node: str
    peer: str
    addr: str
    port: int
    error: str | None = None
    ms: float | None = None
    path_mtu: int | None = None


class Streamed(msgspec.Struct, frozen=True, kw_only=True):
    """A short TCP stream from `node` to `peer`.

    Attributes:
        gbit_per_s: what arrived, of two tries the better one; None where the stream failed.
        worse_gbit_per_s: of two tries the other one; None where there was one.
    """

    node: str
    peer: str
    gbit_per_s: float | None = None
    worse_gbit_per_s: float | None = None
    error: str | None = None


class Pinged(msgspec.Struct, frozen=True, kw_only=True):
    """Round trips of a small message on one connection, seen from `node`; what both agents take is part of them.

    Attributes:
        median_us: of the round trips; None where they failed.
        p95_us: the time that 95 % of them did not exceed; None where they failed.
    """

    node: str
    peer: str
    median_us: float | None = None
    p95_us: float | None = None
    error: str | None = None


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """All of it.

    Attributes:
        listening: by node, in node-rank order.
        attempts: in the order in which they were planned.
        streams: likewise; empty where none were tried.
    """

    listening: tuple[Listening, ...] = ()
    attempts: tuple[Attempted, ...] = ()
    streams: tuple[Streamed, ...] = ()
