"""launch with restarts: attempts of one run, each from the last complete checkpoint. Prints nothing."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping

import msgspec

from multinode.core.cluster.cluster import Node
from multinode.core.job.job import LlamaFactoryJob
from multinode.core.measure.benchmark import Benchmark
from multinode.core.run.checkpoint import Checkpoint, choose_checkpoint
from multinode.core.run.plan import LaunchPlan
from multinode.core.run.planning import plan_launch
from multinode.core.run.progress import RunProgress
from multinode.core.run.restart import (
    RestartOptions,
    Saved,
    Start,
    resume_job,
    says_resume,
    why_no_resume,
    why_not_restarted,
)
from multinode.core.run.run import Attempt, Run, new_run
from multinode.core.run.run_id import make_run_id, node_run_id
from multinode.errors import Interrupted, MultinodeError, NodeError, NodeFailed, UsageError
from multinode.preflight.checks.paths import is_network
from multinode.store.run_directory import RunDirectory
from multinode.transport.agent import read_answer
from multinode.transport.fan_out import gather
from multinode.units import format_count, format_duration
from multinode.workflows.run.context import Launch, Launched, Prepared, RunContext
from multinode.workflows.run.launch import create_parent, prepare, probe_nodes, run_prepared

__all__ = ["launch_with_restarts"]

_ANSWER_S = 60.0
_WAIT_S = 2.0
# A script is told that it is started again, and takes up its own checkpoint.
_VARIABLE = "MULTINODE_ATTEMPT"


class _Answer(msgspec.Struct, frozen=True):
    checkpoints: tuple[Checkpoint, ...]
    filesystem: str | None = None
    device: str | None = None


class _Stopped(msgspec.Struct, frozen=True):
    processes_left: int


def launch_with_restarts(what: Launch, context: RunContext, options: RestartOptions) -> Launched:
    """Run a job, and start it again when it fails; the result is that of the last attempt, under the run's own name.

    Raises:
        UsageError: the job cannot go on from a checkpoint.
        MultinodeError: as `launch`, of the first attempt.
    """
    reason = why_no_resume(what.job) if not isinstance(what.job, Benchmark) else "a benchmark is not restarted"
    if reason is not None:
        raise UsageError(f"--restarts: {reason}", hint="launch it without --restarts")
    what = msgspec.structs.replace(what, run_id=what.run_id or make_run_id())
    return _Attempts(what, context, options).run()


class _Attempts:
    """The attempts of one run so far."""

    def __init__(self, what: Launch, context: RunContext, options: RestartOptions) -> None:
        self._what = what
        self._context = context
        self._options = options
        self._done: list[Attempt] = []
        self._step = 0
        # What stood there before the run; a checkpoint of another training is none of its own.
        self._earlier: dict[str, Saved] = {}

    def run(self) -> Launched:
        start = self._look()
        prepared = self._prepare(start)
        directory = create_parent(self._context.runs, self._what)
        with directory.lock():
            while True:
                self._record(new_run(prepared.plan, time.time()), directory)
                launched = self._execute(prepared, start)
                reason = why_not_restarted(self._done, self._options)
                if reason is None:
                    try:
                        self._record(msgspec.structs.replace(launched.run, status="running", ended_s=None), directory)
                        self._wait_for_nodes(launched.plan)
                        start = self._look()
                        prepared = self._prepare(start)
                    except MultinodeError as error:
                        reason = str(error)
                    else:
                        self._note_losses(launched, start)
                        continue
                if launched.run.status != "succeeded":
                    self._done[-1] = msgspec.structs.replace(self._done[-1], not_restarted=reason)
                directory.write("summary.json", launched.summary)
                run = self._record(launched.run, directory)
                return msgspec.structs.replace(launched, run=run, directory=directory)

    def _look(self) -> Start:
        """What the next attempt begins with."""
        nodes = self._what.cluster.nodes
        first, job = not self._done, self._what.job
        if not isinstance(job, LlamaFactoryJob):
            return Start(nodes=len(nodes), is_first=first)
        facts = probe_nodes(self._what, self._context.agent)
        plan = plan_launch(self._what.cluster, job, facts, self._what.run_id or "", self._what.options)
        found = self._ask(str(job.config["output_dir"]), {node.node: node.command.cwd for node in plan.nodes})
        shared = {one.shared for one in found.values()}
        if first and says_resume(job):
            self._earlier = found
        found = {node: one.without(self._earlier.get(node)) for node, one in found.items()}
        ranks = {node.node: node.ranks for node in plan.nodes}
        choice = choose_checkpoint({node: one.checkpoints for node, one in found.items()}, ranks)
        if first and choice.name is None:
            self._earlier = found
        for name, gap in choice.skipped.items():
            self._context.say(f"{name} is not complete: {gap}")
        return Start(
            choice=choice,
            is_first=first,
            has_any=any(one.checkpoints for one in found.values()),
            nodes=len(nodes),
            shared=len(shared) == 1 and None not in shared,
        )

    def _ask(self, directory: str, cwds: Mapping[str, str | None]) -> dict[str, Saved]:
        def ask(node: Node) -> Saved:
            request = {"schema": 1, "directory": directory, "cwd": cwds[node.name]}
            answer = self._context.agent.call(node, "checkpoints", request, deadline_s=_ANSWER_S)
            found = read_answer(answer, _Answer, node.name)
            return Saved(checkpoints=found.checkpoints, shared=found.device if is_network(found.filesystem) else None)

        outcomes = gather(self._what.cluster.nodes, ask, deadline_s=2 * _ANSWER_S).require()
        return {node.name: saved for node, saved in zip(self._what.cluster.nodes, outcomes, strict=True)}

    def _prepare(self, start: Start) -> Prepared:
        number = len(self._done) + 1
        environment = self._what.options.environment
        environment = msgspec.structs.replace(environment, env={**environment.env, _VARIABLE: str(number)})
        what = msgspec.structs.replace(
            self._what,
            job=resume_job(self._what.job, start) if not isinstance(self._what.job, Benchmark) else self._what.job,
            options=msgspec.structs.replace(self._what.options, environment=environment),
            run_id=f"{self._what.run_id}-{number}",
        )
        begin = f"from {start.choice.name}" if start.choice.name is not None else "from the beginning"
        if number > 1:
            self._context.say(f"attempt {number} of {self._options.restarts + 1}, {begin}")
        return prepare(what, self._context)

    def _execute(self, prepared: Prepared, start: Start) -> Launched:
        self._step = start.choice.step
        observe, number = self._context.observe, len(self._done) + 1

        def note_step(progress: RunProgress) -> None:
            self._step = max([self._step, *(node.step for node in progress.nodes if node.step is not None)])
            observe(msgspec.structs.replace(progress, attempt=number, attempts=self._options.restarts + 1))

        context = copy.copy(self._context)
        context.observe = note_step
        launched = run_prepared(prepared, context)
        run = launched.run
        self._done.append(
            Attempt(
                run_id=run.run_id,
                status=run.status,
                started_s=run.started_s,
                ended_s=run.ended_s,
                checkpoint=start.choice.name,
                skipped=start.choice.skipped,
                first_step=start.choice.step,
                last_step=self._step,
                first_failure=run.first_failure,
            )
        )
        return launched

    def _wait_for_nodes(self, plan: LaunchPlan) -> None:
        """See on every node that nothing of the attempt is left; one that cannot be reached is waited for.

        Raises:
            MultinodeError: a node did not return in time, has processes left, or the user asked for a stop.
        """
        grace_s, wait_s = self._what.execute.grace_s, self._options.node_wait_s
        deadline = time.monotonic() + wait_s
        ranks = {node.node: node.node_rank for node in plan.nodes}
        self._context.say("waiting until nothing of it is left on any node")

        def see(node: Node) -> None:
            request = {"schema": 1, "run_id": node_run_id(plan.run_id, ranks[node.name]), "grace_s": grace_s}
            while True:
                if self._context.stop.count:
                    raise Interrupted("it was asked to stop")
                try:
                    answer = self._context.agent.call(node, "stop", request, deadline_s=grace_s + _ANSWER_S)
                    left = read_answer(answer, _Stopped, node.name).processes_left
                except NodeError as error:
                    if time.monotonic() >= deadline:
                        hint = f"it was waited for for {format_duration(wait_s)}: --node-wait"
                        raise NodeFailed(f"it did not return: {error.message}", node=node.name, hint=hint) from error
                    time.sleep(_WAIT_S)
                    continue
                if left:
                    raise NodeFailed(f"{format_count(left, 'process')} of it are left", node=node.name)
                return

        gather(self._what.cluster.nodes, see, deadline_s=wait_s + 2 * (grace_s + _ANSWER_S)).require()

    def _note_losses(self, launched: Launched, start: Start) -> None:
        last = self._done[-1]
        lost = max(0, last.last_step - start.choice.step) if isinstance(self._what.job, LlamaFactoryJob) else None
        step = launched.summary.step_time_ms
        took_s = lost * step.median / 1000 if lost is not None and step is not None else 0.0
        between_s = time.time() - (last.ended_s or time.time())
        self._done[-1] = msgspec.structs.replace(last, lost_steps=lost, lost_s=between_s + took_s)

    def _record(self, run: Run, directory: RunDirectory) -> Run:
        first = self._done[0].started_s if self._done else run.started_s
        run = msgspec.structs.replace(run, run_id=directory.run_id, started_s=first, attempts=tuple(self._done))
        directory.write("run.json", run)
        return run
