"""contrast: the same job on one node and on many, measured in turns, compared, and its outlook. Prints nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from multinode.analyse.comparison.contrast import SideRun, Terms, compare, make_side
from multinode.analyse.comparison.contrast_figures import Contrast
from multinode.analyse.prediction.forecast import ForecastRequest
from multinode.analyse.run.steady import steps_to_run
from multinode.core.job.deepspeed_edit import fit_batch
from multinode.core.job.job import Job, LlamaFactoryJob, limit_steps, override_job
from multinode.core.run.planning import workers_per_node
from multinode.core.run.run import Run
from multinode.errors import MultinodeError, UsageError
from multinode.store.run_directory import RunDirectory
from multinode.workflows.advice.advise import advise_runs
from multinode.workflows.comparison.compare import load_side_run
from multinode.workflows.comparison.sides import PlannedSide, Sides, Wish, interleaved, plan_sides
from multinode.workflows.prediction.predict import forecast_runs
from multinode.workflows.run.context import Launch, Launched, RunContext
from multinode.workflows.run.launch import (
    cleanup_nodes,
    launch,
    make_run_id,
    measured_only,
    probe_nodes,
    require_success,
    same_threads,
)

__all__ = ["Contrasted", "contrast", "cut_job"]

_FILE = "contrast.json"
_STEPS = 30
_ACCUMULATION = "gradient_accumulation_steps"


class Contrasted(msgspec.Struct, frozen=True, kw_only=True):
    """A contrast that was measured.

    Attributes:
        directory: where it lies; its sides' runs lie beside it.
    """

    contrast: Contrast
    directory: Path


class _Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One side that was measured once."""

    side: PlannedSide
    launched: Launched
    measured: SideRun


def contrast(what: Launch, context: RunContext, wish: Wish, *, repeats: int = 1) -> Contrasted:
    """Measure every side so many times, in turns, and compare.

    What was measured before it failed or the user stopped it is compared all the same, if each side was measured once.

    Raises:
        UsageError: the hostfile or the mode does not allow it.
        RunFailed: a run did not end well; its directory has everything.
        Interrupted: the user stopped it.
    """
    sides = plan_sides(what.cluster, _slots(what, context), _with_accumulation(wish, what))
    run_id = what.run_id or make_run_id()
    context.say(f"{sides.mode}: {sides.why}")
    what = _comparable(what, sides, context)
    turns: list[_Turn] = []
    try:
        _measure_all(what, context, list(interleaved(sides.sides, repeats)), turns, run_id)
    except MultinodeError:
        if {turn.side.label for turn in turns} == {side.label for side in sides.sides}:
            kept = _conclude(what, context, sides, turns, run_id)
            context.say(f"what was measured before is compared in {kept.directory}")
        raise
    return _conclude(what, context, sides, turns, run_id)


def cut_job(job: Job, steps: int | None, *, whole: bool = False) -> Job:
    """The job with no more steps than are measured.

    Args:
        job: the job; a script makes as many steps as its own arguments say.
        steps: that count, warm-up apart; None takes 30, or all that it has.
        whole: whether it is trained to its end.

    Raises:
        UsageError: it cannot be cut so.
    """
    if whole and steps is not None:
        raise UsageError("--whole trains all steps, and --steps some", hint="leave one of them out")
    if not isinstance(job, LlamaFactoryJob):
        if steps is not None:
            raise UsageError("--steps sets max_steps of a YAML job", hint="give the script its own arguments")
        return job
    asked, wanted = job.config.get("max_steps"), steps_to_run(steps or _STEPS)
    if whole or (steps is None and isinstance(asked, int) and 0 < asked <= wanted):
        return job
    return limit_steps(job, wanted)


def _slots(what: Launch, context: RunContext) -> Sequence[int]:
    """Workers that each node can have: as the hostfile has it, else as many as the node has GPUs."""
    nodes = what.cluster.nodes
    told = all(node.slots is not None or node.gpus is not None for node in nodes)
    facts = {} if told else probe_nodes(what, context.agent)
    return [workers_per_node(msgspec.structs.replace(what.cluster, nodes=(node,)), facts, None) for node in nodes]


