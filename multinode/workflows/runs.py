"""runs, show, logs: reading stored runs back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from multinode.analyse.summary import Summary
from multinode.core.run import NodeRun, Run
from multinode.errors import UsageError
from multinode.store.run_directory import RunDirectory, list_runs

__all__ = ["StoredRun", "choose_nodes", "load_run", "load_runs", "node_logs"]

# What a run may have beside its record, by the verb that made it.
_RESULTS = ("summary.json", "contrast.json", "nccl-test.json")


class StoredRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run read back.

    Attributes:
        run: its record.
        summary: its figures; None where it never got so far.
        directory: where it lies.
    """

    run: Run
    summary: Summary | None
    directory: Path

    def document(self) -> dict[str, Any]:
        """What `show --json` prints: the record and every result that the run has."""
        directory = RunDirectory(self.directory)
        results = {name.removesuffix(".json"): directory.read(name, dict[str, Any]) for name in _RESULTS}
        found = {name.replace("-", "_"): result for name, result in results.items() if result is not None}
        return {"schema": "multinode.show/1", "run": self.run, "directory": str(self.directory), **found}


def load_runs(root: Path) -> list[StoredRun]:
    """All runs, oldest first."""
    return [_load(RunDirectory(path)) for path in list_runs(root)]


def load_run(root: Path, run_id: str) -> StoredRun:
    """One run.

    Raises:
        UsageError: there is none of this name.
    """
    return _load(RunDirectory.open(root, run_id))


def choose_nodes(stored: StoredRun, node: str | None, rank: int | None) -> tuple[NodeRun, ...]:
    """All nodes of a run, or the one that is named by name, by node rank, or by the rank of a worker on it.

    Raises:
        UsageError: the run has no such node or worker.
    """
    run = stored.run
    if rank is not None:
        per_node = run.world_size // max(1, len(run.nodes))
        if rank >= run.world_size or not per_node:
            raise UsageError(f"run {run.run_id} has no rank {rank}", hint=f"its ranks are 0 to {run.world_size - 1}")
        node = str(rank // per_node)
    chosen = tuple(found for found in run.nodes if node in {None, found.name, str(found.node_rank)})
    if not chosen:
        names = ", ".join(found.name for found in run.nodes)
        raise UsageError(f"run {run.run_id} has no node {node!r}", hint=f"it has: {names}")
    return chosen


def node_logs(stored: StoredRun, nodes: Sequence[NodeRun]) -> Iterator[tuple[str, bytes]]:
    """Name and raw log of each of these nodes."""
    directory = RunDirectory(stored.directory)
    for found in nodes:
        path = directory.log_path(found.node_rank)
        yield found.name, path.read_bytes() if path.exists() else b""


def _load(directory: RunDirectory) -> StoredRun:
    run = directory.read("run.json", Run)
    if run is None:
        raise UsageError(f"{directory.path} is not a run: it has no run.json")
    return StoredRun(run=run, summary=directory.read("summary.json", Summary), directory=directory.path)
