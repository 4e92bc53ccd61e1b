"""Comparability: what differs between sides and is not compared: refused where it is another training, else said.

Other load and thermals are `disturbances`'. The words are `report`'s.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

from multinode.contrast.figures import Side
from multinode.errors import UsageError

# What makes it another training, by the names of Settings' fields; and what makes the same training faster or slower.
_TRAINED = ("model", "dataset", "stage", "method", "sequence_length", "precision")
_ASKED = (
    *("lora_rank", "strategy", "per_device_batch", "accumulation", "packing", "recompute", "overlap"),
    *("grad_compress", "averaging", "command"),
)
_SAME_LINK = 0.01


class Difference(NamedTuple):
    """One thing that differs from the baseline.

    Attributes:
        kind: `global_batch` differs by the mode's nature, `unequal_batch` against it; of `no_settings` at least one
            side did not keep its own.
        side: that is held against the baseline.
        name: of a field of Settings, or of a package.
        baseline: the baseline's value, None where it is unknown; `candidate` the other side's.
    """

    kind: Literal["setting", "no_settings", "link", "global_batch", "unequal_batch", "version"]
    side: Side
    name: str = ""
    baseline: Any = None
    candidate: Any = None


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


def find_differences(baseline: Side, candidate: Side, mode: str) -> tuple[Difference, ...]:
    """What differs between two sides and is not what their comparison is about.

    Args:
        baseline: one side.
        candidate: the other; or a further one, held against the baseline.
        mode: as Contrast has it: the samples of a step differ by nature where every node is full, and the accumulation
            where these are held equal.
    """
    if baseline.settings is None or candidate.settings is None:
        settings = [Difference("no_settings", candidate)]
    else:
        settings = [
            Difference("setting", candidate, name, ours, theirs)
            for name in (*_TRAINED, *_ASKED)
            if (ours := _asked(baseline, name)) != (theirs := _asked(candidate, name))
            and not (mode == "fixed-global-batch" and name == "accumulation")
        ]
    links = _links(baseline, candidate) if mode == "compare" else ()
    return (*settings, *links, *_global_batch(baseline, candidate, mode), *_versions(baseline, candidate))


def _asked(side: Side, name: str) -> object:
    return getattr(side.settings, name, None)


def _is_other(baseline: Side, candidate: Side, name: str) -> bool:
    """Whether both are known and differ."""
    ours, theirs = _asked(baseline, name), _asked(candidate, name)
    return ours is not None and theirs is not None and ours != theirs


def _links(baseline: Side, candidate: Side) -> tuple[Difference, ...]:
    """Of stored runs, which may be of any day and cabling; the sides of a contrast share their NICs."""
    ours, theirs = baseline.link_gbit_per_s, candidate.link_gbit_per_s
    if ours is None or theirs is None or math.isclose(ours, theirs, rel_tol=_SAME_LINK):
        return ()
    return (Difference("link", candidate, "", ours, theirs),)


def _global_batch(baseline: Side, candidate: Side, mode: str) -> tuple[Difference, ...]:
    ours, theirs = baseline.global_batch, candidate.global_batch
    if ours is None or theirs is None or ours == theirs or candidate.role == "each-node":
        return ()
    if mode in {"same-workers", "fixed-global-batch"}:
        return (Difference("unequal_batch", candidate, "", ours, theirs),)
    if candidate.role == "point":
        # Every node full: it lies between those of the two sides, of which it is said.
        return ()
    return (Difference("global_batch", candidate, "", ours, theirs),)


def _versions(baseline: Side, candidate: Side) -> tuple[Difference, ...]:
    """Packages whose versions differ; of a side that tells none, nothing is known."""
    if not baseline.versions or not candidate.versions:
        return ()
    return tuple(
        Difference("version", candidate, package, ours, theirs)
        for package in sorted(baseline.versions.keys() | candidate.versions.keys())
        if (ours := baseline.versions.get(package)) != (theirs := candidate.versions.get(package))
    )
