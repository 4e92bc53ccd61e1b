"""One cell of a sweep: the launch that it is, and one run of it on the nodes. Prints nothing, and keeps no grid."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from multinode.analyse.steps.summary import Summary
from multinode.core.check.finding import Finding
from multinode.core.cluster.facts import NodeFacts
from multinode.core.grid.grid import Cell, Grid
from multinode.core.job.deepspeed_edit import fit_batch
from multinode.core.job.job import Job, LlamaFactoryJob, limit_steps
from multinode.core.run.planning import workers_per_node
from multinode.core.run.run import Failure, NodeRun, Run
from multinode.core.run.synthetic import with_synthetic
from multinode.errors import Interrupted
from multinode.store.run_directory import RunDirectory
from multinode.workflows.comparison.contrast import cut_job
from multinode.workflows.grid.timed_stop import STEPS_WITHOUT_END, with_time_limit
from multinode.workflows.run.context import Launch, Launched, Prepared, RunContext
from multinode.workflows.run.free_gpus import PATIENCE_S, wait_for_gpus
from multinode.workflows.run.launch import cleanup_nodes, measured_only, prepare, run_prepared

__all__ = ["AskedGrid", "CellRun", "CellTraining", "cell_launch", "cell_workers", "measure_cell"]

_S_PER_MINUTE = 60


class CellTraining(msgspec.Struct, frozen=True, kw_only=True):
    """How each cell is trained.

    Attributes:
        steps: that count in each run, warm-up apart; None takes 30, or all that the job has.
        minutes: of training in each run instead, warm-up among it.
        synthetic: whether the data are made up.
    """

    steps: int | None = None
    minutes: float | None = None
    synthetic: bool = False


class AskedGrid(msgspec.Struct, frozen=True, kw_only=True):
    """A grid that is to be measured.

    Attributes:
        launch: all nodes of the hostfile, and how each cell is laid out; its job is replaced by the cell's.
        job: the user's, without what the grid sets.
        cells: of the grid, in its order.
        jobs: of each cell, by its label: the user's job with what the cell sets.
        training: how long, and on which data.
    """

    launch: Launch
    job: Job
    grid: Grid
    cells: tuple[Cell, ...]
    jobs: dict[str, Job]
    training: CellTraining = CellTraining()


class CellRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run of a cell that has ended.

    Attributes:
        in_time: whether it was stopped because its time was over.
    """

    launched: Launched
    in_time: bool = False


def cell_workers(asked: AskedGrid, cell: Cell, facts: Mapping[str, NodeFacts]) -> int:
    """Workers on each node of a cell; `facts` may be empty where the hostfile says it.

    Raises:
        UsageError: the nodes have unequal slots.
    """
    return workers_per_node(asked.launch.cluster.first(cell.nodes), facts, cell.workers_per_node)


def cell_launch(asked: AskedGrid, cell: Cell, workers: int, run_id: str | None = None) -> Launch:
    """The launch that measures a cell, for its figures alone.

    Raises:
        UsageError: its job cannot be cut, or trained on made-up data.
        JobError: its DeepSpeed JSON cannot be fitted.
    """
    what = asked.launch
    job = _cut(asked.jobs[cell.label], asked.training)
    if isinstance(job, LlamaFactoryJob):
        job = fit_batch(job, workers * cell.nodes)
    if asked.training.synthetic:
        job = with_synthetic(job)
    options = msgspec.structs.replace(what.options, workers_per_node=workers)
    cluster = what.cluster.first(cell.nodes)
    return measured_only(msgspec.structs.replace(what, cluster=cluster, job=job, options=options, run_id=run_id))


def measure_cell(
    what: Launch, context: RunContext, minutes: float | None = None, *, patience_s: float = PATIENCE_S
) -> CellRun:
    """One run on free GPUs, of which nothing stays on the nodes; a run that fails is a result.

    Args:
        what: the launch.
        context: the nodes.
        minutes: of training, after which it is stopped; None has it train its steps.
        patience_s: how long GPUs that are held are waited for.

    Raises:
        UsageError, NodeError, NodeFailed: it could not be prepared.
        Interrupted: the user asked to stop before it began.
    """
    prepared = prepare(what, context)
    held = wait_for_gpus(prepared, context, patience_s=patience_s)
    if context.stop.count:
        raise Interrupted("interrupted")
    if held is not None:
        return CellRun(launched=_refuse(prepared, held))
    if minutes is None:
        run = CellRun(launched=run_prepared(prepared, context))
    else:
        limited, timed = with_time_limit(context, minutes * _S_PER_MINUTE)
        launched = run_prepared(prepared, limited)
        run = CellRun(launched=launched, in_time=timed.is_over)
    cleanup_nodes(run.launched, what.cluster, context)
    return run


def _cut(job: Job, training: CellTraining) -> Job:
    if training.minutes is None:
        return cut_job(job, training.steps)
    # It must not end before its time.
    return limit_steps(job, STEPS_WITHOUT_END) if isinstance(job, LlamaFactoryJob) else job


def _refuse(prepared: Prepared, held: Finding) -> Launched:
    """A run that never began, recorded so that it is listed with its reason."""
    plan, now_s = prepared.plan, time.time()
    nodes = tuple(
        NodeRun(name=node.node, node_rank=node.node_rank, state="ended", cause="not_started") for node in plan.nodes
    )
    where = next((node for node in nodes if node.name == held.node), nodes[0])
    run = Run(
        run_id=plan.run_id,
        job=plan.job,
        engine=plan.engine,
        status="failed",
        started_s=now_s,
        ended_s=now_s,
        world_size=plan.world_size,
        nodes=nodes,
        first_failure=Failure(
            node=where.name, node_rank=where.node_rank, message=held.message, hint=held.hint, kind="gpu_held"
        ),
        kind=prepared.what.execute.kind,
    )
    RunDirectory(prepared.directory).write("run.json", run)
    nothing = Summary(run_id=plan.run_id, steps=0, steady_steps=0, rule="")
    return Launched(run=run, summary=nothing, plan=plan, directory=prepared.directory)
