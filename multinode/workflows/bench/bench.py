"""bench: every worker's device measured alone and all at once, a run of its own for each node, summed up and judged.

One node a run: they exchange nothing, and what fails on one must not cost the others their figures. What was measured
is stored before the next is: a controller that is killed loses none of it. Prints nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from multinode.analyse.bench.bench import summarise_bench
from multinode.analyse.bench.bench_figures import BenchReport
from multinode.core.measure.benchmark import DeviceTest, describe_device_test
from multinode.core.run.run import NodeRun, Run
from multinode.errors import Interrupted, NodeError, UsageError
from multinode.store.run_directory import RunDirectory
from multinode.workflows.bench.bench_node import Measured, ShownTogether, Turn, make_turn, measure_node
from multinode.workflows.bench.bench_store import create_bench, keep_bench
from multinode.workflows.run.context import Launch, RunContext

__all__ = ["bench"]

# More nodes are not named one by one.
_MOST_NAMES = 8


class _Step(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes that are measured at the same time."""

    phase: str  # Of PHASES.
    node_ranks: tuple[int, ...]
    place: str = ""  # Which of the phase's steps it is, for people; empty of the only one.


def bench(what: Launch, phases: Sequence[str], context: RunContext) -> BenchReport:
    """Measure every node in each phase; one that fails in a phase is left out of those that follow.

    Args:
        what: its job is a DeviceTest.
        phases: of PHASES.
        context: the network and the like.

    Raises:
        UsageError: the hostfile does not allow it.
        MultinodeError: no node could be measured; the error is that of the first one.
        Interrupted: the user stopped it; what was measured before is kept.
    """
    test = what.job
    if not isinstance(test, DeviceTest):
        raise UsageError("bench measures devices, and this is another job")
    directory = create_bench(context.runs, what)
    what = msgspec.structs.replace(what, run_id=directory.run_id)
    steps = [step for phase in phases for step in _steps(phase, len(what.cluster.nodes))]
    with directory.lock():
        return _Series(what, test, context, directory).run(steps)


def _steps(phase: str, nodes: int) -> list[_Step]:
    if phase == "alone":
        return [_Step(phase=phase, node_ranks=(rank,), place=f"[{rank + 1}/{nodes}] ") for rank in range(nodes)]
    return [_Step(phase=phase, node_ranks=tuple(range(nodes)))]


class _Series:
    """The steps of a bench one after the other; what there is of it is stored before each of them and at the end."""

    def __init__(self, what: Launch, test: DeviceTest, context: RunContext, directory: RunDirectory) -> None:
        self._what = what
        self._test = test
        self._context = context
        # The bench's, which this process holds.
        self._directory = directory
        self._started_s = time.time()
        self._measured: list[Measured] = []

    def run(self, steps: Sequence[_Step]) -> BenchReport:
        """All of them.

        Raises:
            MultinodeError, Interrupted: see `bench`.
        """
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
            raise Interrupted("interrupted", hint=f"what was measured so far: multinode show {self._what.run_id}")
        first = next((one.error for one in self._measured if one.error is not None), None)
        report = self._keep("succeeded" if first is None else "failed")
        if first is not None and not any(worker.tests for node in report.nodes for worker in node.workers):
            raise first
        return report

    def _is_all_there_is(self) -> bool:
        """Whether the only worker has measured: it was alone, and all of them together are no more."""
        return len(self._what.cluster.nodes) == 1 and [len(one.part.ranks) for one in self._measured] == [1]

    def _measure(self, step: _Step) -> list[Measured]:
        turns = [make_turn(self._what, self._test, step.phase, rank) for rank in self._able(step)]
        if not turns:
            return []
        self._context.say(f"{step.place}{self._title(step)}")
        return [measure_node(turns[0], self._context)] if step.phase == "alone" else _all_at_once(turns, self._context)

    def _able(self, step: _Step) -> list[int]:
        """Node ranks of the step, without those that have failed before; to be stopped is no failure."""
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
        """Store what there is, and what is left to be measured."""
        report = summarise_bench(self._directory.run_id, self._test, [one.part for one in self._measured])
        report = msgspec.structs.replace(report, left=tuple(self._title(step) for step in left if self._able(step)))
        run = Run(
            run_id=report.run_id,
            job=describe_device_test(self._test),
            engine="torchrun",
            status=status,
            started_s=self._started_s,
            ended_s=None if status == "running" else time.time(),
            world_size=sum(len(node.workers) for node in report.nodes),
            nodes=self._node_runs(),
            kind="bench",
        )
        keep_bench(self._directory, report, run)
        return report

    def _node_runs(self) -> tuple[NodeRun, ...]:
        """How the last run of each node ended; some wait for their first."""
        last = {one.part.node_rank: _node_run(one) for one in self._measured}
        nodes = enumerate(self._what.cluster.nodes)
        return tuple(last.get(rank) or NodeRun(name=node.name, node_rank=rank) for rank, node in nodes)


def _all_at_once(turns: Sequence[Turn], context: RunContext) -> list[Measured]:
    shown = ShownTogether(context.observe)
    with ThreadPoolExecutor(max_workers=len(turns)) as threads:
        begun = [threads.submit(measure_node, turn, shown.outside_of(turn.node_rank, context)) for turn in turns]
        measured = [one.result() for one in begun]
    for one in measured:
        if one.error is not None:
            context.say(f"{one.part.node}: {one.error.message}")
    return measured


def _node_run(one: Measured) -> NodeRun:
    name, node_rank = one.part.node, one.part.node_rank
    if one.launched is None:
        state = "lost" if isinstance(one.error, NodeError) else "ended"
        return NodeRun(name=name, node_rank=node_rank, state=state, cause="not_started")
    return msgspec.structs.replace(one.launched.run.nodes[0], name=name, node_rank=node_rank)
