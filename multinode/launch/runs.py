"""Stored runs: their records, the samples of their nodes, and their summary. Prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from multinode.cluster.cluster import Cluster
from multinode.cluster.quoting import as_steps
from multinode.errors import MultinodeError, UsageError
from multinode.launch.transfer import read_traces
from multinode.profile.observed import Observed, ObservedNode, observe
from multinode.profile.summary import Summary, summarise
from multinode.profile.throughput import ModelWork
from multinode.records.plan import LaunchPlan
from multinode.records.run import Run
from multinode.records.run_directory import RunDirectory, list_runs, scan_runs
from multinode.records.sample_files import EvenStretches
from multinode.records.samples import parse_samples
from multinode.traffic.size_curve import ScanCurves
from multinode.units import format_size

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
    if run.status == "running" and (
        (run.kind in _HELD or bool(run.attempts))
        and (not (directory.path / PLAN_FILE).is_file())
        and (not directory.is_locked)
    ):
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


_MODEL = "model.json"
_SWEEP = "nccl-test.json"
# Of a run's samples; records in memory are about five times larger.
_MOST_BYTES = 96 << 20
# Interval of progress messages.
_MOST_WORDS = 4


def observe_run(
    directory: RunDirectory,
    plan: LaunchPlan,
    say: Callable[[str], None] = lambda _: None,
    *,
    most_bytes: int = _MOST_BYTES,
) -> Observed:
    """The records of a run's nodes, as far as they have been transferred.

    `say` is called if reading takes a while. Beyond `most_bytes`, samples are read in evenly spread stretches.
    """
    paths = [path for node in plan.nodes for path in directory.sample_files(node.node_rank)]
    size_bytes = sum(path.stat().st_size for path in paths)
    stretches = None
    if size_bytes > most_bytes:
        # Long enough for whole rounds of averaging.
        rounds = 3 * plan.averaging.every if plan.averaging is not None else 0
        stretches = EvenStretches(paths, most_bytes, rounds)
    nodes = []
    for number, node in enumerate(plan.nodes):
        if stretches is not None and number % max(1, len(plan.nodes) // _MOST_WORDS) == 0:
            done = number / len(plan.nodes)
            say(f"reading {format_size(most_bytes)} of {format_size(size_bytes)} of samples: {done:.0%}")
        nodes.append(
            ObservedNode(
                name=node.node,
                node_rank=node.node_rank,
                ranks=node.ranks,
                ifname=node.ifname,
                ifnames=node.ifnames,
                link_gbit_per_s=node.link_gbit_per_s,
                samples=tuple(parse_samples(directory.sample_lines(node.node_rank, stretches))),
            )
        )
    return observe(plan.run_id, nodes, stretches.recorded if stretches is not None else 0)


def summarise_run(directory: RunDirectory, plan: LaunchPlan, say: Callable[[str], None] = lambda _: None) -> Summary:
    """Summarize a run's stored samples, and store the summary; `say` as for `observe_run`."""
    cluster = directory.read("cluster.json", Cluster)
    as_reached = partial(as_steps, nodes=cluster.nodes if cluster is not None else ())
    observed = msgspec.structs.replace(observe_run(directory, plan, say), write_hint=as_reached)
    traces, unread = read_traces(directory, plan.trace.ranks) if plan.trace is not None else ({}, {})
    summary = summarise(
        observed,
        work=directory.read(_MODEL, ModelWork) or ModelWork(),
        traces=traces,
        scan=_latest_scan(directory, plan),
        unread=unread,
    )
    directory.write("summary.json", summary)
    return summary


def _latest_scan(directory: RunDirectory, plan: LaunchPlan) -> ScanCurves | None:
    names = [node.node for node in plan.nodes]
    links = [node.link_gbit_per_s for node in plan.nodes if node.link_gbit_per_s is not None]
    # A size scan on one node uses no link.
    alike = (names, plan.world_size, min(links) if len(links) == len(names) > 1 else None)
    for path in reversed(list_runs(directory.path.parent)):
        try:
            report = RunDirectory(path).read(_SWEEP, ScanCurves)
        except MultinodeError:
            # A damaged file is not worth failing a run that went well.
            continue
        if report is not None and (list(report.nodes), report.world_size, report.link_gbit_per_s) == alike:
            return report
    return None
