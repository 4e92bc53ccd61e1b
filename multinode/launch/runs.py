"""runs, show: read stored runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from multinode.errors import MultinodeError, UsageError
from multinode.profile.summary import Summary
from multinode.records.run import Run
from multinode.records.run_directory import RunDirectory, list_runs, scan_runs

# Results of a run beside its record, by the command that wrote them.
_RESULTS = (
    *("summary.json", "contrast.json", "nccl-test.json", "advice.json", "sweep.json", "bench.json", "tune.json"),
    *("tuning.json", "early-verdict.json"),
)
PLAN_FILE = "plan.json"
# Consists of runs, each with a plan of its own; the controller holds the directory until the end.
_HELD = frozenset({"bench", "sweep", "tune", "tuning"})


class StoredRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run read from disk.

    Attributes:
        summary: its figures; None if it ended too early.
    """

    run: Run
    summary: Summary | None
    directory: RunDirectory

    def document(self) -> dict[str, Any]:
        """The document of `show --json`: the record and every result of the run."""
        results = {name.removesuffix(".json"): self.directory.read(name, dict[str, Any]) for name in _RESULTS}
        found = {name.replace("-", "_"): result for name, result in results.items() if result is not None}
        return {"schema": "multinode.show/1", "run": self.run, "directory": str(self.directory), **found}


def load_runs(root: Path, tell: Callable[[str], None] = lambda _: None) -> list[StoredRun]:
    """All runs, oldest first; `tell` is called with those that cannot be read."""
    folders = scan_runs(root)
    for ignored in folders.ignored.values():
        tell(ignored)
    return list(_load_readable(folders.ours, tell))


def load_run(root: Path, run_id: str) -> StoredRun:
    """One run.

    Raises:
        UsageError: there is none of this name.
    """
    return _load(RunDirectory.open(root, run_id))


def _load(directory: RunDirectory) -> StoredRun:
    run = directory.read("run.json", Run)
    if run is None:
        raise UsageError(f"{directory.path} is not a run: it has no run.json")
    if run.status == "running" and _is_forsaken(directory, run):
        run = msgspec.structs.replace(run, status="stopped")
    return StoredRun(run=run, summary=directory.read("summary.json", Summary), directory=directory)


def load_parts(root: Path, whole: Run) -> list[StoredRun]:
    """The runs of a bench, sweep, contrast or try, by name, in the order in which they ended."""
    paths = [
        path for path in list_runs(root) if path.name.startswith(f"{whole.run_id}-") and (path / PLAN_FILE).is_file()
    ]
    return [part for part in _load_readable(paths) if part.run.kind == whole.kind]


def _load_readable(paths: Iterable[Path], tell: Callable[[str], None] = lambda _: None) -> Iterator[StoredRun]:
    for path in paths:
        try:
            yield _load(RunDirectory(path))
        except MultinodeError as error:
            tell(error.message)


def _is_forsaken(directory: RunDirectory, run: Run) -> bool:
    return (
        (run.kind in _HELD or bool(run.attempts))
        and not (directory.path / PLAN_FILE).is_file()
        and not directory.is_locked
    )
