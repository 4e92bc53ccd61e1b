"""Finding: a judgement on the facts, with the node, the reason and what fixes it."""

from __future__ import annotations

import msgspec

__all__ = ["SEVERITIES", "Finding"]

SEVERITIES = ("error", "warning", "note")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a check found.

    Attributes:
        severity: `error` (the training would fail or hang), `warning` (it may), `note` (good to know).
        node: the node's name; None concerns the cluster as a whole.
        check: the check's name, as in the matrix.
        message: what is wrong and why it breaks the training.
        hint: the exact command or hostfile key that fixes it.
        by_hand: whether it concerns only launches that multinode does not make.
    """

    severity: str
    node: str | None
    check: str
    message: str
    hint: str | None = None
    by_hand: bool = False
