"""`multinode report`: stored runs as one page that needs nothing from outside, as Markdown, or as CSV files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from multinode.cli.live import show_stage
from multinode.cli.options import Json, RunIds
from multinode.cli.output import note, print_document
from multinode.cli.panels import examples
from multinode.errors import UsageError
from multinode.records.run_directory import runs_root
from multinode.results.run_page import (
    ReportForm,
    choose_report_form,
    load_report,
    report_markdown,
    write_report,
)


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command(epilog=examples("report last", "report last --format markdown"))(report)


def report(
    run_ids: RunIds = None,
    form: Annotated[
        ReportForm | None,
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
    chosen = choose_report_form(form, output)
    if chosen == "markdown" and as_json and output is None:
        raise UsageError(
            "--format markdown and --json both print on stdout", hint="write one of them to a file: -o FILE"
        )
    with show_stage() as say:
        loaded = load_report(runs_root(), run_ids or ["last"], say)
    names = [run.run.run_id for run in loaded.runs]
    if chosen == "markdown" and output is None:
        typer.echo(report_markdown(loaded), nl=False)
        return
    written = write_report(loaded, chosen, output or Path())
    _tell(written, names, list(loaded.sample_folders), as_json=as_json)


def _tell(written: tuple[Path, ...], names: list[str], samples: list[Path], *, as_json: bool) -> None:
    if as_json:
        paths = [str(path) for path in written]
        record = {"schema": "multinode.report/2", "runs": names, "path": paths[0], "paths": paths}
        print_document(record | {"samples": [str(path) for path in samples]})
        return
    for path in written:
        typer.echo(path)
    for path in samples:
        note(f"raw samples, one JSON object per line: {path}")
