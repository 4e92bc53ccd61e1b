"""What all verbs print alike: documents and tables on stdout, failures and notes on stderr; exit codes."""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console
from rich.table import Table

from multinode.errors import printable, printable_line
from multinode.records.files import document_text
from multinode.records.run_directory import RunDirectory
from multinode.render.sheet import Block
from multinode.render.table import WIDE, Part, print_parts, screen_text
from multinode.render.terminal import block_parts
from multinode.secret_values import redact_text

# Notes are INFO, what --verbose adds is DEBUG.
_LOG = logging.getLogger("multinode")
_LOG.setLevel(logging.INFO)


class _Stderr(logging.Handler):
    """Writes to what stderr is at the time: a live table takes its place while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        begin = time.strftime("%H:%M:%S", time.localtime(record.created))
        if record.levelno >= logging.WARNING:
            begin = f"{record.levelname.lower()}:"
        sys.stderr.write(f"{begin} {printable_line(record.getMessage())}\n")


def set_verbosity(*, quiet: bool = False, verbose: bool = False) -> None:
    """What is told beside results, warnings and errors: nothing, notes, or each step and request with its time."""
    _LOG.setLevel(logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO)
    if not _LOG.handlers:
        _LOG.addHandler(_Stderr())


def is_quiet() -> bool:
    """Whether --quiet was given."""
    return not _LOG.isEnabledFor(logging.INFO)


def note(text: object) -> None:
    """A line on stderr beside the results; none with --quiet."""
    if not is_quiet():
        typer.echo(text, err=True)


def print_document(value: object) -> None:
    """One JSON document on stdout, without secrets."""
    sys.stdout.write(document_text(value))
    sys.stdout.flush()


def print_table(table: Table, prefix: str = "") -> None:
    """A table on stdout; `prefix` starts every line, for programs that read lines."""
    console = Console()
    if console.is_terminal and not prefix:
        console.print(table)
        return
    wide = console if prefix else Console(width=WIDE)
    with wide.capture() as captured:
        wide.print(table)
    # The blanks that fill a terminal's lines are of no use to a file.
    typer.echo("\n".join((prefix + line).rstrip() for line in captured.get().splitlines()))


def print_screen(parts: Iterable[Part], *, err: bool = False) -> None:
    """A verb's results on stdout, or on stderr, as wide as the terminal."""
    console = Console(stderr=err)
    if console.is_terminal:
        print_parts(console, parts)
    else:
        typer.echo(screen_text(parts), nl=False, err=err)


def print_blocks(blocks: Iterable[Block], *, details: bool = False, err: bool = False) -> None:
    """An answer on stdout, or on stderr, as wide as the terminal."""
    print_screen(block_parts(blocks, details=details, width=screen_width(err=err)), err=err)


def screen_width(*, err: bool = False) -> int:
    """Columns of what `print_screen` prints."""
    console = Console(stderr=err)
    return console.width if console.is_terminal else WIDE


def print_traceback(error: Exception) -> None:
    """The origin of an expected error, with --verbose."""
    if _LOG.isEnabledFor(logging.DEBUG):
        sys.stderr.write(printable(redact_text("".join(traceback.format_exception(error)))))


def fail_gate(text: str) -> NoReturn:
    """A requested limit was missed: print the figure, and exit with code 1."""
    typer.echo(f"error: {text}", err=True)
    raise typer.Exit(1)


def shown_directory(directory: RunDirectory) -> Path:
    """The directory of a run, from the working directory if it is below it."""
    here = Path.cwd()
    return directory.path.relative_to(here) if directory.path.is_relative_to(here) else directory.path


def print_directory(directory: RunDirectory | Path) -> None:
    """The directory of a run."""
    note(f"results: {directory}")


OF_RUNS = {"running": 0, "succeeded": 0, "failed": 1, "lost": 3, "stopped": 130}
OF_STOPS = {"slower_than_one_node": 1}
"""Of a run that was stopped, by the reason, where that is not the user."""
