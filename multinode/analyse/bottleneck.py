"""Bottleneck: what a step spends most of its time on that is not computing, in one plain sentence. Pure."""

from __future__ import annotations

import msgspec

__all__ = ["Bottleneck"]


class Bottleneck(msgspec.Struct, frozen=True, kw_only=True):
    """What holds the training up most.

    Attributes:
        kind: `network`, `straggler`, `data`, `host` or `compute`: nothing but its own work holds it up; `unknown`.
        share: of the step that it takes.
        sentence: with its figures, for people.
    """

    kind: str
    share: float | None = None
    sentence: str = ""
