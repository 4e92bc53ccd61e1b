"""`multinode sweep`: a grid of a job's settings and of the cluster's, measured cell by cell."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import msgspec
import typer

from multinode.cli.inputs import TrainingInput, read_training
from multinode.cli.options import (
    Check,
    Fresh,
    HangTimeout,
    Hosts,
    JobWords,
    Json,
    OnHang,
    Overrides,
    ScriptCommand,
    Synthetic,
    TrainingOptions,
    expand_options,
)
from multinode.cli.output import note, print_directory, print_document
from multinode.cli.panels import examples
from multinode.cli.running import open_context
from multinode.cli.table import FormOptions, ViewOptions
from multinode.errors import UsageError
from multinode.job.job import ScriptJob
from multinode.job.launch_options import LaunchOptions
from multinode.launch.context import ExecuteOptions
from multinode.records.run import Run
from multinode.records.run_directory import RunDirectory, runs_root

if TYPE_CHECKING:
    from multinode.experiment.sweep import GridRequest, Swept
    from multinode.job.job import Job
    from multinode.launch.grid import Grid, GridCell
    from multinode.launch.series import Resume


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridOptions:
    """What is measured, how long and how often."""

    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=A,B,...",
            help="Values of a YAML key to sweep. Each is read as YAML: [a,b] is one value, '\"a,b\"' a text with a "
            "comma. Repeatable.",
        ),
    ] = None
    grid_arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="--NAME=A,B,...",
            help=(
                "Values of a script argument to sweep, such as --grid-arg --batch=1,2,4. Quote values with commas. "
                "Repeatable."
            ),
        ),
    ] = None
    set_: Overrides = None
    nodes: Annotated[
        str | None,
        typer.Option(metavar="1,2,4", help="Numbers of nodes to sweep, from the top of the hostfile. Default: all."),
    ] = None
    workers_per_node: Annotated[
        str | None, typer.Option(metavar="1,2", help="Numbers of workers per node to sweep. Default: the slots.")
    ] = None
    steps: Annotated[
        int | None,
        typer.Option(min=3, help="Measured steps per run, after the warm-up (max_steps). Default: 30, or all."),
    ] = None
    minutes: Annotated[
        float | None,
        typer.Option(min=0.05, help="Train each run for this many minutes instead, counted from its first step."),
    ] = None
    repeats: Annotated[int, typer.Option(min=1, max=20, help="Repeats per cell.")] = 1
    interleave: Annotated[
        bool,
        typer.Option("--interleave/--no-interleave", help="Interleave the repeats, so that drift affects all cells."),
    ] = True
    synthetic: Synthetic = False

    @property
    def node_counts(self) -> tuple[int, ...]:
        """The numbers of nodes; empty for all nodes."""
        from multinode.experiment.grid_plan import parse_counts

        return parse_counts("--nodes", self.nodes) if self.nodes is not None else ()

    @property
    def worker_counts(self) -> tuple[int, ...]:
        """The numbers of workers per node; empty for the slots."""
        from multinode.experiment.grid_plan import parse_counts

        return parse_counts("--workers-per-node", self.workers_per_node) if self.workers_per_node is not None else ()

    def read(
        self, axes: Mapping[str, tuple[Any, ...]], arguments: Mapping[str, str], there: int, workers: int | None
    ) -> Grid:
        """The grid of the axes that have more than one value.

        Args:
            axes: their values by name.
            arguments: those of a script, as they are written, by the name of the axis.
            there: number of nodes without `--nodes`.
            workers: workers per node without `--workers-per-node`; None is the slots.
        """
        from multinode.launch.grid import Grid

        return Grid(
            settings={key: values for key, values in axes.items() if len(values) > 1},
            arguments={name: text for name, text in arguments.items() if len(axes[name]) > 1},
            nodes=self.node_counts or (there,),
            workers_per_node=self.worker_counts or (workers,),
            repeats=self.repeats,
            interleave=self.interleave,
        )


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command(
        cls=ScriptCommand,
        epilog=examples(
            "sweep --hosts hosts.txt --grid per_device_train_batch_size=1,2,4 train.yaml",
            "sweep --hosts hosts.txt --grid-arg --batch=1,2,4 --nodes 1,2 -- train.py",
        ),
    )(expand_options(sweep))


def sweep(
    ctx: typer.Context,
    *,
    job: JobWords = None,
    hosts: Hosts = None,
    grid: GridOptions,
    training: TrainingOptions,
    check: Check = True,
    hang_timeout: HangTimeout = 300.0,
    on_hang: OnHang = "stop",
    fresh: Fresh = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Measure failed cells again, except those out of memory.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cells and exit.")] = False,
    look: ViewOptions,
    form: FormOptions,
    as_json: Json = False,
) -> None:
    """Measure a job over a grid of settings, nodes and workers. Run the same command again to resume."""
    from multinode.launch.series import Resume

    if grid.steps is not None and grid.minutes is not None:
        raise UsageError("--steps and --minutes are mutually exclusive", hint="use only one of them")
    form.validate(as_json=as_json)
    # Nobody looks on: by default a cell that hangs does not hold up the others.
    execute = ExecuteOptions(kind="sweep", stall_s=hang_timeout or None, on_stall=on_hang)
    given = read_training(
        ctx,
        job,
        training,
        hosts=hosts,
        nodes=max(grid.node_counts, default=None),
        workers_per_node=max(grid.worker_counts, default=None),
        limits_nodes=False,
    )
    asked_grid = _read_grid(given, grid, execute, check=check)
    _require_fit(asked_grid, look)
    resume = Resume(anew=fresh, retry_failed=retry_failed)
    if dry_run:
        _print_plan(asked_grid, resume, as_json=as_json)
        return
    swept = _carry_out(asked_grid, resume)
    _show(swept, look, form, as_json=as_json)
    _tell_end(swept)


def _read_grid(given: TrainingInput, options: GridOptions, execute: ExecuteOptions, *, check: bool) -> GridRequest:
    """The grid of a YAML or a script over a cluster, and the job of every cell, before any is measured."""
    from multinode.experiment.grid_plan import plan_grid
    from multinode.experiment.sweep import CellTraining, GridRequest

    script = given.command.script
    settings = [*(options.set_ or ()), *given.settings]
    axes, arguments = _read_axes(script.argv if script is not None else None, options, settings)
    fixed = [*(options.set_ or ()), *(() if arguments else _fixed(axes))]
    own = [f"{arguments[name]}={values[0]}" for name, values in axes.items() if name in arguments and len(values) == 1]
    plain = given.read_job(fixed)
    if isinstance(plain, ScriptJob):
        plain = _with_arguments(plain, own)
    cluster = given.nodes.cluster
    grid = options.read(axes, arguments, len(cluster.nodes), given.workers_per_node)
    cells = plan_grid(grid, cluster)
    return GridRequest(
        launch=given.make_launch(plain, LaunchOptions(), execute, check=check),
        job=plain,
        grid=grid,
        cells=cells,
        jobs=_cell_jobs(plain, grid, cells, [*fixed, *given.settings], given.training.deepspeed_set or []),
        training=CellTraining(steps=options.steps, minutes=options.minutes, synthetic=options.synthetic),
    )


def _read_axes(
    script: tuple[str, ...] | None, options: GridOptions, settings: Sequence[str]
) -> tuple[dict[str, tuple[Any, ...]], dict[str, str]]:
    """Values by key of a YAML, or by name of a script's argument, and those arguments as they are written."""
    from multinode.experiment.grid_plan import parse_arguments, parse_axes

    if script is None:
        if options.grid_arg:
            raise UsageError(
                "--grid-arg sweeps arguments of a script after --, which is missing",
                hint="to sweep keys of a YAML job: --grid KEY=A,B",
            )
        axes = parse_axes(options.grid or [])
        twice = next((key for key in axes if any(text.startswith(f"{key}=") for text in settings)), None)
        if twice is not None:
            raise UsageError(f"{twice} is in both --set and --grid", hint="use only one of them")
        return axes, {}
    if options.grid:
        raise UsageError(
            "--grid sweeps keys of a YAML job; this is a script",
            hint="to sweep its arguments: --grid-arg --batch=1,2,4",
        )
    axes, arguments = parse_arguments(options.grid_arg or [])
    words = {word.partition("=")[0] for word in script}
    twice = next((argument for argument in arguments.values() if argument in words), None)
    if twice is not None:
        raise UsageError(f"{twice} is in both the script's arguments and --grid-arg", hint="use only one of them")
    return axes, arguments


