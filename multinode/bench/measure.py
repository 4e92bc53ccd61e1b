"""Measure every worker's device alone and all at once, in one run per node, and judge the results.

One run per node: nodes exchange nothing, and a failure on one must not cost the others their figures. Results are
stored after each step, so a killed controller loses none. Prints nothing.
"""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from multinode.bench.figures import BenchReport
from multinode.bench.judge import summarise_bench, with_progress
from multinode.bench.nodes import BenchPart
from multinode.cluster.quoting import as_steps
from multinode.errors import Interrupted, MultinodeError, NodeError, UsageError
from multinode.launch.context import Launch, Launched, RunContext
from multinode.launch.launch import create_parent, prepare, require_success, run_prepared
from multinode.launch.node_runs import cleanup_nodes
from multinode.records.benchmark import DeviceTest, describe_benchmark
from multinode.records.progress import RunProgress
from multinode.records.run import NodeRun, Run
from multinode.records.run_directory import RunDirectory
from multinode.records.samples import parse_samples

_FILE = "bench.json"
# Maximum records per worker or sampler; a bench has some hundreds.
_MOST_SAMPLES = 100_000
_LAST_PORT = 65535

# Maximum nodes that are named individually.
_MOST_NAMES = 8


class _Step(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes measured at the same time."""

    phase: str  # Of PHASES.
    node_ranks: tuple[int, ...]
    place: str = ""  # Which of the phase's steps it is, for people; empty of the only one.


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one node in one phase: its run (None if it never started), and the reason of a failure."""

    part: BenchPart
    launched: Launched | None = None
    error: MultinodeError | None = None


def bench(what: Launch, phases: Sequence[str], context: RunContext) -> BenchReport:
    """Measure every node in each phase; a node that fails is excluded from later phases.

    Args:
        what: its job is a DeviceTest.
        phases: of PHASES.
        context: the network and the like.

    Raises:
        UsageError: the hostfile does not allow it.
        MultinodeError: no node could be measured; the error is that of the first.
        Interrupted: the user stopped it; results are kept.
    """
    test = what.job
    if not isinstance(test, DeviceTest):
        raise UsageError("bench measures devices only; this is another job")
    directory = create_parent(context.runs, what)
    what = msgspec.structs.replace(what, run_id=directory.run_id)
    steps = [step for phase in phases for step in _steps(phase, len(what.cluster.nodes))]
    with directory.lock():
        return _Series(what, test, context, directory).run(steps)


def load_bench(directory: RunDirectory) -> BenchReport | None:
    """The stored result of a bench, with its unmeasured parts; None for another run."""
    report = directory.read(_FILE, BenchReport)
    return with_progress(report, still_running=directory.is_locked) if report is not None else None


def _steps(phase: str, nodes: int) -> list[_Step]:
    if phase == "alone":
        return [_Step(phase=phase, node_ranks=(rank,), place=f"[{rank + 1}/{nodes}] ") for rank in range(nodes)]
    return [_Step(phase=phase, node_ranks=tuple(range(nodes)))]


class _Series:
    """The steps of a bench; results are stored before each step and at the end."""

    def __init__(self, what: Launch, test: DeviceTest, context: RunContext, directory: RunDirectory) -> None:
        self._what = what
        self._test = test
        self._context = context
        # The directory of the bench, held by this process.
        self._directory = directory
        self._started_s = time.time()
        self._measured: list[Measured] = []

    def run(self, steps: Sequence[_Step]) -> BenchReport:
        """Run all steps."""
        left = steps
        for number, step in enumerate(steps, 1):
            if self._context.stop.count or self._is_all_there_is():
                break
            self._keep("running", left)
            measured = self._measure(step)
            self._measured += measured
            if not any(isinstance(one.error, Interrupted) for one in measured):
                left = steps[number:]
        return self._conclude(left)

    def _conclude(self, left: Sequence[_Step]) -> BenchReport:
        if self._context.stop.count:
            self._keep("stopped", left)
            raise Interrupted("interrupted", hint=f"results so far: multinode show {self._what.run_id}")
        first = next((one.error for one in self._measured if one.error is not None), None)
        report = self._keep("succeeded" if first is None else "failed")
        if first is not None and not any(worker.tests for node in report.nodes for worker in node.workers):
            raise first
        return report

    def _is_all_there_is(self) -> bool:
        return len(self._what.cluster.nodes) == 1 and [len(one.part.ranks) for one in self._measured] == [1]

    def _measure(self, step: _Step) -> list[Measured]:
        ranks = self._able(step)
        launches = [_launch_of(self._what, self._test, step.phase, rank) for rank in ranks]
        if not ranks:
            return []
        self._context.say(f"{step.place}{self._title(step)}")
        if step.phase == "alone":
            return [_measure_node(launches[0], step.phase, ranks[0], self._context)]
        shown = _ShownTogether(self._context.observe)
        with ThreadPoolExecutor(max_workers=len(ranks)) as threads:
            contexts = [shown.context_of(rank, self._context) for rank in ranks]
            phases = [step.phase] * len(ranks)
            measured = list(threads.map(_measure_node, launches, phases, ranks, contexts))
        for one in measured:
            if one.error is not None:
                self._context.say(f"{one.part.node}: {one.error.message}")
        return measured

    def _able(self, step: _Step) -> list[int]:
        failed = {
            one.part.node_rank
            for one in self._measured
            if one.error is not None and not isinstance(one.error, Interrupted)
        }
        return [rank for rank in step.node_ranks if rank not in failed]

    def _title(self, step: _Step) -> str:
        names = [self._what.cluster.nodes[rank].name for rank in self._able(step)]
        return f"{', '.join(names) if len(names) <= _MOST_NAMES else f'{len(names)} nodes'} {step.phase}"

    def _keep(self, status: str, left: Sequence[_Step] = ()) -> BenchReport:
        parts = [one.part for one in self._measured]
        as_reached = partial(as_steps, nodes=self._what.cluster.nodes)
        report = summarise_bench(self._directory.run_id, parts, self._test, as_reached)
        report = msgspec.structs.replace(report, left=tuple(self._title(step) for step in left if self._able(step)))
        run = Run(
            run_id=report.run_id,
            job=describe_benchmark(self._test),
            engine="torchrun",
            status=status,
            started_s=self._started_s,
            ended_s=None if status == "running" else time.time(),
            world_size=sum(len(node.workers) for node in report.nodes),
            nodes=self._node_runs(),
            kind="bench",
        )
        self._directory.write(_FILE, report)
        self._directory.write("run.json", run)
        return report

    def _node_runs(self) -> tuple[NodeRun, ...]:
        last = {one.part.node_rank: _node_run(one) for one in self._measured}
        nodes = enumerate(self._what.cluster.nodes)
        return tuple(last.get(rank) or NodeRun(name=node.name, node_rank=rank) for rank, node in nodes)


def _node_run(one: Measured) -> NodeRun:
    name, node_rank = one.part.node, one.part.node_rank
    if one.launched is None:
        state = "lost" if isinstance(one.error, NodeError) else "ended"
        return NodeRun(name=name, node_rank=node_rank, state=state, cause="not_started")
    return msgspec.structs.replace(one.launched.run.nodes[0], name=name, node_rank=node_rank)


def _launch_of(what: Launch, test: DeviceTest, phase: str, node_rank: int) -> Launch:
    """Each node gets its own port, as several nodes may be on one machine."""
    asked = what.options.master_port
    port = min(asked + node_rank, _LAST_PORT) if asked is not None else None
    return msgspec.structs.replace(
        what,
        job=msgspec.structs.replace(test, turns=phase == "alone"),
        options=msgspec.structs.replace(what.options, master_port=port),
        cluster=msgspec.structs.replace(what.cluster, nodes=(what.cluster.nodes[node_rank],)),
        run_id=f"{what.run_id}-{phase}-{node_rank}",
    )


def _measure_node(what: Launch, phase: str, node_rank: int, context: RunContext) -> Measured:
    name = what.cluster.nodes[0].name
    part = BenchPart(phase=phase, node=name, node_rank=node_rank)
    launched = None
    try:
        prepared = prepare(what, context)
        launched = run_prepared(prepared, context)
        (node,) = launched.plan.nodes
        lines = launched.directory.sample_lines(0)
        part = msgspec.structs.replace(
            part,
            run_id=launched.run.run_id,
            ranks=node.ranks,
            gpus=node.gpus,
            facts=prepared.facts.get(name),
            # Limit on untrusted records.
            samples=tuple(itertools.islice(parse_samples(lines), _MOST_SAMPLES)),
        )
        require_success(launched, context)
    except MultinodeError as error:
        error.node = error.node or name
        context.say(str(error))
        return Measured(part=msgspec.structs.replace(part, error=error.message), launched=launched, error=error)
    cleanup_nodes(launched, what.cluster, context)
    return Measured(part=part, launched=launched)


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
            nodes = [msgspec.structs.replace(node, node_rank=rank) for rank, one in seen for node in one.nodes]
            self._observe(
                msgspec.structs.replace(
                    progress,
                    run_id=progress.run_id.rpartition("-")[0],
                    world_size=sum(one.world_size for _, one in seen),
                    nodes=tuple(nodes),
                    elapsed_s=max(one.elapsed_s for _, one in seen),
                )
            )
