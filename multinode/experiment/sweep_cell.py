"""One cell of a sweep: its launch, one run of it, and how that ended. Stores no grid."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from multinode.check.rule import CheckFinding
from multinode.cluster.facts import NodeFacts
from multinode.contrast.measure import cut_job
from multinode.errors import Interrupted
from multinode.experiment.grid import Cell, Grid
from multinode.job.deepspeed import fit_batch
from multinode.job.job import Job, LlamaFactoryJob, limit_steps
from multinode.job.planning import with_workers, workers_of_nodes
from multinode.job.synthetic import with_synthetic
from multinode.launch.attach import Known, find_known, stop
from multinode.launch.context import Launch, Launched, Prepared, RunContext
from multinode.launch.launch import PATIENCE_S, benchmark_mode, prepare, run_prepared, wait_for_gpus
from multinode.launch.node_runs import cleanup_nodes
from multinode.launch.request import StopRequest
from multinode.launch.runs import summarise_run
from multinode.profile.summary import Summary
from multinode.profile.throughput import trained_s
from multinode.records.progress import RunProgress, TrainingTime
from multinode.records.run import Failure, NodeRun, Run, new_run
from multinode.records.run_directory import RunDirectory
from multinode.records.samples import parse_samples
from multinode.units import format_duration

_OUT_OF_MEMORY = {"out_of_gpu_memory": "gpu", "out_of_memory": "node"}
# What the others see when the kernel kills one of them, its data loader or its launcher.
_OF_KILLED_PEERS = frozenset({"killed", "connection", "timeout", "crashed"})


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one run of a cell."""

    state: str  # `measured`, `out_of_memory`, `failed`, or `stopped`: it was given up and says nothing
    out_of: str | None = None  # whose memory did not suffice: `gpu` or `node`
    reason: str = ""  # of all but `measured`, a sentence
    failure: Failure | None = None  # the run's first
    unreachable: bool = False  # a node could not be reached, or was lost
    held: bool = False  # somebody else computes on a GPU; like a node that is lost, it says nothing about the cell


def judge_run(run: Run, *, in_time: bool, lacks: str | None) -> Outcome:
    """What a run that has ended says about its cell.

    Args:
        run: what happened.
        in_time: whether it was stopped because its time was over, and so ended as it should.
        lacks: why it has no figures; None where it has.
    """
    if run.status == "succeeded" or (run.status == "stopped" and in_time):
        if lacks is None:
            return Outcome(state="measured")
        return Outcome(state="failed", reason=f"{lacks}: use more --minutes" if in_time else lacks)
    if run.status in {"stopped", "running"}:
        return Outcome(state="stopped", reason="it was stopped")
    failure = run.first_failure
    kind = failure.kind if failure is not None else None
    killed = _killed_by_kernel(run)
    if killed is not None and _may_be_killed(failure):
        reason = f"{killed.name}: the kernel killed {_processes(killed)} because memory ran out"
        return Outcome(state="out_of_memory", out_of="node", reason=reason, failure=failure)
    if kind in _OUT_OF_MEMORY and failure is not None:
        return Outcome(state="out_of_memory", out_of=_OUT_OF_MEMORY[kind], reason=_sentence(failure), failure=failure)
    reason = _sentence(failure) if failure is not None else f"the run ended as {run.status}"
    return Outcome(
        state="failed", reason=reason, failure=failure, unreachable=run.status == "lost", held=kind == "gpu_held"
    )


def _killed_by_kernel(run: Run) -> NodeRun | None:
    return next((node for node in run.nodes if node.oom_kills), None)


def _may_be_killed(failure: Failure | None) -> bool:
    """Whether a kill by the kernel can have caused it: an exception that tells another cause has that cause.

    The kernel's count may be of the whole machine, where others run out of memory, too.
    """
    if failure is None or failure.kind in _OF_KILLED_PEERS or failure.signal == "SIGKILL":
        return True
    return failure.kind is None and failure.signal is not None


def _processes(node: NodeRun) -> str:
    return "a process" if node.oom_kills == 1 else f"{node.oom_kills} processes"


def _sentence(failure: Failure) -> str:
    first = failure.message.strip().splitlines()
    return f"{failure.node}: {first[0] if first else 'it failed'}"


_S_PER_MINUTE = 60


class CellTraining(msgspec.Struct, frozen=True, kw_only=True):
    """How each cell is trained."""

    steps: int | None = None  # measured steps per run, after the warm-up; None uses 30, or all of the job
    minutes: float | None = None  # training time per run instead, including the warm-up
    synthetic: bool = False  # whether to use synthetic data


