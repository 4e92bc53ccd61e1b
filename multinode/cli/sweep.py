"""`multinode sweep`: a grid of a job's settings and of the cluster's, measured cell by cell."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from multinode.cli.options import (
    AccelerateConfig,
    Check,
    Deadline,
    DeepspeedSet,
    EngineName,
    GradCompress,
    Hosts,
    JobFile,
    Json,
    MasterPort,
    Prelude,
    PricesFile,
    Synthetic,
    Variables,
    Where,
)
from multinode.cli.script_command import SCRIPT, ScriptCommand
from multinode.cli.sweep_options import (
    Baseline,
    DryRun,
    Form,
    Interleave,
    Minutes,
    New,
    NodeCounts,
    Repeats,
    RetryFailed,
    Settings,
    Sort,
    StallStop,
    Steps,
    WorkerCounts,
)
from multinode.errors import UsageError

if TYPE_CHECKING:
    from multinode.workflows.grid.sweep import Resume, Swept
    from multinode.workflows.grid.sweep_cell import AskedGrid

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command(
        cls=ScriptCommand,
        epilog="A script has no settings to go through, and its nodes and workers can be: multinode sweep --nodes 1,2 "
        "-- train.py",
    )(sweep)


def sweep(
    ctx: typer.Context,
    job: JobFile = None,
    hosts: Hosts = None,
    set_: Settings = None,
    nodes: NodeCounts = None,
    workers_per_node: WorkerCounts = None,
    steps: Steps = None,
    minutes: Minutes = None,
    repeats: Repeats = 1,
    interleave: Interleave = True,
    deepspeed_set: DeepspeedSet = None,
    synthetic: Synthetic = False,
    grad_compress: GradCompress = None,
    engine: EngineName = None,
    accelerate_config: AccelerateConfig = None,
    env: Variables = None,
    prelude: Prelude = None,
    master_port: MasterPort = 29500,
    stall: StallStop = 300.0,
    check: Check = True,
    new: New = False,
    retry_failed: RetryFailed = False,
    dry_run: DryRun = False,
    sort: Sort = None,
    where: Where = None,
    baseline: Baseline = None,
    prices: PricesFile = None,
    deadline: Deadline = None,
    form: Form = "table",
    as_json: Json = False,
) -> None:
    """Measure a job over a grid of settings, nodes and workers; interrupted, the same command goes on."""
    from multinode.cli.inputs import read_cluster, read_engine, read_job_environment
    from multinode.cli.sweep_jobs import GridWish, read_grid
    from multinode.cli.sweep_look import TableLook
    from multinode.core.run.planning import LaunchOptions
    from multinode.launch.request import ExecuteOptions
    from multinode.workflows.grid.sweep import Resume
    from multinode.workflows.grid.sweep_cell import AskedGrid, CellTraining
    from multinode.workflows.run.context import Launch

    if steps is not None and minutes is not None:
        raise UsageError("--steps and --minutes both say how long a cell trains", hint="give one of them")
    cluster, text = read_cluster(hosts, None)
    wish = GridWish(
        settings=set_ or [],
        deepspeed_edits=deepspeed_set or [],
        nodes=nodes,
        workers_per_node=workers_per_node,
        repeats=repeats,
        interleave=interleave,
    )
    of_grid = read_grid(job, ctx.meta[SCRIPT], wish, cluster)
    options = LaunchOptions(
        master_port=master_port,
        grad_compress=grad_compress,
        engine=read_engine(of_grid.plain, engine, accelerate_config),
        environment=read_job_environment(env, prelude),
    )
    # Nobody looks on: a cell that hangs would hold up all the others.
    execute = ExecuteOptions(kind="sweep", stall_s=stall or None, on_stall="stop")
    asked = AskedGrid(
        launch=Launch(cluster=cluster, hostfile=text, job=of_grid.plain, options=options, execute=execute, check=check),
        job=of_grid.plain,
        grid=of_grid.grid,
        cells=of_grid.cells,
        jobs=of_grid.jobs,
        training=CellTraining(steps=steps, minutes=minutes, synthetic=synthetic),
    )
    look = TableLook(sort=sort, where=where, baseline=baseline, prices=prices, deadline=deadline, form=form)
    look.require_fit(asked, as_json=as_json)
    if dry_run:
        _print_plan(asked, Resume(anew=new, retry_failed=retry_failed), as_json=as_json)
        return
    swept = _carry_out(asked, Resume(anew=new, retry_failed=retry_failed))
    look.show(swept.directory.name, as_json=as_json)
    _tell_end(swept)


def _print_plan(asked: AskedGrid, resume: Resume, *, as_json: bool) -> None:
    """The cells in the order in which they would be measured; of an earlier sweep that would go on, how far it is."""
    from multinode.cli.output import print_document
    from multinode.core.grid.grid_state import retry_failed as again
    from multinode.report.grid.grid_progress import plan_lines
    from multinode.store.run_directory import runs_root
    from multinode.workflows.grid.sweep import require_plannable
    from multinode.workflows.grid.sweep_store import find_sweep, new_record

    require_plannable(asked)
    planned = new_record(asked)
    found = None if resume.anew else find_sweep(runs_root(dict(os.environ), Path.cwd()), planned.fingerprint)
    if found is not None:
        directory, planned = found
        planned = again(planned) if resume.retry_failed else planned
        typer.echo(f"sweep {directory.run_id} is of the same command, which goes on with it", err=True)
    if as_json:
        print_document(planned)
        return
    for line in plan_lines(planned):
        typer.echo(line)


def _carry_out(asked: AskedGrid, resume: Resume) -> Swept:
    """Measure what is left; where nothing is, no node is asked."""
    from multinode.cli.running import open_context
    from multinode.core.run.run import Run
    from multinode.store.run_directory import RunDirectory, runs_root
    from multinode.workflows.grid.sweep import find_finished
    from multinode.workflows.grid.sweep import sweep as measure
    from multinode.workflows.grid.sweep_table import build_table

    finished = find_finished(asked, runs_root(dict(os.environ), Path.cwd()), resume)
    if finished is not None:
        run = RunDirectory(finished.directory).read("run.json", Run)
        ended_s = run.ended_s if run is not None else None
        until = "" if ended_s is None else time.strftime(", until %Y-%m-%d %H:%M", time.localtime(ended_s))
        typer.echo(
            f"sweep {finished.directory.name} measured it already{until}; --new measures all of it anew, "
            "as after a change of the network, --retry-failed what failed",
            err=True,
        )
        build_table(RunDirectory(finished.directory), finished.directory.parent)
        return finished
    with open_context(asked.launch.cluster.first(max(asked.grid.nodes))) as context:
        return measure(asked, context, resume, build_table)


def _tell_end(swept: Swept) -> NoReturn:
    """Where everything lies, and whether all went well, as an exit code says it to a script."""
    from multinode.report.grid.grid_progress import end_line

    failed = [cell for cell in swept.record.cells if cell.state == "failed"]
    for cell in failed:
        typer.echo(end_line(cell, None), err=True)
    if failed:
        typer.echo("to measure them again: the same command with --retry-failed", err=True)
    name = swept.directory.name
    typer.echo(f"everything of it: {swept.directory}", err=True)
    typer.echo(f"sorted, filtered, priced, as a page: multinode table {name} -o {name}.html", err=True)
    raise typer.Exit(1 if failed else 0)
