"""`multinode sweep`: a grid of a job's settings and of the cluster's, measured cell by cell."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, NoReturn

import typer

from multinode.cli.inputs import parse_option, read_cluster, read_job
from multinode.cli.options import (
    SCRIPT,
    Deadline,
    Hosts,
    JobFile,
    Json,
    PricesFile,
    ScriptCommand,
    Synthetic,
    TrainingOptions,
    Where,
    expand_options,
)
from multinode.cli.output import print_directory, print_document
from multinode.cli.running import open_context
from multinode.core.cluster.cluster import Cluster
from multinode.core.run.planning import LaunchOptions
from multinode.core.run.run import Run
from multinode.errors import UsageError
from multinode.launch.request import ExecuteOptions
from multinode.store.run_directory import RunDirectory, runs_root
from multinode.units import parse_duration

if TYPE_CHECKING:
    from multinode.core.grid.grid import Cell, Grid
    from multinode.core.job.job import Job
    from multinode.workflows.grid.sweep import Resume, Swept
    from multinode.workflows.grid.sweep_cell import AskedGrid

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command(
        cls=ScriptCommand,
        epilog="A script has no settings to go through, and its nodes and workers can be: multinode sweep --nodes 1,2 "
        "-- train.py",
    )(expand_options(sweep))


def sweep(
    ctx: typer.Context,
    *,
    job: JobFile = None,
    hosts: Hosts = None,
    set_: Settings = None,
    nodes: NodeCounts = None,
    workers_per_node: WorkerCounts = None,
    steps: Steps = None,
    minutes: Minutes = None,
    repeats: Repeats = 1,
    interleave: Interleave = True,
    synthetic: Synthetic = False,
    training: TrainingOptions,
    stall: StallStop = 300.0,
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
    from multinode.workflows.grid.sweep import Resume
    from multinode.workflows.grid.sweep_cell import AskedGrid, CellTraining

    if steps is not None and minutes is not None:
        raise UsageError("--steps and --minutes both say how long a cell trains", hint="give one of them")
    nodes_and_text = read_cluster(hosts)
    wish = GridWish(
        settings=set_ or [],
        deepspeed_edits=training.deepspeed_set or [],
        nodes=nodes,
        workers_per_node=workers_per_node,
        repeats=repeats,
        interleave=interleave,
    )
    of_grid = read_grid(job, ctx.meta[SCRIPT], wish, nodes_and_text[0])
    # Nobody looks on: a cell that hangs would hold up all the others.
    execute = ExecuteOptions(kind="sweep", stall_s=stall or None, on_stall="stop")
    asked = AskedGrid(
        launch=training.make_training(nodes_and_text, of_grid.plain, LaunchOptions(), execute),
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
    from multinode.core.grid.grid_state import retry_failed as again
    from multinode.report.grid.grid_progress import plan_lines
    from multinode.workflows.grid.sweep import require_plannable
    from multinode.workflows.grid.sweep_store import find_sweep, new_record

    require_plannable(asked)
    planned = new_record(asked)
    found = None if resume.anew else find_sweep(runs_root(), planned.fingerprint)
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
    from multinode.workflows.grid.sweep import find_finished
    from multinode.workflows.grid.sweep import sweep as measure
    from multinode.workflows.grid.sweep_table import build_table

    finished = find_finished(asked, runs_root(), resume)
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
    print_directory(swept.directory)
    typer.echo(f"sorted, filtered, priced, as a page: multinode table {name} -o {name}.html", err=True)
    raise typer.Exit(1 if failed else 0)


Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=A,B,...",
        help="Values of a key to go through; with one, it is set in every cell. Each is read as YAML: [a,b] is one "
        "value, and '\"a,b\"' a text with a comma. Repeatable.",
    ),
]
NodeCounts = Annotated[
    str | None,
    typer.Option(metavar="1,2,4", help="How many of the hostfile's first nodes, each in turn; else all."),
]
WorkerCounts = Annotated[
    str | None, typer.Option(metavar="1,2", help="Workers on each node, each number in turn; else its slots.")
]
Steps = Annotated[
    int | None,
    typer.Option(min=3, help="Steps that count in each run, warm-up apart (max_steps); else 30, or all there are."),
]
Minutes = Annotated[
    float | None,
    typer.Option(min=0.05, help="Train each run for so long instead, from its first step on, and then stop it."),
]
Repeats = Annotated[int, typer.Option(min=1, max=20, help="Measure each cell so often, for a spread.")]
Interleave = Annotated[
    bool,
    typer.Option("--interleave/--no-interleave", help="Repeat in turns, so that what drifts hits all cells alike."),
]
StallStop = Annotated[
    float,
    typer.Option(
        "--stall", min=0.0, metavar="SECONDS", help="End a run without a step or log on any node for so long; 0: never."
    ),
]
New = Annotated[bool, typer.Option("--new", help="Begin anew, though the same command has measured some or all of it.")]
RetryFailed = Annotated[
    bool, typer.Option("--retry-failed", help="Measure again what failed; what ran out of memory is not.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="List the cells and start nothing.")]
Sort = Annotated[
    str | None, typer.Option(metavar="COLUMN", help="Sort the table by this value; -COLUMN: the greatest first.")
]
Baseline = Annotated[
    str | None, typer.Option(metavar="CELL", help="The cell that the others are relative to; else the first.")
]
Form = Annotated[Literal["table", "markdown", "csv"], typer.Option("--format", help="How the table is shown.")]


class GridWish(NamedTuple):
    """What the command line asks of the grid; each is as its option has it."""

    settings: Sequence[str]
    deepspeed_edits: Sequence[str]
    nodes: str | None
    workers_per_node: str | None
    repeats: int
    interleave: bool


class GridJobs(NamedTuple):
    """The grid and what it is of: the job without what the grid varies, its cells, and their jobs by their labels."""

    plain: Job
    grid: Grid
    cells: tuple[Cell, ...]
    jobs: dict[str, Job]


def read_grid(path: Path | None, script: tuple[str, ...] | None, wish: GridWish, cluster: Cluster) -> GridJobs:
    """The grid of a YAML or a script over a cluster.

    Raises:
        UsageError: as `read_job`; a script has no keys; numbers of nodes or workers are none; a file that a setting
            names cannot be read, or a setting is wrong.
    """
    from multinode.core.grid.grid_plan import parse_axes, plan_grid

    axes = parse_axes(wish.settings)
    plain = read_job(path, script, list(axes) if script is not None else _fixed(axes), list(wish.deepspeed_edits))
    grid = _grid(axes, wish, len(cluster.nodes))
    cells = plan_grid(grid, cluster)
    return GridJobs(plain, grid, cells, _cell_jobs(plain, cells, axes, wish.deepspeed_edits))


def _grid(axes: Mapping[str, tuple[Any, ...]], wish: GridWish, there: int) -> Grid:
    """The grid of the axes that have more than one value; without `--nodes` on all nodes that are there."""
    from multinode.core.grid.grid import Grid
    from multinode.core.grid.grid_plan import parse_counts

    workers = wish.workers_per_node
    return Grid(
        settings={key: values for key, values in axes.items() if len(values) > 1},
        nodes=parse_counts("--nodes", wish.nodes) if wish.nodes is not None else (there,),
        workers_per_node=parse_counts("--workers-per-node", workers) if workers is not None else (None,),
        repeats=wish.repeats,
        interleave=wish.interleave,
    )


def _cell_jobs(
    plain: Job, cells: Sequence[Cell], axes: Mapping[str, Sequence[Any]], deepspeed_edits: Sequence[str]
) -> dict[str, Job]:
    """The job of each cell by its label, exactly as `launch` would make it of the same `--set`.

    A setting may name another file, a model or a DeepSpeed JSON; so each is read as a job of its own.
    """
    from multinode.core.grid.grid_plan import cell_overrides
    from multinode.core.job.deepspeed import parse_deepspeed_edits
    from multinode.core.job.job import ScriptJob
    from multinode.store.job import load_job

    if isinstance(plain, ScriptJob):
        return {cell.label: plain for cell in cells}
    path, edits = Path(plain.config_path), parse_deepspeed_edits(deepspeed_edits)
    made: dict[tuple[str, ...], Job] = {}
    for cell in cells:
        settings = cell_overrides(cell)
        if settings not in made:
            made[settings] = load_job(path, (*_fixed(axes), *settings), edits)
    return {cell.label: made[cell_overrides(cell)] for cell in cells}


def _fixed(axes: Mapping[str, Sequence[Any]]) -> list[str]:
    """What has one value, as `launch` takes it."""
    from multinode.core.grid.grid_plan import override_text

    return [override_text(key, values[0]) for key, values in axes.items() if len(values) == 1]


class TableLook(NamedTuple):
    """What the command line asks of the table; each is as `multinode table` has it."""

    sort: str | None = None
    where: list[str] | None = None
    baseline: str | None = None
    prices: Path | None = None
    deadline: str | None = None
    form: Literal["table", "markdown", "csv"] = "table"

    def require_fit(self, asked: AskedGrid, *, as_json: bool) -> None:
        """See that the table can be shown so, with the cells as they are before any of them is measured.

        Raises:
            UsageError: it cannot.
        """
        from multinode.analyse.grid.cell_table import Look
        from multinode.analyse.grid.cells import CellRow, CellTable
        from multinode.store.hostfile import load_prices
        from multinode.workflows.grid.sweep_table import View, show

        if as_json and self.form != "table":
            raise UsageError(f"--format {self.form} and --json both print on stdout", hint="give one of them")
        view = View(
            look=Look(baseline=None, sort=self.sort, where=tuple(self.where or ())),
            prices=load_prices(self.prices)[0] if self.prices is not None else None,
            deadline_s=parse_option("--deadline", self.deadline, parse_duration) if self.deadline else None,
        )
        rows = tuple(CellRow(label=cell.label, state="waiting", varied=cell.settings) for cell in asked.cells)
        show(CellTable(run_id="", job="", cells=rows), view)
        labels = [cell.label for cell in asked.cells]
        if self.baseline is not None and self.baseline not in labels:
            raise UsageError(f"--baseline {self.baseline}: there is no such cell", hint=f"one of {', '.join(labels)}")

    def show(self, run_id: str, *, as_json: bool) -> None:
        """The table of a sweep that was stored, on stdout; beside another baseline where the one has no speed."""
        try:
            self._show(run_id, self.baseline, as_json=as_json)
        except UsageError as error:
            if self.baseline is None:
                raise
            typer.echo(f"warning: --baseline: {error.message}; the first row that has a speed is taken", err=True)
            self._show(run_id, None, as_json=as_json)

    def _show(self, run_id: str, baseline: str | None, *, as_json: bool) -> None:
        from multinode.cli.table import table

        table(
            [run_id],
            sort=self.sort,
            where=self.where,
            baseline=baseline,
            prices=self.prices,
            deadline=self.deadline,
            form=None if as_json else self.form,
            output=None,
            as_json=as_json,
        )