class AskedGrid(msgspec.Struct, frozen=True, kw_only=True):
    """The grid to measure."""

    launch: Launch  # all nodes of the hostfile, and the layout of each cell; its job is replaced by the cell's
    job: Job  # the user's, without the settings of the grid
    grid: Grid
    cells: tuple[Cell, ...]  # of the grid, in its order
    jobs: dict[str, Job]  # the user's job with the settings of each cell, by label
    training: CellTraining = CellTraining()  # duration and data


class CellRun(msgspec.Struct, frozen=True, kw_only=True):
    """A finished run of a cell."""

    launched: Launched
    in_time: bool = False  # whether it was stopped at its time limit


def cell_workers(asked: AskedGrid, cell: Cell, facts: Mapping[str, NodeFacts]) -> tuple[int, ...]:
    """Workers of each node of a cell; `facts` may be empty where the hostfile says it."""
    return workers_of_nodes(asked.launch.cluster.first(cell.nodes), facts, cell.workers_per_node)


def cell_launch(asked: AskedGrid, cell: Cell, workers: Sequence[int]) -> Launch:
    """The launch that measures a cell, for its figures alone."""
    what = asked.launch
    job = _cut(asked.jobs[cell.label], asked.training)
    if isinstance(job, LlamaFactoryJob):
        job = fit_batch(job, sum(workers))
    if asked.training.synthetic:
        job = with_synthetic(job)
    cluster, options = with_workers(what.cluster.first(cell.nodes), what.options, workers)
    return benchmark_mode(msgspec.structs.replace(what, cluster=cluster, job=job, options=options))


def measure_cell(
    what: Launch, context: RunContext, minutes: float | None = None, *, patience_s: float = PATIENCE_S
) -> CellRun:
    """One run on free GPUs, removed from the nodes afterwards; a failed run is a result.

    Args:
        what: the launch.
        context: the nodes.
        minutes: training time before it is stopped; None trains its steps.
        patience_s: maximum wait for busy GPUs.

    Raises:
        UsageError, NodeError, NodeFailed: it could not be prepared.
        Interrupted: the user stopped it before it started.
    """
    prepared = prepare(what, context)
    held = wait_for_gpus(prepared, context, patience_s=patience_s)
    if context.stop.count:
        raise Interrupted("interrupted")
    if held is not None:
        return CellRun(launched=_refuse(prepared, held))
    limited, timed = (context, None) if minutes is None else with_time_limit(context, minutes * _S_PER_MINUTE)
    with context.stop.heard():
        launched = run_prepared(prepared, limited)
    cleanup_nodes(launched, what.cluster, context)
    return CellRun(launched=launched, in_time=timed is not None and timed.is_over)


def _cut(job: Job, training: CellTraining) -> Job:
    if training.minutes is None:
        return cut_job(job, training.steps)
    # It must not end before its time.
    return limit_steps(job, STEPS_WITHOUT_END) if isinstance(job, LlamaFactoryJob) else job


def _refuse(prepared: Prepared, held: CheckFinding) -> Launched:
    plan, now_s = prepared.plan, time.time()
    run = new_run(plan, now_s)
    nodes = tuple(msgspec.structs.replace(node, state="ended", cause="not_started") for node in run.nodes)
    where = next((node for node in nodes if node.name == held.node), nodes[0])
    run = msgspec.structs.replace(
        run,
        status="failed",
        ended_s=now_s,
        nodes=nodes,
        first_failure=Failure(
            node=where.name, node_rank=where.node_rank, message=held.message, hint=held.hint, kind="gpu_held"
        ),
        kind=prepared.what.execute.kind,
    )
    prepared.directory.write("run.json", run)
    nothing = Summary(run_id=plan.run_id, steps=0, steady_steps=0, rule="")
    return Launched(run=run, summary=nothing, plan=plan, directory=prepared.directory)


STEPS_WITHOUT_END = 1_000_000
"""Steps of a training that ends only by its time limit."""


