"""Finding: a judgement in words, made where it is judged; it is stored, printed and exported as it is."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A conclusion, with a message and often a fix."""

    code: str = ""  # identifies its kind
    message: str  # what is wrong and why it matters
    hint: str | None = None  # the fix; each line after the first is a command
    node: str | None = None  # the node; None concerns several, or none
    figures: dict[str, int | float | str] = {}  # observed values with units in their names


def message_of(finding: Finding | None) -> str:
    """What it says; empty without one."""
    return finding.message if finding is not None else ""


def distinct(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings in order, equal words once."""
    return tuple({(finding.node, finding.message): finding for finding in findings}.values())
