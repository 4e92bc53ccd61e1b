"""`multinode runs`, `show` and `logs`: what ran, from the run directories on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from multinode.cli.options import Json

__all__ = ["register"]

RunId = Annotated[str, typer.Argument(help="A run's id, the beginning of one, or `last`.")]


def register(app: typer.Typer) -> None:
    """Add the verbs to the command."""
    app.command()(runs)
    app.command()(show)
    app.command()(logs)


def runs(as_json: Json = False) -> None:
    """List the runs, oldest first."""
    from multinode.cli.output import print_document, print_table
    from multinode.report.run_table import runs_document, runs_table
    from multinode.workflows.runs import load_runs

    found = load_runs(_root())
    if as_json:
        print_document(runs_document(found))
    elif found:
        print_table(runs_table(found))
    else:
        typer.echo(f"no runs in {_root()}")


def show(run_id: RunId = "last", as_json: Json = False) -> None:
    """Show one run: how it ended, its figures, its files."""
    from multinode.cli.output import print_document, print_table
    from multinode.report.run_table import run_table
    from multinode.workflows.runs import load_run

    found = load_run(_root(), run_id)
    if as_json:
        print_document(found.document())
        return
    print_table(run_table(found.run, found.summary))
    typer.echo(f"everything of it: {found.directory}", err=True)


def logs(
    run_id: RunId = "last",
    node: Annotated[str | None, typer.Option(help="Only this node: its name or node rank.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="As the job wrote it, progress bars and all.")] = False,
    as_json: Json = False,
) -> None:
    """Print a run's logs, a node after the other; progress bars are reduced to their last state."""
    from multinode.cli.output import print_document
    from multinode.workflows.runs import load_run, node_logs

    found = load_run(_root(), run_id)
    texts = [(name, data if raw else _clean(data)) for name, data in node_logs(found, node)]
    if as_json:
        nodes = [{"name": name, "log": data.decode(errors="replace")} for name, data in texts]
        print_document({"schema": "multinode.logs/1", "run_id": found.run.run_id, "nodes": nodes})
        return
    for name, data in texts:
        typer.echo(f"--- {name}", err=True)
        typer.get_binary_stream("stdout").write(data)


def _clean(data: bytes) -> bytes:
    from multinode.core.log import clean_log

    return clean_log(data.decode(errors="replace")).rstrip("\n").encode() + b"\n"


def _root() -> Path:
    from multinode.store.run_directory import runs_root

    return runs_root(dict(os.environ), Path.cwd())
