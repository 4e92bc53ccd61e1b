"""Printing what all verbs print alike: documents and tables on stdout, failures and places on stderr."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from multinode.core.run.run import Failure
from multinode.core.text.secret_values import redact
from multinode.decoding import decode_json
from multinode.store.run_directory import RunDirectory

__all__ = ["print_directory", "print_document", "print_failure", "print_table"]

# A table in a file or a pipe is not cut to the width of a terminal that is not there.
_WIDE = 200


def print_document(value: object) -> None:
    """One JSON document on stdout, without secrets."""
    shown = redact(decode_json(msgspec.json.encode(value), object))
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(shown), indent=2).decode() + "\n")
    sys.stdout.flush()


def print_table(table: Table, prefix: str = "") -> None:
    """A table on stdout; `prefix` begins every line, for an output that programs read by its lines."""
    console = Console()
    if console.is_terminal and not prefix:
        console.print(table)
        return
    wide = console if prefix else Console(width=_WIDE)
    with wide.capture() as captured:
        wide.print(table)
    # The blanks that fill a terminal's lines are of no use to a file.
    typer.echo("\n".join((prefix + line).rstrip() for line in captured.get().splitlines()))


def print_directory(directory: RunDirectory | Path) -> None:
    """Where all files of a run lie."""
    typer.echo(f"everything of it: {directory}", err=True)


def print_failure(failure: Failure, directory: str) -> None:
    """The first failure: its last lines first, then the sentence and what mends it."""
    for line in failure.log_tail.splitlines():
        typer.echo(f"  {failure.node} | {line}", err=True)
    typer.echo(f"error: {failure.node}: {failure.message}", err=True)
    for consequence in failure.consequences:
        typer.echo(f"  consequence: {consequence}", err=True)
    if failure.hint:
        typer.echo(f"  hint: {failure.hint}", err=True)
    typer.echo(f"  log:  {directory}/logs/node-{failure.node_rank}.log", err=True)
