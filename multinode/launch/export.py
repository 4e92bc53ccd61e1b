"""export: a run's records -> TensorBoard, MLflow and others, during the run or afterwards. Prints nothing."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from multinode.errors import MultinodeError, UsageError, printable
from multinode.export.exporter import Exporter
from multinode.export.figures import StepStream
from multinode.export.followers import Followers
from multinode.export.target import METRICS_PORT, Target
from multinode.launch.context import RunContext
from multinode.profile.observed import ObservedNode
from multinode.records.plan import LaunchPlan
from multinode.records.progress import NodeProgress, RunProgress, start_progress
from multinode.records.run import Run
from multinode.records.run_directory import RunDirectory, SampleTail
from multinode.records.samples import Sample, parse_samples
from multinode.runs.stored_run import StoredRun, launched_runs, load_run
from multinode.secret_values import redact_text

_LOOK_S = 1.0


def export_runs(root: Path, run_id: str, targets: Sequence[Target]) -> Iterator[tuple[str, Target, str | None]]:
    """Export a run that has ended, or all runs of a contrast, a sweep or a launch with restarts.

    Yields:
        The run, the target, and the error; None on success.

    Raises:
        UsageError: there is no such run, it is still running, or a target needs a running one.
    """
    if any(target.kind == METRICS_PORT for target in targets):
        raise UsageError(
            ("a port is served only while multinode follows a run"), hint="add --follow, or use prometheus:FILE.prom"
        )
    stored = load_run(root, run_id)
    if stored.run.status == "running":
        raise UsageError(
            f"run {stored.run.run_id} is still running", hint=f"multinode export {stored.run.run_id} --follow TARGET"
        )
    for part in launched_runs(root, stored):
        for target in targets:
            yield part.run_id, target, _failure(functools.partial(_export, target, part))


def follow_export(root: Path, run_id: str, target: Target) -> None:
    """Export a run that a multinode on this machine follows, until its end.

    Raises:
        UsageError: it is running, and nothing here follows it.
        MultinodeError: the export failed.
    """
    stored = StoredRun.open(root, run_id)
    directory, plan = stored.directory, stored.require_plan()
    if not directory.is_locked and stored.run.status == "running":
        raise UsageError(
            f"no multinode process on this machine is following run {directory.run_id}",
            hint=f"multinode attach {directory.run_id} --export {target}",
        )
    failure = _failure(lambda: _Following(directory, plan, target.make()).run())
    if failure is not None:
        raise MultinodeError(failure)


def _failure(work: Callable[[], None]) -> str | None:
    try:
        work()
    except MultinodeError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - what goes wrong in a library is the export's failure, and no more
        lines = str(error).strip().splitlines()
        return printable(redact_text(f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"))
    return None


def _export(target: Target, ended: StoredRun) -> None:
    exporter = target.make()
    exporter.begin(ended.run)
    observed = ended.observed
    stream = StepStream(observed.nodes)
    for node in observed.nodes:
        stream.add(node.node_rank, node.samples, 0.0)
    exporter.steps(stream.take(0.0, everything=True))
    exporter.end(ended)


class _Following:
    """One run, followed through its directory."""

    def __init__(self, directory: RunDirectory, plan: LaunchPlan, exporter: Exporter) -> None:
        self._directory = directory
        self._plan = plan
        self._exporter = exporter
        self._tails = {place.node_rank: SampleTail(directory, place.node_rank) for place in plan.places}
        self._nodes = start_progress(plan).nodes
        self._stream = StepStream([_unobserved(node) for node in self._nodes])

    def run(self) -> None:
        self._exporter.begin(self._run)
        # The follower holds the lock until the summary is written.
        while self._directory.is_locked:
            due = time.monotonic() + _LOOK_S
            self._look()
            self._exporter.steps(self._stream.take(time.monotonic()))
            self._exporter.now(self._run, self._nodes)
            time.sleep(max(0.0, due - time.monotonic()))
        self._look()
        self._exporter.steps(self._stream.take(time.monotonic(), everything=True))
        self._exporter.end(StoredRun(self._directory))

    @property
    def _run(self) -> Run:
        return StoredRun(self._directory).run

    def _look(self) -> None:
        for node in self._nodes:
            samples: list[Sample] = list(parse_samples(self._tails[node.node_rank].lines()))
            self._stream.add(node.node_rank, samples, time.monotonic())
            node.take(samples)


def _unobserved(node: NodeProgress) -> ObservedNode:
    return ObservedNode(
        name=node.name,
        node_rank=node.node_rank,
        ranks=node.ranks,
        ifname=node.ifname,
        link_gbit_per_s=node.link_gbit_per_s,
    )


@contextlib.contextmanager
def export_while(context: RunContext, targets: Sequence[Target], warn: Callable[[str], None]) -> Iterator[None]:
    """Export the runs that are followed while inside; at the end wait until all is written."""
    followers = Followers(targets, context.runs, warn)
    observe = context.observe

    def observe_and_follow(progress: RunProgress) -> None:
        followers.follow(progress.run_id)
        observe(progress)

    context.observe = observe_and_follow
    try:
        yield
    finally:
        followers.close()
