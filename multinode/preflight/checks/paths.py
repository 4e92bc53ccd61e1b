"""Paths of the job: what it reads stands on every node, and its directory is there."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from multinode.core.facts import NodeFacts
from multinode.core.finding import Finding, Rule
from multinode.preflight.inspection import Inspection

__all__ = ["check_paths", "check_workdir"]

PATH_MISSING = Rule(
    check="paths",
    severity="error",
    catches="a file or directory of the job is not on a node: model, dataset, dataset_info.json, DeepSpeed JSON",
    message="{path} is missing: the job reads it on every node",
    hint="copy it there: rsync -a {quoted} {node}:{parent}/",
)
NO_WORKDIR = Rule(
    check="workdir",
    severity="error",
    catches="the directory that workdir= names is not on a node",
    message="the job's directory: {reason}",
    hint="correct workdir= in the hostfile, or make the directory on the node",
)


def check_paths(inspection: Inspection) -> Iterator[Finding]:
    """What the job reads stands at the same path on every node."""
    for node, found in inspection.known:
        for path in found.paths:
            if path.kind == "missing":
                yield PATH_MISSING.found(
                    node.name,
                    path=path.path,
                    quoted=shlex.quote(path.path),
                    parent=_parent(path.path, found),
                )


def check_workdir(inspection: Inspection) -> Iterator[Finding]:
    """A directory that the hostfile names exists."""
    for node, found in inspection.known:
        if "workdir" in found.missing:
            yield NO_WORKDIR.found(node.name, reason=found.missing["workdir"])


def _parent(path: str, found: NodeFacts) -> str:
    """The directory that a path lies in, on the node; relative ones start at the job's directory."""
    folder, _, _ = path.rstrip("/").rpartition("/")
    if path.startswith(("/", "~")) or found.cwd is None:
        return shlex.quote(folder or "/")
    return shlex.quote(f"{found.cwd}/{folder}" if folder else found.cwd)
