"""A bench on the controller's disk: the directory in which it is listed, and what was measured so far."""

from __future__ import annotations

from pathlib import Path

from multinode.analyse.bench.bench import tell_left
from multinode.analyse.bench.bench_figures import BenchReport
from multinode.core.run.run import Run
from multinode.store.run_directory import RunDirectory
from multinode.workflows.run.context import Launch
from multinode.workflows.run.launch import make_run_id

__all__ = ["create_bench", "keep_bench", "load_bench"]

_FILE = "bench.json"


def create_bench(root: Path, what: Launch) -> RunDirectory:
    """A directory for a bench that begins.

    Raises:
        MultinodeError: it cannot be made.
    """
    directory = RunDirectory.create(root, what.run_id or make_run_id())
    directory.write_cluster(what.cluster, what.hostfile)
    return directory


def keep_bench(directory: RunDirectory, report: BenchReport, run: Run) -> None:
    """Store what was measured so far, and how it stands; of the listing of runs it is then the newest."""
    directory.write(_FILE, report)
    directory.write("run.json", run)


def load_bench(directory: RunDirectory) -> BenchReport | None:
    """What a stored bench found out, and where it is or was broken off; None of another run.

    Raises:
        MultinodeError: its file is not what it should be.
    """
    report = directory.read(_FILE, BenchReport)
    return tell_left(report, goes_on=directory.is_locked) if report is not None else None
