"""Finding: a judgement on the facts, with the node, the reason and what fixes it."""

from __future__ import annotations

import msgspec

from multinode.errors import MultinodeError

SEVERITIES = ("error", "warning", "note")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a check found.

    Attributes:
        severity: `error` (the training would fail or hang), `warning` (it may), `note` (good to know).
        node: the node's name; None concerns the cluster as a whole.
        check: the check's name, as in the matrix.
        message: what is wrong and why it breaks the training.
        hint: what fixes it, such as a key of the hostfile; each line after the first is a command.
        by_hand: whether it concerns only launches that multinode does not make.
    """

    severity: str
    node: str | None
    check: str
    message: str
    hint: str | None = None
    by_hand: bool = False


def finding_of_error(check: str, error: MultinodeError) -> Finding:
    """What could not be asked."""
    hint = "\n".join(error.hint_lines) or None
    return Finding(severity="error", node=error.node, check=check, message=error.message, hint=hint)
