"""Comparability: what differs between sides and is not compared: refused where it is another training, else said.

Other load and thermals are `disturbances`'.
"""

from __future__ import annotations

import math

from multinode.contrast.figures import Side
from multinode.contrast.words import capitalised, figure, name_side
from multinode.errors import UsageError
from multinode.units import format_rate

# What makes it another training, by the names of Settings' fields; and what makes the same training faster or slower.
_TRAINED = ("model", "dataset", "stage", "method", "sequence_length", "precision")
_ASKED = (
    *("lora_rank", "strategy", "per_device_batch", "accumulation", "packing", "recompute", "overlap"),
    *("grad_compress", "averaging", "command"),
)
_SAME_LINK = 0.01
# Settings that are not called by the name of their field.
_NAMES = {
    "lora_rank": "LoRA rank",
    "per_device_batch": "per-device batch",
    "accumulation": "gradient accumulation",
    "recompute": "gradient checkpointing",
    "overlap": "overlap of communication",
    "grad_compress": "gradient compression",
    "averaging": "averaging between nodes",
}
_LEVERS, _NONE = frozenset({"averaging", "grad_compress"}), "none"
_LONGEST = 60


def require_alike(baseline: Side, candidate: Side, *, anyway: bool = False) -> None:
    """Refuse to compare sides that did not train the same thing.

    Args:
        baseline: with its settings; what is not known differs in nothing.
        candidate: likewise.
        anyway: whether they are compared all the same; `find_differences` marks it.

    Raises:
        UsageError: model, dataset, stage, method, sequence length or precision differ.
    """
    differing = [name for name in _TRAINED if _is_other(baseline, candidate, name)]
    if differing and not anyway:
        told = [
            f"{name.replace('_', ' ')} {_asked(baseline, name)!r} and {_asked(candidate, name)!r}" for name in differing
        ]
        raise UsageError(
            f"the two did not train the same: {', '.join(told)}",
            hint="compare runs of one job, or add --force: what differs is then marked",
        )


def find_differences(baseline: Side, candidate: Side, mode: str) -> tuple[str, ...]:
    """What differs between two sides and is not what their comparison is about, a sentence each.

    Args:
        baseline: one side.
        candidate: the other; or a further one, held against the baseline.
        mode: as Contrast has it: the samples of a step differ by nature where every node is full, and the accumulation
            where these are held equal.
    """
    mine, theirs = name_side(baseline, mode), name_side(candidate, mode)

    def differs(name: str, ours: object, other: object) -> str:
        return f"{name} differs: {_written(ours)} on {mine}, {_written(other)} on {theirs}."

    if baseline.settings is None or candidate.settings is None:
        unknown = " and ".join(name for side, name in ((baseline, mine), (candidate, theirs)) if side.settings is None)
        settings = [f"{unknown} did not keep the settings: whether they are the same is unknown."]
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
    """Whether both are known and differ."""
    ours, theirs = _asked(baseline, name), _asked(candidate, name)
    return ours is not None and theirs is not None and ours != theirs


def _given(name: str, *values: object) -> list[object]:
    """What a lever that is left out is: none."""
    return [_NONE if value is None and name in _LEVERS else value for value in values]


def _links(baseline: Side, candidate: Side) -> tuple[str, ...]:
    """Of stored runs, which may be of any day and cabling; the sides of a contrast share their NICs."""
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
        return f"{said}, though both were to train as many."
    if candidate.role == "point":
        # Every node full: it lies between those of the two sides, of which it is said.
        return ""
    fewer = f"1/{figure(theirs / ours)} of the optimizer steps per epoch"
    return f"{said}: {fewer}; learning rate and warm-up may have to change."


def _versions(baseline: Side, candidate: Side) -> dict[str, tuple[str | None, str | None]]:
    """Of packages whose versions differ; of a side that tells none, nothing is known."""
    if not baseline.versions or not candidate.versions:
        return {}
    return {
        package: (ours, theirs)
        for package in sorted(baseline.versions.keys() | candidate.versions.keys())
        if (ours := baseline.versions.get(package)) != (theirs := candidate.versions.get(package))
    }


def _written(value: object) -> str:
    """As a person would write it, in one line."""
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "on" if value else "off"
    text = "".join(letter if letter.isprintable() else " " for letter in str(value))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
