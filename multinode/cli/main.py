"""The multinode command: mounts the verbs, and is the one place that prints an error."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from multinode.errors import Interrupted, MultinodeError

__all__ = ["build_app", "print_error", "run"]


def _version(value: bool) -> None:
    if value:
        from multinode import __version__

        typer.echo(f"multinode {__version__}")
        raise typer.Exit


def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def build_app() -> typer.Typer:
    """The command with all its verbs."""
    from multinode.cli import (
        advise,
        attach,
        bench,
        check,
        contrast,
        import_table,
        init,
        lab,
        launch,
        nccl_test,
        predict,
        report,
        runs,
        sweep,
        table,
    )

    app = typer.Typer(
        name="multinode",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        help="Launch a training on several nodes over SSH, and measure what the network costs it.",
    )
    app.callback()(_main)
    app.add_typer(lab.app, name="lab")
    verbs = (init, check, nccl_test, bench, launch, contrast, predict, advise, sweep, table, import_table)
    for verb in (*verbs, runs, report, attach):
        verb.register(app)
    return app


def run() -> None:
    """Entry point: run the command, print what went wrong, exit with its code."""
    try:
        build_app()()
    except MultinodeError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print_error(Interrupted("interrupted"))
        sys.exit(Interrupted.exit_code)


def print_error(error: MultinodeError) -> None:
    """One clear message on stderr: what, where, what was run, what mends it; detail above it, as it came first."""
    lines = []
    if error.detail:
        lines += [f"  {line}" for line in error.detail.splitlines()]
    lines.append(f"error: {error}")
    if error.ran:
        lines.append(f"  ran:  {error.ran}")
    if error.hint:
        lines.append(f"  hint: {error.hint}")
    sys.stderr.write("\n".join(lines) + "\n")
