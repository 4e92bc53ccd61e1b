"""The multinode command: mounts the verbs, and is the one place that prints an error."""

from __future__ import annotations

import importlib
import sys
from typing import Annotated

import typer

from multinode.errors import Interrupted, MultinodeError

__all__ = ["VERBS", "build_app", "print_error", "run"]

# By the module that has them: what one verb imports, the others need not wait for.
VERBS = {
    "lab": ("lab",),
    "init": ("init",),
    "check": ("check",),
    "nccl_test": ("nccl-test",),
    "bench": ("bench",),
    "launch": ("launch",),
    "contrast": ("contrast", "compare"),
    "predict": ("predict",),
    "advise": ("advise",),
    "sweep": ("sweep",),
    "table": ("table",),
    "import_table": ("import",),
    "runs": ("runs", "show", "logs"),
    "report": ("report",),
    "attach": ("attach", "stop", "clean"),
}


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


def build_app(asked: str | None = None) -> typer.Typer:
    """The command with all its verbs, or with those of the one module that has the verb that is asked for."""
    app = typer.Typer(
        name="multinode",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        help="Launch a training on several nodes over SSH, and measure what the network costs it.",
    )
    app.callback()(_main)
    for module in [name for name, verbs in VERBS.items() if asked in verbs] or VERBS:
        importlib.import_module(f"multinode.cli.{module}").register(app)
    return app


def run() -> None:
    """Entry point: run the command, print what went wrong, exit with its code."""
    try:
        build_app(sys.argv[1] if sys.argv[1:] else None)()
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
