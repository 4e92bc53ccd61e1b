"""runs, show, logs: reading stored runs back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from multinode.analyse.steps.summary import Summary
from multinode.core.run.run import NodeRun, Run
from multinode.errors import MultinodeError, UsageError
from multinode.store.run_directory import RunDirectory, list_runs

__all__ = ["StoredRun", "choose_logs", "choose_nodes", "load_run", "load_runs", "node_logs"]

# What a run may have beside its record, by the verb that made it.
_RESULTS = ("summary.json", "contrast.json", "nccl-test.json", "advice.json", "sweep.json", "bench.json")
_PLAN = "plan.json"
# Made of runs, each with a plan of its own, by a controller that holds their directory to the end.
_HELD = frozenset({"bench", "sweep"})


class StoredRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run read back.

    Attributes:
        summary: its figures; None where it never got so far.
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


def load_runs(root: Path, tell: Callable[[str], None] = lambda _: None) -> list[StoredRun]:
    """All runs, oldest first; `tell` is told of those that cannot be read."""
    return list(_load_readable(list_runs(root), tell))


def load_run(root: Path, run_id: str) -> StoredRun:
    """One run.

    Raises:
        UsageError: there is none of this name.
    """
    return _load(RunDirectory.open(root, run_id))


def choose_logs(
    root: Path, stored: StoredRun, node: str | None, rank: int | None
) -> list[tuple[StoredRun, tuple[NodeRun, ...]]]:
    """Whose logs are meant: a run's own, or those of all runs that a bench, sweep, contrast or try is made of.

    Args:
        root: of all runs.
        stored: the run.
        node: only this one, as in `choose_nodes`.
        rank: only the node of this worker, in each of the runs.

    Raises:
        UsageError: there is no such node or worker, or no log at all, as of an import.
    """
    if (stored.directory / _PLAN).is_file():
        return [(stored, choose_nodes(stored, node, rank))]
    run = stored.run
    parts = _load_parts(root, run)
    if not parts:
        shown = f"multinode {'table' if run.kind in {'import', 'sweep'} else 'show'} {run.run_id}"
        raise UsageError(f"run {run.run_id} has no logs: it is of kind {run.kind}, without runs", hint=f"see {shown}")
    # A node rank is that in the whole: a part has some of its nodes.
    name = choose_nodes(stored, node, None)[0].name if node is not None else None
    able = [(part, choose_nodes(part, None, rank)) for part in parts if rank is None or rank < part.run.world_size]
    named = [(part, tuple(one for one in nodes if name in {None, one.name})) for part, nodes in able]
    chosen = [(part, nodes) for part, nodes in named if nodes]
    if not chosen:
        raise UsageError(f"no run of {run.run_id} has this node and rank", hint=f"see multinode show {run.run_id}")
    return chosen


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
    if run.status == "running" and _is_forsaken(directory, run):
        run = msgspec.structs.replace(run, status="stopped")
    return StoredRun(run=run, summary=directory.read("summary.json", Summary), directory=directory.path)


def _load_parts(root: Path, whole: Run) -> list[StoredRun]:
    """The runs that it is made of, by their names, in the order in which they ended."""
    paths = [path for path in list_runs(root) if path.name.startswith(f"{whole.run_id}-") and (path / _PLAN).is_file()]
    return [part for part in _load_readable(paths) if part.run.kind == whole.kind]


def _load_readable(paths: Iterable[Path], tell: Callable[[str], None] = lambda _: None) -> Iterator[StoredRun]:
    for path in paths:
        try:
            yield _load(RunDirectory(path))
        except MultinodeError as error:
            tell(error.message)


def _is_forsaken(directory: RunDirectory, run: Run) -> bool:
    """Whether its controller was killed: nothing of these runs on the nodes under their own names."""
    return run.kind in _HELD and not (directory.path / _PLAN).is_file() and not directory.is_locked
