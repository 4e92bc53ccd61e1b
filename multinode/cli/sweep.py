"""`multinode sweep`: a grid of a job's settings and of the cluster's, measured cell by cell."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from multinode.cli.inputs import fill
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
from multinode.cli.table import FormOptions, ViewOptions, show_table
from multinode.errors import UsageError
from multinode.records.run_directory import runs_root

if TYPE_CHECKING:
    from multinode.series.series import Resume
    from multinode.sweep.measure import GridRequest, Swept


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridOptions:
    """What is measured, how long and how often."""

    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=A,B,...",
            help=(
                "Values of a YAML key to sweep. Each value is parsed as YAML: [a,b] is one value, and '\"a,b\"' is a "
                "string with a comma. Repeatable."
            ),
        ),
    ] = None
    grid_arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="--NAME=A,B,...",
            help=(
                "Values of a script argument to sweep, such as --grid-arg --batch=1,2,4. Quote values that "
                "contain commas. Repeatable."
            ),
        ),
    ] = None
    set_: Overrides = None
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="1,2,4",
            help="Numbers of nodes to sweep, counted from the top of the hostfile. Default: all nodes.",
        ),
    ] = None
    workers_per_node: Annotated[
        str | None,
        typer.Option(metavar="1,2", help="Numbers of workers per node to sweep. Default: the slots of each node."),
    ] = None
    steps: Annotated[
        int | None,
        typer.Option(
            min=3,
            help=(
                "Measured steps per run, after the warm-up (sets max_steps). Default: 30, or all if the job has fewer."
            ),
        ),
    ] = None
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0.05, help="Instead of --steps, let each run train for this many minutes, counted from its first step."
        ),
    ] = None
    repeats: Annotated[int, typer.Option(min=1, max=20, help="Number of repeats per cell.")] = 1
    interleave: Annotated[
        bool,
        typer.Option("--interleave/--no-interleave", help="Interleave the repeats, so that drift affects all cells."),
    ] = True
    synthetic: Synthetic = False


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
        bool, typer.Option("--retry-failed", help="Measure failed cells again, except cells that ran out of memory.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cells and exit.")] = False,
    look: ViewOptions,
    form: FormOptions,
    as_json: Json = False,
) -> None:
    """Measure a job over a grid of settings, nodes and workers. Run the same command again to resume."""
    from multinode.sweep.inputs import SweepInput
    from multinode.sweep.measure import measure_swept

    form.choose(as_json=as_json)
    given = fill(
        SweepInput,
        ctx,
        job,
        grid,
        training,
        hosts=hosts,
        check=check,
        hang_timeout=hang_timeout,
        on_hang=on_hang,
        fresh=fresh,
        retry_failed=retry_failed,
    )
    asked_grid, resume = given.read(note), given.resume
    _require_fit(asked_grid, look)
    if dry_run:
        _print_plan(asked_grid, resume, as_json=as_json)
        return
    swept = measure_swept(asked_grid, resume, open_context, note)
    _show(swept, look, form, as_json=as_json)
    _tell_end(swept)


def _print_plan(grid: GridRequest, resume: Resume, *, as_json: bool) -> None:
    from multinode.series.grid import retry_failed as again
    from multinode.series.series import find_series
    from multinode.sweep.grid_plan import plan_lines
    from multinode.sweep.measure import new_record, require_plannable

    require_plannable(grid)
    planned = new_record(grid)
    series = None if resume.anew else find_series(runs_root(), planned.fingerprint)
    if series is not None:
        directory, planned = series
        planned = again(planned) if resume.retry_failed else planned
        note(f"sweep {directory.run_id} was started with the same command; running it again resumes that sweep")
    if as_json:
        print_document(planned)
        return
    for line in plan_lines(planned):
        typer.echo(line)


def _tell_end(swept: Swept) -> NoReturn:
    from multinode.series.grid import end_line

    failed = [cell for cell in swept.record.cells if cell.state == "failed"]
    for cell in failed:
        typer.echo(end_line(cell.cell.label, cell, None), err=True)
    if failed:
        note("to measure them again, run the same command with --retry-failed")
    name = swept.directory.name
    print_directory(swept.directory)
    note(f"write a page, with --sort, --where or --prices if needed: multinode show {name} -o {name}.html")
    raise typer.Exit(1 if failed else 0)


def _require_fit(grid: GridRequest, look: ViewOptions) -> None:
    """See that the table can be shown so, with the cells as they are before any of them is measured."""
    from multinode.sweep.figures import CellRow, CellTable
    from multinode.sweep.table import look_at

    rows = tuple(CellRow(label=cell.label, state="waiting", varied=cell.settings) for cell in grid.cells)
    look_at(CellTable(run_id="", job="", cells=rows), look.read(beside=False))
    labels = [cell.label for cell in grid.cells]
    if look.baseline is not None and look.baseline not in labels:
        raise UsageError(f"--baseline {look.baseline}: no such cell", hint=f"use one of {', '.join(labels)}")


def _show(swept: Swept, look: ViewOptions, form: FormOptions, *, as_json: bool) -> None:
    from multinode.sweep.measure import load_tables

    names = [swept.directory.name]
    try:
        tables = load_tables(runs_root(), names, look.read())
    except UsageError as error:
        if look.baseline is None:
            raise
        typer.echo(f"warning: --baseline: {error.message}; using the first row with a speed", err=True)
        tables = load_tables(runs_root(), names, look.read(beside=False))
    show_table(tables, form, look.sort, as_json=as_json)
