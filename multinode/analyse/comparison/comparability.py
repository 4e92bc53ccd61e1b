"""Comparability: what differs between sides and is not compared: refused where it is another training, else said.

Other load and thermals are `disturbances`'.
"""

from __future__ import annotations

import math

from multinode.analyse.comparison.contrast_figures import Side, capitalised, figure, name_role
from multinode.errors import UsageError
from multinode.units import format_rate

__all__ = ["find_differences", "require_alike"]

# What makes it another training, by the names of Settings' fields; and what makes the same training faster or slower.
_TRAINED = {
    "model": "model",
    "dataset": "dataset",
    "stage": "stage",
    "method": "method",
    "sequence_length": "sequence length",
    "precision": "precision",
}
_ASKED = {
    "lora_rank": "LoRA rank",
    "strategy": "strategy",
    "per_device_batch": "batch of a worker",
    "accumulation": "gradient accumulation",
    "packing": "packing",
    "recompute": "gradient checkpointing",
    "overlap": "overlap of communication",
    "grad_compress": "compression of gradients",
    "command": "command",
}
_LONGEST = 60
_SAME_LINK = 0.01


def require_alike(baseline: Side, candidate: Side, *, anyway: bool = False) -> None:
    """Refuse to compare sides that did not train the same thing.

    Args:
        baseline: with its settings; what is not known differs in nothing.
        candidate: likewise.
        anyway: whether they are compared all the same; `find_differences` marks it.

    Raises:
        UsageError: model, dataset, stage, method, sequence length or precision differ.
    """
    differing = [words for name, words in _TRAINED.items() if _is_other(baseline, candidate, name)]
    if differing and not anyway:
        first = next(name for name, words in _TRAINED.items() if words == differing[0])
        raise UsageError(
            f"the two did not train the same: {', '.join(differing)}",
            detail=_differ(baseline, candidate, first, differing[0]),
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
    names = _TRAINED | _ASKED
    if mode == "fixed-global-batch":
        names = {name: words for name, words in names.items() if name != "accumulation"}
    settings = [
        _differ(baseline, candidate, name, words)
        for name, words in names.items()
        if _asked(baseline, name) != _asked(candidate, name)
    ]
    unknown = [side for side in (baseline, candidate) if side.settings is None]
    if unknown:
        who = " and ".join(name_role(side) for side in unknown)
        settings = [capitalised(f"{who} did not keep the settings: whether they are the same is not known.")]
    links = _links(baseline, candidate) if mode == "compare" else ()
    return (*settings, *links, *_global_batch(baseline, candidate, mode), *_versions(baseline, candidate))


def _asked(side: Side, name: str) -> object:
    return getattr(side.settings, name, None)


def _is_other(baseline: Side, candidate: Side, name: str) -> bool:
    """Whether both are known and differ."""
    ours, theirs = _asked(baseline, name), _asked(candidate, name)
    return ours is not None and theirs is not None and ours != theirs


def _differ(baseline: Side, candidate: Side, name: str, words: str) -> str:
    where = f"{_written(_asked(baseline, name))} on {name_role(baseline)}"
    return capitalised(f"{words} differs: {where}, {_written(_asked(candidate, name))} on {name_role(candidate)}.")


def _written(value: object) -> str:
    """As a person would write it, in one line."""
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "on" if value else "off"
    text = "".join(letter if letter.isprintable() else " " for letter in str(value))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _links(baseline: Side, candidate: Side) -> tuple[str, ...]:
    """Of stored runs, which may be of any day and cabling; the sides of a contrast share their cards."""
    ours, theirs = baseline.link_gbit_per_s, candidate.link_gbit_per_s
    if ours is None or theirs is None or math.isclose(ours, theirs, rel_tol=_SAME_LINK):
        return ()
    told = f"{format_rate(ours)} on {name_role(baseline)}, {format_rate(theirs)} on {name_role(candidate)}"
    return (f"Link differs: {told}.",)


def _global_batch(baseline: Side, candidate: Side, mode: str) -> tuple[str, ...]:
    ours, theirs = baseline.global_batch, candidate.global_batch
    if ours is None or theirs is None or ours == theirs or candidate.role == "each-node":
        return ()
    said = f"A step of {name_role(candidate)} trains {theirs} samples and one of {name_role(baseline)} {ours}"
    if mode in {"same-workers", "fixed-global-batch"}:
        return (f"{said}, though both were to train as many.",)
    if candidate.role == "point":
        # Every node full: it lies between those of the two sides, of which it is said.
        return ()
    times = figure(theirs / ours)
    meaning = (
        f"at {times} times the global batch the same data makes 1/{times} of the optimizer steps, so learning rate"
    )
    return (f"{said}: {meaning} and warm-up may need to change, and the model that comes out is another one.",)


def _versions(baseline: Side, candidate: Side) -> tuple[str, ...]:
    """Packages whose versions differ; of a side that tells none, nothing can be said."""
    if not baseline.versions or not candidate.versions:
        return ()
    packages = sorted(baseline.versions.keys() | candidate.versions.keys())
    return tuple(
        f"{_written(package)} differs: {_written(ours)} on {name_role(baseline)}, {_written(theirs)} on "
        f"{name_role(candidate)}."
        for package in packages
        if (ours := baseline.versions.get(package)) != (theirs := candidate.versions.get(package))
    )