def _comparable(what: Launch, sides: Sides, context: RunContext) -> Launch:
    """For its figures alone, and with as many threads a worker on all sides."""
    threaded = same_threads(what, [side.workers for side in sides.sides])
    if threaded != what:
        context.say("OMP_NUM_THREADS=1 on every side: torchrun gives a worker that is alone on its node more threads")
    return measured_only(threaded)


def _with_accumulation(wish: Wish, what: Launch) -> Wish:
    if not isinstance(what.job, LlamaFactoryJob):
        return wish
    asked = what.job.config.get(_ACCUMULATION, 1)
    return msgspec.structs.replace(wish, accumulation=asked if isinstance(asked, int) and asked > 0 else None)


def _measure_all(
    what: Launch, context: RunContext, order: Sequence[tuple[int, PlannedSide]], turns: list[_Turn], run_id: str
) -> None:
    """Measure in this order; what was measured is in `turns` whatever happens."""
    repeats = order[-1][0]
    for number, (turn, side) in enumerate(order, 1):
        context.say(f"[{number}/{len(order)}] {side.label}: {side.description}")
        ending = f"-{turn}" if repeats > 1 else ""
        launched = _measure(what, context, side, f"{run_id}-{side.label}{ending}")
        measured = load_side_run(RunDirectory(launched.directory))
        # One that has no speed to compare is told before the others are measured for nothing.
        make_side(side.role, [measured])
        turns.append(_Turn(side=side, launched=launched, measured=measured))


def _measure(what: Launch, context: RunContext, side: PlannedSide, run_id: str) -> Launched:
    options = msgspec.structs.replace(what.options, workers_per_node=side.workers)
    job = what.job
    if isinstance(job, LlamaFactoryJob):
        if side.accumulation is not None:
            job = override_job(job, {_ACCUMULATION: side.accumulation})
        job = fit_batch(job, side.workers * len(side.cluster.nodes))
    launched = launch(
        msgspec.structs.replace(what, cluster=side.cluster, options=options, job=job, run_id=run_id), context
    )
    require_success(launched, context)
    cleanup_nodes(launched, side.cluster, context)
    return launched


def _conclude(what: Launch, context: RunContext, sides: Sides, turns: Sequence[_Turn], run_id: str) -> Contrasted:
    measured = [
        make_side(side.role, [turn.measured for turn in turns if turn.side.label == side.label]) for side in sides.sides
    ]
    last = next(turn.launched for turn in reversed(turns) if turn.side.role == "candidate")
    terms = Terms(mode=sides.mode, why=sides.why, job=last.plan.job, rule=last.summary.rule)
    compared = compare(measured, terms)
    directory = _keep(what, context, run_id, compared, turns)
    compared = _with_outlook(compared, context.runs)
    directory.write(_FILE, compared)
    return Contrasted(contrast=compared, directory=directory.path)


def _with_outlook(compared: Contrast, runs: Path) -> Contrast:
    """What other networks and settings would give; that it cannot be told leaves what was measured as good as it is."""
    candidate = compared.candidate
    names = [*compared.baseline.run_ids, *candidate.run_ids]
    accumulation = candidate.settings.accumulation if candidate.settings is not None else None
    request = ForecastRequest(
        nodes=(1, candidate.nodes, 2 * candidate.nodes),
        accumulations=() if accumulation is None else (accumulation, 4 * accumulation),
    )
    try:
        return msgspec.structs.replace(
            compared, forecast=forecast_runs(runs, names, request), advice=advise_runs(runs, names).advice
        )
    except MultinodeError as error:
        return msgspec.structs.replace(compared, forecast_reason=error.message)


def _keep(what: Launch, context: RunContext, run_id: str, compared: Contrast, turns: Sequence[_Turn]) -> RunDirectory:
    """Store the contrast as a run of its own, so that it is listed with the others."""
    directory = RunDirectory.create(context.runs, run_id)
    first = turns[0].launched.run
    widest = max((turn.launched.run for turn in turns), key=lambda run: len(run.nodes))
    directory.write_cluster(what.cluster, what.hostfile)
    directory.write(_FILE, compared)
    directory.write(
        "run.json",
        Run(
            run_id=run_id,
            job=compared.job,
            engine=widest.engine,
            status="succeeded",
            started_s=first.started_s,
            ended_s=turns[-1].launched.run.ended_s,
            world_size=widest.world_size,
            nodes=widest.nodes,
            kind="contrast",
        ),
    )
    return directory
