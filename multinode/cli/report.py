"""`multinode report`: stored runs as one page that needs nothing from outside, as Markdown, or as CSV files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from multinode.cli.live import show_stage
from multinode.cli.options import Json, RunIds
from multinode.cli.output import choose_form, note, print_document
from multinode.cli.panels import examples
from multinode.cli.run_page import load_report, report_markdown, write_csv, write_markdown, write_page
from multinode.errors import UsageError
from multinode.records.run_directory import runs_root

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
        loaded = load_report(runs_root(), run_ids or ["last"], say)
    names = [run.run.run_id for run in loaded.runs]
    if chosen == "csv" and output is not None:
        written = write_csv(loaded, output)
    elif chosen == "markdown" and output is None:
        typer.echo(report_markdown(loaded), nl=False)
        return
    else:
        name = Path("-".join((names[0], *(["and-others"] if names[1:] else []))) + f".{_SUFFIXES[chosen]}")
        written = (name if output is None else output / name if output.is_dir() else output,)
        write = write_markdown if chosen == "markdown" else write_page
        write(loaded, written[0])
    sampled = [path for run, path in zip(loaded.runs, loaded.directories, strict=True) if run.cells is None]
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
