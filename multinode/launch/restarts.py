"""launch with restarts: attempts of one run, each from the last complete checkpoint. Prints nothing."""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from multinode.check.paths import is_network
from multinode.cluster.cluster import Node
from multinode.cluster.dataplane import choose_endpoints
from multinode.cluster.facts import NodeFacts
from multinode.errors import Interrupted, MultinodeError, NodeError, NodeFailed, NodeGone, UsageError
from multinode.job.job import Job
from multinode.job.planning import plan_launch
from multinode.launch.checkpoints import (
    Checkpoint,
    CheckpointCopy,
    Layout,
    choose_checkpoint,
    is_of_trainer,
)
from multinode.launch.context import STOP_FILE, Launch, Launched, RunContext, StopOrder
from multinode.launch.launch import create_parent, prepare, probe_nodes, probe_workers, run_prepared
from multinode.launch.node_runs import stop_on_node
from multinode.launch.restart import (
    RestartOptions,
    Saved,
    Start,
    batch_words,
    global_batch,
    require_restartable,
    resume_job,
    says_resume,
    script_variables,
    why_not_restarted,
)
from multinode.launch.shard_copies import SHARE, Over, ShardCopies, announce
from multinode.launch.sharding import layout_of, output_dir_of
from multinode.records.plan import CODE_FILE, CodeCopy, LaunchPlan
from multinode.records.progress import RunProgress
from multinode.records.run import VERDICT_FILE, Attempt, Run, make_run_id, new_run, node_run_id
from multinode.records.run_directory import RunDirectory
from multinode.runs.stored_run import StoredRun
from multinode.stats.unknown import or_none
from multinode.transport.base import gather
from multinode.units import format_count, format_duration, format_size

_ANSWER_S = 60.0
_WAIT_S = 2.0
_LOOK_S = 0.2
_MOST_CHECKPOINTS = 50
_ASKED = "it was told to stop"
# A script learns that it is restarted and resumes itself; on fewer nodes, how many of its batches make up one of the
# first attempt's.
_ATTEMPT, _ACCUMULATION = "MULTINODE_ATTEMPT", "MULTINODE_ACCUMULATION"


class _CheckpointsThere(msgspec.Struct, frozen=True, tag_field="kind", tag="checkpoints"):
    checkpoints: tuple[Checkpoint, ...]
    folder: str
    filesystem: str | None = None
    device: str | None = None


def launch_with_restarts(launch: Launch, context: RunContext, options: RestartOptions) -> Launched:
    """Run a job, and restart it on failure; returns the result of the last attempt, under the run's own name.

    Raises:
        UsageError: the job cannot resume from a checkpoint, or not on fewer nodes.
        MultinodeError: as for `launch`, from the first attempt.
    """
    job = require_restartable(launch.job, launch.cluster, launch, options)
    launch = msgspec.structs.replace(launch, run_id=launch.run_id or make_run_id())
    return _Attempts(launch, job, context, options).run()


