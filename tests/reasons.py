"""Why figures are unknown, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multinode.profile.step_split import PART_NAMES, StepSplit
from multinode.stats.unknown import Unknown, unknown_fields

if TYPE_CHECKING:
    import msgspec


def reasons(*parts: msgspec.Struct) -> dict[str, str]:
    """Of the fields of these structs."""
    return {name: figure.reason for part in parts for name, figure in unknown_fields(part).items()}


def split_reasons(split: StepSplit) -> dict[str, str]:
    """Of the parts of the mean step, and of what is known of the split beside them."""
    beside = {name: reason for name, reason in reasons(split).items() if name != "mean"}
    if isinstance(split.mean, Unknown):
        return dict.fromkeys((*PART_NAMES, "overlap"), split.mean.reason) | beside
    return reasons(split.mean) | beside
