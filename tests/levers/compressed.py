"""Levers of compressed gradients."""

from __future__ import annotations

from multinode.levers.axes import LeverAxes
from multinode.levers.compression import Compression
from multinode.levers.levers import Levers


def compressed(kind: str) -> Levers:
    return Levers(compression=Compression(kind=kind))


def compressions(*kinds: str | None) -> LeverAxes:
    return LeverAxes(compression=tuple(Compression(kind=kind) if kind is not None else None for kind in kinds))
