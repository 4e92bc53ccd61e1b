"""Measure every worker's device alone and all at once, in one run per node, and judge the results.

One run per node: nodes exchange nothing, and a failure on one must not cost the others their figures. Results are
stored after each step, so a killed controller loses none. Prints nothing.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from multinode.bench.figures import BenchReport
from multinode.bench.judge import summarise_bench, with_progress
from multinode.bench.nodes import BenchPart
from multinode.cluster.quoting import as_steps
from multinode.errors import Interrupted, MultinodeError, NodeError, RunFailed, UsageError
from multinode.launch.context import Launch, RunContext
from multinode.launch.launch import prepare, require_success, run_prepared
from multinode.launch.node_runs import cleanup_nodes
from multinode.records.benchmark import DEVICE_DTYPES, TEST_KINDS, DeviceTest, check_choice, describe_benchmark
from multinode.records.progress import RunProgress
from multinode.records.run import NodeRun
from multinode.records.run_directory import RunDirectory
from multinode.records.samples import parse_samples
from multinode.records.status import Status
from multinode.runs.stored_run import StoredRun
from multinode.series.grid import (
    NO_NODES,
    REFUSED,
    CellOutcome,
    CellRecord,
    Grid,
    GridCell,
    GridRecord,
    Turn,
    fingerprint,
    in_turns,
)
from multinode.series.series import Resume, Series, keep_status, take_up

_FILE = "bench.json"
# The parts without their records, for a resume.
_PARTS = "parts.json"
# Maximum records per worker or sampler; a bench has some hundreds.
_MOST_SAMPLES = 100_000
_LAST_PORT = 65535
_LARGEST_SIZE = 1 << 16
_LEAST_SECONDS, _MOST_SECONDS = 0.05, 600.0
_MOST_REPEATS = 1000

# Maximum nodes that are named individually.
_MOST_NAMES = 8


class _Step(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes measured at the same time."""

    phase: str  # Of PHASES.
    node_ranks: tuple[int, ...]

    @property
    def label(self) -> str:
        """The ending of its runs' names, up to the node rank of those of several nodes."""
        return f"{self.phase}-{self.node_ranks[0]}" if self.phase == "alone" else self.phase


def make_device_test(
    *, kinds: Iterable[str], dtypes: Iterable[str], sizes: Iterable[int], seconds: float, repeats: int
) -> DeviceTest:
    """The test that the command line asks for; empty kinds, dtypes or sizes take DeviceTest's defaults.

    Raises:
        UsageError: one is unknown or out of bounds.
    """
    chosen = tuple(check_choice("test", kind, TEST_KINDS) for kind in dict.fromkeys(kinds))
    wrong = next((size for size in sizes if not 0 < size <= _LARGEST_SIZE), None)
    if wrong is not None:
        raise UsageError(f"--size {wrong}: matrices have 1 to {_LARGEST_SIZE} rows", hint="for example --size 4096")
    if not _LEAST_SECONDS <= seconds <= _MOST_SECONDS:
        raise UsageError(f"--seconds {seconds:g}: each test takes {_LEAST_SECONDS:g} to {_MOST_SECONDS:g} s")
    if not 0 < repeats <= _MOST_REPEATS:
        raise UsageError(f"--repeats {repeats}: expected 1 to {_MOST_REPEATS}")
    return DeviceTest(
        kinds=chosen or TEST_KINDS,
        dtypes=tuple(check_choice("dtype", dtype, DEVICE_DTYPES) for dtype in dict.fromkeys(dtypes)),
        sizes=tuple(sorted(set(sizes))),
        seconds=seconds,
        repeats=repeats,
    )


def bench(launch: Launch, phases: Sequence[str], context: RunContext, *, fresh: bool = False) -> BenchReport:
    """Measure every node in each phase; a node that fails is excluded from later phases.

    Args:
        launch: its job is a DeviceTest.
        phases: of PHASES.
        context: the network and the like.
        fresh: measures everything again; otherwise an interrupted bench of the same request goes on.

    Raises:
        UsageError: the hostfile does not allow it.
        MultinodeError: no node could be measured; the error is that of the first.
        Interrupted: the user stopped it; results are kept.
    """
    test = launch.job
    if not isinstance(test, DeviceTest):
        raise UsageError("bench only measures devices; it cannot run another job")
    nodes = range(len(launch.cluster.nodes))
    steps = [
        step
        for phase in phases
        for step in (
            [_Step(phase=phase, node_ranks=(rank,)) for rank in nodes]
            if phase == "alone"
            else [_Step(phase=phase, node_ranks=tuple(nodes))]
        )
    ]
    launch = msgspec.structs.replace(launch, execute=msgspec.structs.replace(launch.execute, kind="bench"))
    measured = {"bench": list(phases), "workers": launch.workers_per_node}
    record = GridRecord(
        fingerprint=fingerprint({"": test}, launch.cluster.nodes, launch, measured),
        command=describe_benchmark(test),
        grid=Grid(nodes=(len(nodes),)),
        cells=tuple(CellRecord(cell=GridCell(label=step.label, nodes=len(step.node_ranks))) for step in steps),
        noun="step",
    )
    directory = take_up(launch, record, context, Resume(anew=fresh))
    with directory.lock():
        return _StepSeries(launch, test, steps, context, directory).bench()


