"""Stragglers: workers that the others wait for, step after step, and what is the likely cause. Pure."""

from __future__ import annotations

import msgspec

__all__ = ["Straggler"]


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """A node whose workers the others wait for.

    Attributes:
        node: its name.
        ranks: the workers that are late.
        late_ms: what the others wait for it, median over the steps.
        share: of the step.
        cause: `cpu`, `gpu_clocks`, `gpu_power`, `gpu_heat`, `pcie`, `disk`, `data`, `memory`, `work` (it has more
            tokens) or `unknown`.
        evidence: what says so, a sentence each with its figures.
        hint: what to do about it.
    """

    node: str
    ranks: tuple[int, ...]
    late_ms: float
    share: float
    cause: str = "unknown"
    evidence: tuple[str, ...] = ()
    hint: str = ""