def _print_plan(grid: GridRequest, resume: Resume, *, as_json: bool) -> None:
    from multinode.experiment.grid_plan import plan_lines
    from multinode.experiment.sweep import new_record, require_plannable
    from multinode.launch.grid import retry_failed as again
    from multinode.launch.series import find_series

    require_plannable(grid)
    planned = new_record(grid)
    series = None if resume.anew else find_series(runs_root(), planned.fingerprint)
    if series is not None:
        directory, planned = series
        planned = again(planned) if resume.retry_failed else planned
        note(f"sweep {directory.run_id} has the same command; running it again resumes the sweep")
    if as_json:
        print_document(planned)
        return
    for line in plan_lines(planned):
        typer.echo(line)


def _carry_out(grid: GridRequest, resume: Resume) -> Swept:
    from multinode.experiment.sweep import build_table, find_finished
    from multinode.experiment.sweep import sweep as measure

    finished = find_finished(grid, runs_root(), resume)
    if finished is not None:
        run = RunDirectory(finished.directory).read("run.json", Run)
        ended_s = run.ended_s if run is not None else None
        until = "" if ended_s is None else time.strftime(", until %Y-%m-%d %H:%M", time.localtime(ended_s))
        note(
            f"sweep {finished.directory.name} has already measured this{until}; use --fresh to measure again, such "
            "as after a network change, or --retry-failed for failed cells"
        )
        build_table(RunDirectory(finished.directory), finished.directory.parent)
        return finished
    with open_context(grid.launch.cluster.first(max(grid.grid.nodes))) as context:
        return measure(grid, context, resume, build_table)