def load_bench(directory: RunDirectory) -> BenchReport | None:
    """The stored result of a bench, with its unmeasured parts; None for another run."""
    report = directory.read(_FILE, BenchReport)
    return with_progress(report, still_running=directory.is_locked) if report is not None else None


class _StepSeries(Series):
    """The steps of a bench; what fails on one node is a result, too."""

    def __init__(
        self, launch: Launch, test: DeviceTest, steps: Sequence[_Step], context: RunContext, directory: RunDirectory
    ) -> None:
        super().__init__(context, directory)
        self._launch = launch
        self._test = test
        self._steps = steps
        # The first failure in this process.
        self._first: MultinodeError | None = None
        self._parts = [self._with_records(part) for part in directory.read(_PARTS, list[BenchPart]) or ()]

    def bench(self) -> BenchReport:
        """Make all steps that are due."""
        try:
            self.run(list(in_turns(range(len(self._steps)), 1)), lambda _: not self._is_all_there_is())
        except BaseException as error:
            with contextlib.suppress(MultinodeError):
                self._keep("stopped" if isinstance(error, Interrupted) else "failed")
            raise
        self.keep(msgspec.structs.replace(self.record, is_over=True))
        first = next((part for part in self._parts if part.error is not None), None)
        report = self._keep("succeeded" if first is None else "failed")
        if first is not None and not any(worker.tests for node in report.nodes for worker in node.workers):
            raise self._first or RunFailed(first.error or "", node=first.node)
        return report

    def title(self, cell: CellRecord) -> str:
        """The nodes and the phase; empty if none is left."""
        step = next(step for step in self._steps if step.label == cell.cell.label)
        names = [self._launch.cluster.nodes[rank].name for rank in self._able(step)]
        listed = ", ".join(names) if len(names) <= _MOST_NAMES else f"{len(names)} nodes"
        return f"{listed} {step.phase}" if names else ""

    def report(self, cell: CellRecord, outcome: CellOutcome) -> None:
        """Say nothing: each node has said what failed."""

    def has_changed(self) -> None:
        """Store what is known so far."""
        self._keep("running")

    def measure(self, turn: Turn, run_id: str) -> CellOutcome:
        """Make a step on the nodes that have not failed."""
        step = self._steps[turn.cell]
        ranks = self._able(step)
        if not ranks:
            return CellOutcome(state="skipped", why=NO_NODES.found(None))
        run_ids = [run_id if step.phase == "alone" else f"{run_id}-{rank}" for rank in ranks]
        launches = [self._launch_of(step.phase, *pair) for pair in zip(ranks, run_ids, strict=True)]
        if step.phase == "alone":
            parts = [self._measure_node(launches[0], step.phase, ranks[0], self.context)]
        else:
            parts = self._measure_together(launches, step, ranks)
        self.require_going_on()
        # A step that was cut off is repeated.
        kept = [
            part for part in self._parts if (part.phase, part.node_rank) not in {(step.phase, rank) for rank in ranks}
        ]
        self._parts = kept + parts
        stripped = [msgspec.structs.replace(part, samples=(), facts=None) for part in self._parts]
        self.directory.write(_PARTS, stripped)
        made = tuple(part.run_id for part in parts if part.error is None and part.run_id is not None)
        if not made:
            return CellOutcome(state="failed", why=REFUSED.found(None, error=parts[0].error or ""))
        return CellOutcome(state="measured", run_ids=made)

    def _measure_together(self, launches: Sequence[Launch], step: _Step, ranks: Sequence[int]) -> list[BenchPart]:
        shown = _ShownTogether(self.context.observe)
        contexts = [shown.context_of(rank, self.context) for rank in ranks]
        with ThreadPoolExecutor(max_workers=len(ranks)) as threads:
            phases = [step.phase] * len(ranks)
            parts = list(threads.map(self._measure_node, launches, phases, ranks, contexts))
        for part in parts:
            if part.error is not None:
                self.context.say(f"{part.node}: {part.error}")
        return parts

    def end_cut_off(self, run_id: str) -> CellOutcome:
        """Make sure that no node goes on; the step is repeated."""
        for path in sorted(self.context.runs.glob(f"{run_id}*")):
            if path.name == run_id or path.name.removeprefix(f"{run_id}-").isdigit():
                super().end_cut_off(path.name)
        return CellOutcome(state="stopped")

    def _is_all_there_is(self) -> bool:
        return len(self._launch.cluster.nodes) == 1 and [len(part.ranks) for part in self._parts] == [1]

    def _able(self, step: _Step) -> list[int]:
        failed = {part.node_rank for part in self._parts if part.error is not None}
        return [rank for rank in step.node_ranks if rank not in failed]

    def _keep(self, status: str) -> BenchReport:
        as_reached = partial(as_steps, nodes=self._launch.cluster.nodes)
        report = summarise_bench(self.directory.run_id, self._parts, self._test, as_reached)
        if not self.record.is_over:
            due = [cell for cell in self.record.cells if cell.state in {"waiting", "running"}]
            report = msgspec.structs.replace(report, left=tuple(filter(None, map(self.title, due))))
        self.directory.write(_FILE, report)
        run = self.directory.read_run()
        if run is not None:
            last = {part.node_rank: self._node_run(part) for part in self._parts}
            nodes = tuple(
                last.get(node.node_rank, NodeRun(name=node.name, node_rank=node.node_rank)) for node in run.nodes
            )
            workers = sum(len(node.workers) for node in report.nodes)
            keep_status(self.directory, status, msgspec.structs.replace(run, world_size=workers, nodes=nodes))
        return report

    def _node_run(self, part: BenchPart) -> NodeRun:
        run = RunDirectory(self.context.runs / part.run_id).read_run() if part.run_id is not None else None
        if run is None:
            state = "lost" if part.is_lost else "ended"
            return NodeRun(name=part.node, node_rank=part.node_rank, state=state, status=Status(cause="not_started"))
        return msgspec.structs.replace(run.nodes[0], name=part.node, node_rank=part.node_rank)

    def _launch_of(self, phase: str, node_rank: int, run_id: str) -> Launch:
        """Each node gets its own port, as several nodes may be on one machine."""
        launch = self._launch
        first_port = launch.master_port
        port = min(first_port + node_rank, _LAST_PORT) if first_port is not None else None
        return msgspec.structs.replace(
            launch,
            job=msgspec.structs.replace(self._test, turns=phase == "alone"),
            master_port=port,
            cluster=msgspec.structs.replace(launch.cluster, nodes=(launch.cluster.nodes[node_rank],)),
            run_id=run_id,
        )

    def _measure_node(self, launch: Launch, phase: str, node_rank: int, context: RunContext) -> BenchPart:
        name = launch.cluster.nodes[0].name
        part = BenchPart(phase=phase, node=name, node_rank=node_rank)
        try:
            launched = run_prepared(launch, prepare(launch, context), context)
            (node,) = launched.plan.nodes
            part = msgspec.structs.replace(part, run_id=launched.run.run_id, ranks=node.place.ranks, gpus=node.gpus)
            part = self._with_records(part)
            require_success(launched, context)
        except MultinodeError as error:
            error.node = error.node or name
            self._first = self._first or error
            context.say(str(error))
            return msgspec.structs.replace(part, error=error.message, is_lost=isinstance(error, NodeError))
        cleanup_nodes(launched, launch.cluster, context)
        return part

    def _with_records(self, part: BenchPart) -> BenchPart:
        if part.run_id is None:
            return part
        directory = RunDirectory(self.context.runs / part.run_id)
        return msgspec.structs.replace(
            part,
            facts=StoredRun(directory).facts.get(part.node),
            # Limit on untrusted records.
            samples=tuple(itertools.islice(parse_samples(directory.sample_lines(0)), _MOST_SAMPLES)),
        )


class _ShownTogether:
    """Shows the runs of several nodes as the progress of one; thread-safe.

    Args:
        observe: shows the combined progress.
    """

    def __init__(self, observe: Callable[[RunProgress], None]) -> None:
        self._lock = threading.Lock()
        self._observe = observe
        self._seen: dict[int, RunProgress] = {}

    def context_of(self, node_rank: int, context: RunContext) -> RunContext:
        """The context of one node's run, which reports its progress here and no stages."""
        own = copy.copy(context)
        own.observe = lambda progress: self._show(node_rank, progress)
        own.say = lambda _: None
        return own

    def _show(self, node_rank: int, progress: RunProgress) -> None:
        with self._lock:
            self._seen[node_rank] = progress
            seen = sorted(self._seen.items())
            nodes = [msgspec.structs.replace(node, node_rank=rank) for rank, report in seen for node in report.nodes]
            self._observe(
                msgspec.structs.replace(
                    progress,
                    run_id=progress.run_id.rpartition("-")[0],
                    world_size=sum(report.world_size for _, report in seen),
                    nodes=tuple(nodes),
                    elapsed_s=max(report.elapsed_s for _, report in seen),
                )
            )
