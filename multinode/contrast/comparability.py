"""Differences between sides beyond those compared: another training is refused, others are reported.

Other load and thermals are `disturbances`.
"""

from __future__ import annotations

import math

from multinode.contrast.figures import Side
from multinode.contrast.words import capitalised, figure, name_side
from multinode.errors import UsageError
from multinode.units import format_rate

# Settings that make another training, and settings that change its speed.
_TRAINED = ("model", "dataset", "stage", "method", "sequence_length", "precision")
_ASKED = (
    *("lora_rank", "strategy", "per_device_batch", "accumulation", "packing", "recompute", "overlap"),
    *("grad_compress", "averaging", "balance", "command"),
)
_SAME_LINK = 0.01
# Display names of settings.
_NAMES = {
    "lora_rank": "LoRA rank",
    "per_device_batch": "per-device batch",
    "accumulation": "gradient accumulation",
    "recompute": "gradient checkpointing",
    "overlap": "overlap of communication",
    "grad_compress": "gradient compression",
    "averaging": "averaging between nodes",
    "balance": "samples by speed",
}
_LEVERS, _NONE = frozenset({"averaging", "balance", "grad_compress"}), "none"
_LONGEST = 60


def require_alike(baseline: Side, candidate: Side, *, anyway: bool = False) -> None:
    """Refuse to compare sides that did not train the same.

    Args:
        baseline: with its settings; unknown ones never differ.
        candidate: likewise.
        anyway: whether to compare them regardless; `find_differences` then marks it.

    Raises:
        UsageError: model, dataset, stage, method, sequence length or precision differ.
    """
    differing = [name for name in _TRAINED if _is_other(baseline, candidate, name)]
    if differing and not anyway:
        told = [
            f"{name.replace('_', ' ')} {_asked(baseline, name)!r} and {_asked(candidate, name)!r}" for name in differing
        ]
        raise UsageError(
            f"the runs did not train the same: {', '.join(told)}",
            hint="compare runs of one job, or add --force to mark the differences",
        )


def find_differences(baseline: Side, candidate: Side, mode: str) -> tuple[str, ...]:
    """Differences between two sides beyond those compared, one sentence each.

    Args:
        baseline: one side.
        candidate: the other, or a further one.
        mode: as in Contrast: with every node full, the samples per step differ by design; with equal samples per step,
            the accumulation does.
    """
    mine, theirs = name_side(baseline, mode), name_side(candidate, mode)

    def differs(name: str, ours: object, other: object) -> str:
        return f"{name} differs: {_written(ours)} on {mine}, {_written(other)} on {theirs}."

    if baseline.settings is None or candidate.settings is None:
        unknown = " and ".join(name for side, name in ((baseline, mine), (candidate, theirs)) if side.settings is None)
        settings = [f"{unknown} did not record its settings: whether they match is unknown."]
    else:
        settings = [
            differs(_NAMES.get(name, name.replace("_", " ")), *_given(name, ours, other))
            for name in (*_TRAINED, *_ASKED)
            if (ours := _asked(baseline, name)) != (other := _asked(candidate, name))
            and not (mode == "fixed-global-batch" and name == "accumulation")
        ]
    if mode == "compare" and (links := _links(baseline, candidate)):
        settings.append(differs("link", *links))
    batch = _global_batch(baseline, candidate, mode)
    versions = (differs(_written(name), *both) for name, both in _versions(baseline, candidate).items())
    return (*map(capitalised, settings), *([f"Global batch {batch}"] if batch else []), *versions)


def _asked(side: Side, name: str) -> object:
    return getattr(side.settings, name, None)


def _is_other(baseline: Side, candidate: Side, name: str) -> bool:
    ours, theirs = _asked(baseline, name), _asked(candidate, name)
    return ours is not None and theirs is not None and ours != theirs


def _given(name: str, *values: object) -> list[object]:
    return [_NONE if value is None and name in _LEVERS else value for value in values]


def _links(baseline: Side, candidate: Side) -> tuple[str, ...]:
    ours, theirs = baseline.link_gbit_per_s, candidate.link_gbit_per_s
    if ours is None or theirs is None or math.isclose(ours, theirs, rel_tol=_SAME_LINK):
        return ()
    return format_rate(ours), format_rate(theirs)


def _global_batch(baseline: Side, candidate: Side, mode: str) -> str:
    ours, theirs = baseline.global_batch, candidate.global_batch
    if ours is None or theirs is None or ours == theirs or candidate.role == "each-node":
        return ""
    said = f"differs: {ours} on {name_side(baseline, mode)}, {theirs} on {name_side(candidate, mode)}"
    if mode in {"same-workers", "fixed-global-batch"}:
        return f"{said}, although both should train the same number."
    if candidate.role == "point":
        # Every node full: covered by the sentence about the two sides.
        return ""
    fewer = f"1/{figure(theirs / ours)} of the optimizer steps per epoch"
    return f"{said}: {fewer}; you may have to adjust learning rate and warm-up."


def _versions(baseline: Side, candidate: Side) -> dict[str, tuple[str | None, str | None]]:
    if not baseline.versions or not candidate.versions:
        return {}
    return {
        package: (ours, theirs)
        for package in sorted(baseline.versions.keys() | candidate.versions.keys())
        if (ours := baseline.versions.get(package)) != (theirs := candidate.versions.get(package))
    }


def _written(value: object) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "on" if value else "off"
    text = "".join(letter if letter.isprintable() else " " for letter in str(value))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