def _tell_end(swept: Swept) -> NoReturn:
    from multinode.launch.grid import end_line

    failed = [cell for cell in swept.record.cells if cell.state == "failed"]
    for cell in failed:
        typer.echo(end_line(cell.cell.label, cell, None), err=True)
    if failed:
        note("to measure them again, run the same command with --retry-failed")
    name = swept.directory.name
    print_directory(swept.directory)
    note(f"sorted, filtered and priced, as a page: multinode show {name} -o {name}.html")
    raise typer.Exit(1 if failed else 0)


def _cell_jobs(
    plain: Job, grid: Grid, cells: Sequence[GridCell], fixed: Sequence[str], deepspeed_edits: Sequence[str]
) -> dict[str, Job]:
    """The job of each cell by its label, exactly as `launch` would make it of the same `--set`, or arguments.

    A setting may name another file, a model or a DeepSpeed JSON; so each is read as a job of its own.
    """
    from multinode.experiment.grid_plan import cell_arguments, cell_overrides
    from multinode.job.deepspeed import parse_deepspeed_edits
    from multinode.job.job_files import load_job

    if isinstance(plain, ScriptJob):
        return {cell.label: _with_arguments(plain, cell_arguments(grid, cell)) for cell in cells}
    path, edits = Path(plain.config_path), parse_deepspeed_edits(deepspeed_edits)
    made: dict[tuple[str, ...], Job] = {}
    for cell in cells:
        settings = cell_overrides(cell)
        if settings not in made:
            made[settings] = load_job(path, (*fixed, *settings), edits, plain.text)
    return {cell.label: made[cell_overrides(cell)] for cell in cells}


def _with_arguments(script: ScriptJob, arguments: Sequence[str]) -> ScriptJob:
    """The script with more arguments, one of which may name a file."""
    from multinode.job.job_files import load_script

    return load_script(msgspec.structs.replace(script, argv=(*script.argv, *arguments)))


def _fixed(axes: Mapping[str, Sequence[Any]]) -> list[str]:
    """What has one value, as `launch` takes it."""
    from multinode.job.job import override_text

    return [override_text(key, values[0]) for key, values in axes.items() if len(values) == 1]


def _require_fit(grid: GridRequest, look: ViewOptions) -> None:
    """See that the table can be shown so, with the cells as they are before any of them is measured."""
    from multinode.experiment.cell_table import look_at
    from multinode.experiment.cells import CellRow, CellTable

    rows = tuple(CellRow(label=cell.label, state="waiting", varied=cell.settings) for cell in grid.cells)
    look_at(CellTable(run_id="", job="", cells=rows), look.read(beside=False))
    labels = [cell.label for cell in grid.cells]
    if look.baseline is not None and look.baseline not in labels:
        raise UsageError(f"--baseline {look.baseline}: no such cell", hint=f"one of {', '.join(labels)}")


def _show(swept: Swept, look: ViewOptions, form: FormOptions, *, as_json: bool) -> None:
    from multinode.experiment.sweep import load_tables

    names = [swept.directory.name]
    try:
        tables = load_tables(runs_root(), names, look.read())
    except UsageError as error:
        if look.baseline is None:
            raise
        typer.echo(f"warning: --baseline: {error.message}; using the first row with a speed", err=True)
        tables = load_tables(runs_root(), names, look.read(beside=False))
    form.show(tables, look.sort, as_json=as_json)