class _CheckpointPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where the checkpoints of a job lie, and what they consist of."""

    output: str  # the directory as the job names it
    cwds: dict[str, str | None]  # by node, where a relative one starts
    folders: dict[str, str]  # by node, the directory
    nodes: dict[str, tuple[Node, str]]  # by name, with the address in the training network
    ranks: dict[str, tuple[int, ...]]
    layout: Layout
    trained: int | None  # number of trained parameters; None if unknown
    link_gbit_per_s: float | None  # speed of the slowest link; None if unknown


def _count_trained(job: Job, facts: Mapping[str, NodeFacts]) -> int | None:
    if job.training is None:
        return None
    from multinode.model.training import read_training

    models = (fact.model_config for fact in facts.values() if fact.model_config is not None)
    try:
        return read_training(job.training, next(models, None)).load.trainable
    except UsageError:
        return None


class _Attempts:
    """The attempts of one run so far."""

    def __init__(self, launch: Launch, job: Job, context: RunContext, options: RestartOptions) -> None:
        self._launch = launch
        self._job = job
        self._directory: RunDirectory | None = None
        self._first_nodes = len(launch.cluster.nodes)
        self._first_workers: int | None = None
        self._left_out: dict[str, str] = {}
        # Its own, so that leftovers of a stop can be silenced.
        self._context = copy.copy(context)
        self._part_of = context.part_of
        self._options = options
        self._done: list[Attempt] = []
        self._step = 0
        # Checkpoints from before the run may belong to another training.
        self._earlier: dict[str, Saved] = {}
        self._place: _CheckpointPlace | None = None

    def run(self) -> Launched:
        start = self._look()
        prepared = self._prepare(start)
        directory = self._directory = create_parent(self._context.runs, self._launch)
        self._context.part_of = directory.run_id
        with directory.lock():
            while True:
                self._record(new_run(prepared.require_plan(), time.time()), directory)
                launched = self._execute(prepared, start)
                reason = why_not_restarted(self._done, self._options)
                # A stop requested during the attempt that lost a node has not stopped it.
                is_lost = launched.run.status == "lost" and self._is_stopped()
                if reason is None:
                    try:
                        self._record(msgspec.structs.replace(launched.run, status="running", ended_s=None), directory)
                        start, prepared = self._next_unless_stopped(launched.plan)
                    except Interrupted as error:
                        reason = str(error)
                        if not is_lost:
                            stopped = msgspec.structs.replace(
                                launched.run,
                                status="stopped",
                                stop_reason=self._context.stop.reason,
                                ended_s=time.time(),
                                first_failure=None,
                            )
                            launched = msgspec.structs.replace(launched, run=stopped)
                    except MultinodeError as error:
                        reason = f"{error} ({error.hint})" if error.hint else str(error)
                    else:
                        self._note_losses(launched, start)
                        continue
                if launched.run.status != "succeeded":
                    self._done[-1] = msgspec.structs.replace(self._done[-1], not_restarted=reason)
                directory.write("summary.json", launched.summary)
                if (verdict := launched.directory.read(VERDICT_FILE, dict[str, Any])) is not None:
                    directory.write(VERDICT_FILE, verdict)
                if (copied := launched.directory.read(CODE_FILE, CodeCopy)) is not None:
                    directory.write(CODE_FILE, copied)
                run = self._record(launched.run, directory)
                return msgspec.structs.replace(launched, run=run, directory=directory)

    def _look(self) -> Start:
        """What the next attempt begins with."""
        self._place = None
        nodes, workers = len(self._launch.cluster.nodes), sum(probe_workers(self._launch, self._context.agent))
        first_workers = self._first_workers = self._first_workers or workers
        start = Start(nodes=nodes, workers=workers, first_workers=first_workers, is_first=not self._done)
        first, job = start.is_first, self._job
        if start.accumulation(job) is None and not self._options.scale_batch:
            raise UsageError(
                f"no number of accumulation steps keeps the global batch of {self._first_nodes} nodes on {nodes}",
                hint="--scale-batch allows a smaller batch",
            )
        output, layout = output_dir_of(job), layout_of(job, self._launch.engine)
        # A script with other checkpoints sees to them itself.
        if output is None or isinstance(layout, str):
            return start
        facts = probe_nodes(self._launch, self._context.agent)
        plan = plan_launch(self._launch.cluster, job, facts, self._launch.run_id or "", self._launch)
        cwds = {node.place.node: node.output_cwd or node.command.cwd for node in plan.nodes}
        answers = self._ask(output, cwds)
        shared = {answer.shared for answer in answers.values()}
        start = msgspec.structs.replace(start, shared=len(shared) == 1 and None not in shared)
        if first and says_resume(job):
            self._earlier = answers
        answers = {node: answer.without(self._earlier.get(node)) for node, answer in answers.items()}
        ranks = {place.node: place.ranks for place in plan.places}
        endpoints = choose_endpoints(self._launch.cluster, facts)
        speeds = [endpoint.link_gbit_per_s for endpoint in endpoints if endpoint.link_gbit_per_s is not None]
        named = zip(self._launch.cluster.nodes, endpoints, strict=True)
        self._place = _CheckpointPlace(
            output=output,
            cwds=cwds,
            folders={node: answer.folder for node, answer in answers.items()},
            nodes={node.name: (node, endpoint.addr or node.name) for node, endpoint in named},
            ranks=ranks,
            layout=layout,
            trained=_count_trained(job, facts) if layout.library is not None else None,
            link_gbit_per_s=min(speeds) if len(speeds) == len(endpoints) else None,
        )
        seen = {node: answer.checkpoints for node, answer in answers.items()}
        if not job.takes_checkpoint and not any(map(is_of_trainer, itertools.chain(*seen.values()))):
            return start
        choice = choose_checkpoint(seen, ranks, layout, same_ranks=not self._left_out)
        if first and choice.name is None:
            self._earlier = answers
        for line in choice.describe():
            self._context.say(line)
        for copied in choice.copies:
            what = f"{format_count(len(copied.paths), 'file')} ({format_size(copied.size_bytes)}) of {choice.name}"
            self._context.say(f"copying {what} from {copied.source} to {copied.target}")
            began = time.monotonic()
            self._copy(self._place, str(choice.name), copied)
            self._context.say(f"copied {what} in {format_duration(time.monotonic() - began)}")
        return msgspec.structs.replace(
            start,
            choice=choice,
            has_any=any(answer.checkpoints for answer in answers.values()),
        )

    def _copy(
        self,
        place: _CheckpointPlace,
        checkpoint: str,
        copied: CheckpointCopy,
        over: threading.Event | None = None,
        share: float = 1.0,
    ) -> None:
        """Give a node files of a checkpoint that it lacks."""
        # Most attempts need no copy.
        from multinode.copy.chain import Participant
        from multinode.copy.files import copy_files

        def participant(name: str) -> Participant:
            paths = tuple(f"{place.folders[name]}/{checkpoint}/{path}" for path in copied.paths)
            node, addr = place.nodes[name]
            return Participant(node, self._context.agent, addr, paths)

        def observe(_: object) -> None:
            if over is not None and over.is_set():
                raise Over

        copy_files(participant(copied.source), participant(copied.target), observe, share=share)

    def _copies(self, start: Start) -> contextlib.AbstractContextManager[None]:
        """What copies shards while an attempt runs; nothing where every node has all of a checkpoint."""
        place, copies = self._place, self._options.shard_copies
        if place is None or place.layout.library is None or start.shared or start.nodes == 1:
            return contextlib.nullcontext()
        if start.is_first:
            counts = [len(own) for own in place.ranks.values()]
            part = max(counts) / sum(counts)
            self._context.say(
                announce(copies, trained=place.trained, largest_part=part, link_gbit_per_s=place.link_gbit_per_s)
            )
        if not copies:
            return contextlib.nullcontext()

        def look() -> dict[str, tuple[Checkpoint, ...]]:
            # Reading old ones again would take the nodes' time from the training.
            answers = self._ask(place.output, place.cwds, while_training=True)
            return {node: answer.without(self._earlier.get(node)).checkpoints for node, answer in answers.items()}

        def copy_shards(checkpoint: str, copied: CheckpointCopy, over: threading.Event) -> None:
            self._copy(place, checkpoint, copied, over, SHARE)

        return ShardCopies(
            look, copy_shards, ranks=place.ranks, layout=place.layout, copies=copies, say=self._context.say
        ).running()

    def _ask(self, directory: str, cwds: Mapping[str, str | None], *, while_training: bool = False) -> dict[str, Saved]:
        most = 1 if while_training else _MOST_CHECKPOINTS
        request = {"schema": 1, "directory": directory, "most": most, "background": while_training}
        answers = self._context.agent.call_all(
            self._launch.cluster.nodes,
            "checkpoints",
            lambda node: request | {"cwd": cwds[node.name]},
            _CheckpointsThere,
            deadline_s=_ANSWER_S,
        )
        return {
            name: Saved(
                checkpoints=there.checkpoints,
                folder=there.folder,
                shared=there.device if is_network(there.filesystem) else None,
            )
            for name, there in answers.require().items()
        }

    def _prepare(self, start: Start) -> StoredRun:
        number = len(self._done) + 1
        environment = self._launch.environment
        variables = {
            _ATTEMPT: str(number),
            _ACCUMULATION: str(start.accumulation(self._job) or 1),
            **script_variables(self._job, start),
        }
        environment = msgspec.structs.replace(environment, env={**environment.env, **variables})
        job = resume_job(self._job, start)
        code = self._launch.code
        # What a script of an earlier attempt has written beside itself is there for the next one.
        code = code and msgspec.structs.replace(code, run_id=self._launch.run_id)
        launch = msgspec.structs.replace(
            self._launch,
            job=job,
            environment=environment,
            code=code,
            run_id=f"{self._launch.run_id}-{number}",
        )
        prepared = prepare(launch, self._context)
        begin = f"from {start.choice.name}" if start.choice.name is not None else "from the beginning"
        if number > 1:
            self._context.say(f"attempt {number} of {self._options.restarts + 1}, {begin}")
        words = batch_words(self._job, job, start)
        if words is not None:
            self._context.say(words)
        return prepared

    def _execute(self, prepared: StoredRun, start: Start) -> Launched:
        self._step = start.choice.step
        observe, number = self._context.observe, len(self._done) + 1

        def note_step(progress: RunProgress) -> None:
            self._is_stopped()
            self._step = max([self._step, *(node.step for node in progress.nodes if node.step is not None)])
            observe(msgspec.structs.replace(progress, attempt=number, attempts=self._options.restarts + 1))

        context = copy.copy(self._context)
        context.observe = note_step
        with self._copies(start):
            launched = run_prepared(self._launch, prepared, context)
        run = launched.run
        self._done.append(
            Attempt(
                run_id=run.run_id,
                status=run.status,
                started_s=run.started_s,
                ended_s=run.ended_s,
                checkpoint=start.choice.name,
                skipped=start.choice.skipped,
                world_size=launched.plan.world_size,
                left_out=self._left_out,
                global_batch=global_batch(resume_job(self._job, start), launched.plan.world_size),
                first_step=start.choice.step,
                last_step=self._step,
                first_failure=run.first_failure,
            )
        )
        return launched

    def _is_stopped(self) -> bool:
        stop = self._context.stop
        if not stop.count and self._directory is not None:
            order = self._directory.read(STOP_FILE, StopOrder)
            if order is not None:
                stop.ask("stop", order.grace_s)
        return stop.count > 0

    def _next_unless_stopped(self, plan: LaunchPlan) -> tuple[Start, StoredRun]:
        """Call `_next`; abandons it if a stop is requested."""
        outcome: list[tuple[Start, StoredRun] | BaseException] = []

        def find() -> None:
            try:
                outcome.append(self._next(plan))
            except BaseException as error:  # noqa: BLE001 - raised below
                outcome.append(error)

        thread = threading.Thread(target=find, name="next-attempt", daemon=True)
        thread.start()
        with self._context.stop.heard():
            while thread.is_alive() and not self._is_stopped():
                thread.join(_LOOK_S)
        if self._is_stopped():
            self._context.say = lambda _: None
            raise Interrupted(_ASKED)
        (result,) = outcome
        if isinstance(result, BaseException):
            raise result
        return result

    def _next(self, plan: LaunchPlan) -> tuple[Start, StoredRun]:
        """The next attempt, once nothing of the last one is left and the checks find nothing that would break it.

        Waits for a node that is unreachable or fails the checks; then leaves it out if enough remain.
        """
        wait_s = self._options.node_wait_s
        deadline = time.monotonic() + wait_s
        text = "waiting until the run has ended on every node"
        self._context.say(text)
        while True:
            try:
                absent = self._see_ended(plan, deadline)
                if not absent:
                    start = self._look()
                    return start, self._prepare(start)
            except (NodeError, NodeFailed) as error:
                if time.monotonic() >= deadline:
                    raise
                if str(error) != text:
                    text = str(error)
                    self._context.say(f"waiting: {text}")
                time.sleep(_WAIT_S)
            else:
                self._leave_out(absent)
                deadline = time.monotonic() + wait_s

    def _see_ended(self, plan: LaunchPlan, deadline: float) -> dict[str, NodeError]:
        """Verify on every node that nothing of the attempt is left.

        Returns:
            Unreachable nodes, each with the reason, after the deadline.
        """
        execute = self._launch.execute
        grace_s = execute.grace_s
        # Until then an unreachable node may still train.
        lease_over = time.monotonic() + (execute.lease_s or 0.0) + grace_s
        end = max(deadline, lease_over) if self._options.min_nodes is not None else deadline
        ranks = {place.node: place.node_rank for place in plan.places}

        def see(node: Node) -> NodeError | None:
            run_id = node_run_id(plan.run_id, ranks[node.name])
            while True:
                if self._context.stop.count:
                    raise Interrupted(_ASKED)
                try:
                    end_there = stop_on_node(self._context.agent, node, run_id, grace_s, answer_s=_ANSWER_S)
                    left = end_there.processes_left
                except NodeGone as error:
                    return error
                except NodeError as error:
                    if time.monotonic() >= end:
                        return error
                    time.sleep(_WAIT_S)
                    continue
                if left:
                    raise NodeFailed(f"processes of the run that are still running: {left}", node=node.name)
                return None

        nodes = self._launch.cluster.nodes
        left_s = max(0.0, end - time.monotonic())
        seen = gather(nodes, see, deadline_s=left_s + 2 * (grace_s + _ANSWER_S)).require()
        return {name: error for name, error in seen.items() if error is not None}

    def _leave_out(self, absent: Mapping[str, NodeError]) -> None:
        """Continue without these nodes."""
        if not absent:
            return
        kept = tuple(node for node in self._launch.cluster.nodes if node.name not in absent)
        name, error = next(iter(absent.items()))
        waited = f"it did not return within {format_duration(self._options.node_wait_s)}: {error.message}"
        if len(kept) < (self._options.min_nodes or self._first_nodes):
            raise NodeFailed(
                waited, node=name, hint="wait longer with --node-wait, or continue without it with --min-nodes"
            )
        if self._launch.execute.lease_s is None:
            raise NodeFailed(f"{waited}; the job has no lease, so it may still be training there", node=name)
        for node_name, why in absent.items():
            self._context.say(f"continuing without {node_name}: {why.message}")
        self._left_out = {**self._left_out, **{name: why.message for name, why in absent.items()}}
        self._launch = msgspec.structs.replace(
            self._launch, cluster=msgspec.structs.replace(self._launch.cluster, nodes=kept)
        )

    def _note_losses(self, launched: Launched, start: Start) -> None:
        last = self._done[-1]
        resumes = self._job.training is not None or start.choice.name is not None
        lost = max(0, last.last_step - start.choice.step) if resumes else None
        step = or_none(launched.summary.step_time_ms)
        took_s = lost * step.median.value / 1000 if lost is not None and step is not None else 0.0
        between_s = time.time() - (last.ended_s or time.time())
        self._done[-1] = msgspec.structs.replace(last, lost_steps=lost, lost_s=between_s + took_s)

    def _record(self, run: Run, directory: RunDirectory) -> Run:
        first = self._done[0].started_s if self._done else run.started_s
        run = msgspec.structs.replace(
            run,
            run_id=directory.run_id,
            started_s=first,
            attempts=tuple(self._done),
            part_of=self._part_of,
            has_parts=True,
        )
        directory.write("run.json", run)
        return run
