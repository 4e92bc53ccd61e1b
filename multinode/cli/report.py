"""`multinode report`: stored runs as one page that needs nothing from outside, as Markdown, or as CSV files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from multinode.cli.options import Json
from multinode.cli.output import print_document
from multinode.errors import UsageError
from multinode.store.run_directory import runs_root
from multinode.store.text_file import require_directory

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command()(report)


def report(
    run_ids: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="Runs: an id, the beginning of one, or `last`.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="The page; else RUN.html here. FILE.md is Markdown."),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print it as Markdown for an issue or a wiki, and write no page.")
    ] = False,
    csv: Annotated[
        Path | None,
        typer.Option("--csv", metavar="DIR", help="Write the samples, or a sweep's cells, as CSV files there."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write one page with charts of a run, or of several; it needs nothing from outside and can be passed on."""
    from multinode.workflows.report import load_report, report_markdown, write_csv, write_markdown, write_page

    _refuse(output, csv, markdown=markdown, as_json=as_json)
    if output is not None:
        require_directory(output.parent)
    found = load_report(runs_root(), run_ids or ["last"])
    names = [one.run.run_id for one in found.runs]
    if markdown and output is None:
        typer.echo(report_markdown(found), nl=False)
        return
    if csv is not None:
        written = write_csv(found, csv)
    else:
        written = (output or Path("-".join((names[0], *(["and-others"] if names[1:] else []))) + ".html"),)
        write = write_markdown if markdown or written[0].suffix == ".md" else write_page
        write(found, written[0])
    sampled = [path for one, path in zip(found.runs, found.directories, strict=True) if one.cells is None]
    _tell(written, names, [path / "samples" for path in sampled], as_json=as_json)


def _refuse(output: Path | None, csv: Path | None, *, markdown: bool, as_json: bool) -> None:
    """What contradicts itself.

    Raises:
        UsageError: it does.
    """
    if csv is not None and (output is not None or markdown):
        other = "-o names a page" if output is not None else "--markdown asks for text"
        raise UsageError(f"{other} and --csv asks for none", hint="leave one of them out")
    if markdown and as_json and output is None:
        raise UsageError("--markdown and --json both print on stdout", hint="name a file for the text: -o FILE.md")


def _tell(written: tuple[Path, ...], names: list[str], samples: list[Path], *, as_json: bool) -> None:
    """Where everything went, the raw samples included."""
    if as_json:
        paths = [str(path) for path in written]
        record = {"schema": "multinode.report/1", "runs": names, "path": paths[0], "paths": paths}
        print_document(record | {"samples": [str(path) for path in samples]})
        return
    for path in written:
        typer.echo(path)
    for path in samples:
        typer.echo(f"raw samples, a JSON object a line: {path}", err=True)
