"""`multinode report`: stored runs as one page that needs nothing from outside, or as CSV files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from multinode.cli.options import Json

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command()(report)


def report(
    run_ids: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="Runs: an id, the beginning of one, or `last`.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="The page; else RUN.html here.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="DIR", help="Write the samples as CSV files there, and no page.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write one page with charts of a run, or of several; it needs nothing from outside and can be passed on."""
    from multinode.errors import UsageError
    from multinode.store.run_directory import runs_root
    from multinode.store.text_file import require_directory
    from multinode.workflows.report import load_report, write_csv, write_page

    if csv is not None and output is not None:
        raise UsageError("-o names a page and --csv asks for none", hint="leave one of them out")
    if output is not None:
        require_directory(output.parent)
    found = load_report(runs_root(dict(os.environ), Path.cwd()), run_ids or ["last"])
    names = [one.run.run_id for one in found.runs]
    if csv is not None:
        written = write_csv(found, csv)
    else:
        written = (output or Path("-".join((names[0], *(["and-others"] if names[1:] else []))) + ".html"),)
        write_page(found, written[0])
    _tell(written, names, [path / "samples" for path in found.directories], as_json=as_json)


def _tell(written: tuple[Path, ...], names: list[str], samples: list[Path], *, as_json: bool) -> None:
    """Where everything went, the raw samples included."""
    from multinode.cli.output import print_document

    if as_json:
        paths = [str(path) for path in written]
        record = {"schema": "multinode.report/1", "runs": names, "path": paths[0], "paths": paths}
        print_document(record | {"samples": [str(path) for path in samples]})
        return
    for path in written:
        typer.echo(path)
    for path in samples:
        typer.echo(f"raw samples, a JSON object a line: {path}", err=True)