class TimedStop:
    """Watches the progress of one run, and stops it at its time limit.

    The time starts with the first step of any node, after loading and the first compilation.

    Args:
        user: the user's stop request, which is passed on.
        limit_s: of training.
        clock: monotonic seconds.
    """

    def __init__(self, user: StopRequest, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.stop = StopRequest()
        self._user = user
        self._limit_s = limit_s
        self._clock = clock
        self._passed_on = 0
        self._began: float | None = None
        # Whether the run was stopped at its limit; a user's stop afterwards does not change that.
        self.is_over = False

    def look(self, progress: RunProgress) -> None:
        """Update the progress, and stop the run if its time is up."""
        while self._passed_on < self._user.count:
            self._passed_on += 1
            self.stop.ask(self._user.reason)
        if self._began is None and any(node.step for node in progress.nodes):
            self._began = self._clock()
        if self._trained_s >= self._limit_s and self._began is not None and not self.stop.count:
            self.is_over = True
            self.stop.ask("its time is up")

    def show(self, progress: RunProgress) -> RunProgress:
        """The progress by time, without the nominal number of steps."""
        nodes = tuple(
            msgspec.structs.replace(node, total_steps=None) if node.total_steps == STEPS_WITHOUT_END else node
            for node in progress.nodes
        )
        training = TrainingTime(limit_s=self._limit_s, trained_s=self._trained_s)
        return msgspec.structs.replace(progress, nodes=nodes, training=training)

    @property
    def _trained_s(self) -> float:
        return 0.0 if self._began is None else self._clock() - self._began


def with_time_limit(context: RunContext, limit_s: float) -> tuple[RunContext, TimedStop]:
    """The run context with a time limit, and its stop."""
    timed = TimedStop(context.stop, limit_s)
    limited = context.with_stop(timed.stop)

    def observe(progress: RunProgress) -> None:
        timed.look(progress)
        context.observe(timed.show(progress))

    limited.observe = observe
    return limited, timed


_GRACE_S = 10.0
_STOPPED = Outcome(state="stopped", reason="its controller was killed")
# How a node ends a job that would have continued.
_FROM_OUTSIDE = frozenset({"stopped", "lease_expired"})


def end_cut_off(run_id: str, context: RunContext, limit_s: float | None = None) -> Outcome:
    """Make sure that an interrupted run has ended, and use its figures if it was complete.

    A run with a time limit is complete once its steps fill that time, whether its controller or its lease stopped it.
    Otherwise it is repeated, and the reason is reported.

    Args:
        run_id: the run.
        context: its nodes.
        limit_s: its training time; None if it had to train its steps.
    """
    directory = RunDirectory(context.runs / run_id)
    run = directory.read("run.json", Run)
    if run is None:
        # It was being prepared, and nothing had been started.
        return _STOPPED
    known = find_known(context.runs, run_id)
    launched = _end(known, context)
    outcome = judge_run(launched.run, in_time=False, lacks=figures_lack(launched))
    if run.status == "running" and outcome.state != "measured":
        # An end without its controller says nothing about the cell, unless it succeeded.
        outcome = _STOPPED
    if limit_s is not None and outcome.state == "stopped":
        outcome = _judge_by_time(launched, limit_s, context)
    cleanup_nodes(launched, known.cluster, context)
    return _STOPPED if outcome.unreachable else outcome


def figures_lack(launched: Launched) -> str | None:
    """Why a run has no usable speed; None if it has."""
    summary = launched.summary
    if summary.step_time_ms is not None and summary.samples_per_s is not None:
        return None
    reasons = (summary.missing.get(name) for name in ("step_time_ms", "samples_per_s"))
    return next((reason for reason in reasons if reason), "it recorded no measured step")


def _end(known: Known, context: RunContext) -> Launched:
    if known.run.status == "running":
        context.say(f"run {known.run.run_id} was interrupted: making sure that nothing of it is still running")
        return stop(known, context, _GRACE_S)
    directory = known.directory
    summary = directory.read("summary.json", Summary) or summarise_run(directory, known.plan)
    return Launched(run=known.run, summary=summary, plan=known.plan, directory=known.directory)


def _judge_by_time(launched: Launched, limit_s: float, context: RunContext) -> Outcome:
    """The outcome of a run that was to be stopped after `limit_s`, and was stopped."""
    short = _short_of(launched, limit_s)
    if short is not None:
        context.say(f"repeating run {launched.run.run_id}: {short}")
        return _STOPPED
    context.say(f"run {launched.run.run_id} trained for its {format_duration(limit_s)} and is valid")
    return judge_run(launched.run, in_time=True, lacks=figures_lack(launched))


def _short_of(launched: Launched, limit_s: float) -> str | None:
    run = launched.run
    if run.status != "stopped":
        return f"without its controller it ended as {run.status}"
    for node in run.nodes:
        if node.cause not in _FROM_OUTSIDE:
            return f"{node.name}: it was not stopped there ({(node.cause or node.state).replace('_', ' ')})"
        time_s = trained_s(parse_samples(launched.directory.sample_lines(node.node_rank)))
        if time_s is None:
            return f"{node.name}: too few steps are stored to know how long it trained"
        if time_s < limit_s:
            return f"{node.name}: it trained for {format_duration(time_s)} of {format_duration(limit_s)}"
    return None
