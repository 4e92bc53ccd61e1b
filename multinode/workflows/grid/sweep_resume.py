"""What a killed controller left of a sweep: the run that was under way is ended on its nodes, and judged.

A cell that trains for a time is judged by the time that its stored steps took, as nobody wrote down why it was stopped.
"""

from __future__ import annotations

from multinode.analyse.steps.summary import Summary
from multinode.analyse.steps.trained_time import trained_s
from multinode.core.grid.grid_outcome import Outcome, judge_run
from multinode.core.run.run import Run
from multinode.core.run.samples import parse_samples
from multinode.store.run_directory import RunDirectory
from multinode.units import format_duration
from multinode.workflows.run.attach import Known, find_known, stop
from multinode.workflows.run.context import Launched, RunContext
from multinode.workflows.run.launch import cleanup_nodes
from multinode.workflows.run.observe import summarise_run

__all__ = ["end_cut_off", "figures_lack"]

_GRACE_S = 10.0
_STOPPED = Outcome(state="stopped", reason="its controller was killed")
# How a node ends a job that would have gone on.
_FROM_OUTSIDE = frozenset({"stopped", "lease_expired"})


def end_cut_off(run_id: str, context: RunContext, limit_s: float | None = None) -> Outcome:
    """See that nothing of a run goes on, and take its figures if it had come to its end.

    A run with a time limit has come to its end once its steps fill that time, whether its controller stopped it or its
    lease ran out later: until then it trained undisturbed. All of its steps count. One that ended otherwise is made
    again, and why is said: without its controller nobody can tell how it would have ended in time.

    Args:
        run_id: the run.
        context: its nodes.
        limit_s: of training, after which it was to be stopped; None had it train its steps.

    Raises:
        NodeError: a node of it could not be asked.
        MultinodeError: another process follows it, and does not record its end.
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
        # How it ended without its controller says nothing about the cell, unless it ended well.
        outcome = _STOPPED
    if limit_s is not None and outcome.state == "stopped":
        outcome = _judge_by_time(launched, limit_s, context)
    cleanup_nodes(launched, known.cluster, context)
    return _STOPPED if outcome.unreachable else outcome


def figures_lack(launched: Launched) -> str | None:
    """Why a run has no speed that could stand in a table; None where it has."""
    summary = launched.summary
    if summary.step_time_ms is not None and summary.samples_per_s is not None:
        return None
    reasons = (summary.missing.get(name) for name in ("step_time_ms", "samples_per_s"))
    return next((reason for reason in reasons if reason), "it recorded no step that counts")


def _end(known: Known, context: RunContext) -> Launched:
    """The run as it ended; one that goes on is stopped."""
    if known.run.status == "running":
        context.say(f"run {known.run.run_id} was cut off: seeing that nothing of it goes on")
        return stop(known, context, _GRACE_S)
    directory = RunDirectory(known.directory)
    summary = directory.read("summary.json", Summary) or summarise_run(directory, known.plan)
    return Launched(run=known.run, summary=summary, plan=known.plan, directory=known.directory)


def _judge_by_time(launched: Launched, limit_s: float, context: RunContext) -> Outcome:
    """Of a run that was to be stopped after `limit_s`, and was stopped."""
    short = _short_of(launched, limit_s)
    if short is not None:
        context.say(f"run {launched.run.run_id} is made again: {short}")
        return _STOPPED
    context.say(f"run {launched.run.run_id} had trained for its {format_duration(limit_s)}, and counts")
    return judge_run(launched.run, in_time=True, lacks=figures_lack(launched))


def _short_of(launched: Launched, limit_s: float) -> str | None:
    """Why it is not known to have trained for so long; None where it has."""
    run = launched.run
    if run.status != "stopped":
        return f"without its controller it ended as {run.status}"
    for node in run.nodes:
        if node.cause not in _FROM_OUTSIDE:
            return f"{node.name}: nobody stopped it there ({(node.cause or node.state).replace('_', ' ')})"
        time_s = trained_s(parse_samples(RunDirectory(launched.directory).sample_lines(node.node_rank)))
        if time_s is None:
            return f"{node.name}: it stored too few steps to tell how long it trained"
        if time_s < limit_s:
            return f"{node.name}: it had trained for {format_duration(time_s)} of its {format_duration(limit_s)}"
    return None
