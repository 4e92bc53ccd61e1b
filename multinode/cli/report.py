"""`multinode report`: stored runs as one page that needs nothing from outside, as Markdown, or as CSV files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from multinode.bench.measure import load_bench
from multinode.cli.live import show_stage
from multinode.cli.options import Json, RunIds
from multinode.cli.output import choose_form, note, print_document
from multinode.cli.panels import examples
from multinode.cli.run_page import ReportedRun, run_markdown
from multinode.contrast.compare import load_contrast
from multinode.errors import UsageError
from multinode.experiment.cell_sheet import cell_blocks, cell_csv, combined
from multinode.experiment.cells import CellTable
from multinode.experiment.sweep import load_table
from multinode.launch.runs import StoredRun, load_run, observe_run
from multinode.network.size_scan import ScanReport
from multinode.profile.export import csv_files
from multinode.records.files import write_text
from multinode.records.plan import LaunchPlan
from multinode.records.run_directory import RunDirectory, list_runs, runs_root
from multinode.render.sheet import blocks_markdown

_CELLS = "cells.csv"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Runs that are reported on."""

    runs: tuple[ReportedRun, ...]
    directories: tuple[Path, ...]  # where they lie; their raw samples are in `samples` there, a JSON object a line

    @property
    def cells(self) -> CellTable | None:
        """The tables of all runs as one, where several were named and each has one."""
        tables = [one.cells for one in self.runs if one.cells is not None]
        return combined(tables) if len(tables) == len(self.runs) > 1 else None


def load_report(root: Path, names: Sequence[str], say: Callable[[str], None] = lambda _: None) -> Report:
    """Read runs by id, beginning of an id, or `last`. Duplicates are read once."""
    found = {(stored := load_run(root, name)).run.run_id: stored for name in names}
    return Report(
        runs=tuple(_load(stored, say) for stored in found.values()),
        directories=tuple(stored.directory.path for stored in found.values()),
    )


def write_page(report: Report, path: Path) -> None:
    """Write the page, replacing an earlier one."""
    from multinode.cli.run_page import run_page
    from multinode.experiment.cell_page import cell_page

    write_text(path, cell_page(report.cells) if report.cells is not None else run_page(report.runs))


def report_markdown(report: Report) -> str:
    """The same as text for an issue or a wiki, without charts."""
    return blocks_markdown(cell_blocks(report.cells)) if report.cells is not None else run_markdown(report.runs)


def write_markdown(report: Report, path: Path) -> None:
    """Write it, replacing an earlier one."""
    write_text(path, report_markdown(report))


def write_csv(report: Report, folder: Path) -> tuple[Path, ...]:
    """Write the CSV files into a directory, created if missing, replacing earlier ones."""
    files = _csv_files(report.runs)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be created: {error.strerror}", hint=f"ls -ld {folder.parent}") from error
    for name, text in files.items():
        write_text(folder / name, text)
    return tuple(folder / name for name in files)


def _csv_files(runs: Sequence[ReportedRun]) -> dict[str, str]:
    tables = [one.cells for one in runs if one.cells is not None]
    files = {_CELLS: cell_csv(combined(tables))} if tables else {}
    if len(tables) == len(runs):
        return files
    return csv_files(one.observed for one in runs if one.observed is not None) | files


def _load(stored: StoredRun, say: Callable[[str], None]) -> ReportedRun:
    directory = stored.directory
    attempts = stored.run.attempts
    # The figures of a run that was restarted are those of its last attempt.
    last = directory.path.with_name(attempts[-1].run_id) if attempts else None
    # Another user's directory may have the name of an attempt that is no more.
    measured = RunDirectory(last) if last is not None and last in list_runs(directory.path.parent) else directory
    plan = measured.read("plan.json", LaunchPlan)
    contrast, unread = load_contrast(directory)
    return ReportedRun(
        run=stored.run,
        summary=stored.summary,
        # A contrast has no nodes of its own: its sides' runs lie beside it.
        observed=observe_run(measured, plan, say) if plan is not None else None,
        scan=directory.read("nccl-test.json", ScanReport),
        contrast=contrast,
        cells=load_table(directory),
        bench=load_bench(directory),
        unread=unread,
    )


_ENDINGS = {".html": "html", ".htm": "html", ".md": "markdown"}
_SUFFIXES = {"html": "html", "markdown": "md"}


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command(epilog=examples("report last", "report last --format markdown"))(report)


def report(
    run_ids: RunIds = None,
    form: Annotated[
        Literal["html", "markdown", "csv"] | None,
        typer.Option(
            "--format",
            help=(
                "html: a page with charts; markdown: for an issue or a wiki; csv: samples, or cells of a sweep. "
                "Default: from the suffix of --output, or html."
            ),
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE|DIR",
            help="Output file, or directory for csv. Default: RUN.html in this directory; Markdown is printed.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a self-contained HTML page with charts of one or more runs."""
    chosen = _choose_form(form, output, as_json=as_json)
    with show_stage() as say:
        found = load_report(runs_root(), run_ids or ["last"], say)
    names = [one.run.run_id for one in found.runs]
    if chosen == "csv" and output is not None:
        written = write_csv(found, output)
    elif chosen == "markdown" and output is None:
        typer.echo(report_markdown(found), nl=False)
        return
    else:
        name = Path("-".join((names[0], *(["and-others"] if names[1:] else []))) + f".{_SUFFIXES[chosen]}")
        written = (name if output is None else output / name if output.is_dir() else output,)
        write = write_markdown if chosen == "markdown" else write_page
        write(found, written[0])
    sampled = [path for one, path in zip(found.runs, found.directories, strict=True) if one.cells is None]
    _tell(written, names, [path / "samples" for path in sampled], as_json=as_json)


def _choose_form(form: str | None, output: Path | None, *, as_json: bool) -> str:
    """The form, before anything is read."""
    into = output is not None and (output.is_dir() or form == "csv")
    form = choose_form(form, None if into else output, _ENDINGS)
    if form == "csv" and not into:
        raise UsageError("CSV needs an output directory", hint="use --format csv --output DIR")
    if form == "markdown" and as_json and output is None:
        raise UsageError(
            "--format markdown and --json both print on stdout", hint="write one of them to a file: -o FILE"
        )
    return form


def _tell(written: tuple[Path, ...], names: list[str], samples: list[Path], *, as_json: bool) -> None:
    if as_json:
        paths = [str(path) for path in written]
        record = {"schema": "multinode.report/1", "runs": names, "path": paths[0], "paths": paths}
        print_document(record | {"samples": [str(path) for path in samples]})
        return
    for path in written:
        typer.echo(path)
    for path in samples:
        note(f"raw samples, one JSON object per line: {path}")
