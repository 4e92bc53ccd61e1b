"""How a run that was followed is told at the end, and the exit code that says it to a script."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import typer

if TYPE_CHECKING:
    from multinode.errors import MultinodeError
    from multinode.workflows.run.context import Launched

__all__ = ["tell_result"]

_EXIT_CODES = {"running": 0, "succeeded": 0, "failed": 1, "lost": 3, "stopped": 130}


def tell_result(
    launched: Launched,
    *,
    as_json: bool,
    codes: dict[str, int] | None = None,
    not_fetched: MultinodeError | None = None,
) -> NoReturn:
    """Print how the run ended, or that it goes on, and exit; `codes` says otherwise for some of the states.

    Raises:
        MultinodeError: the run went well, and this one is why its results were not fetched.
    """
    if as_json:
        from multinode.cli.output import print_document
        from multinode.report.run.outcome import launch_document

        print_document(launch_document(launched.run, launched.summary, str(launched.directory)))
    else:
        _print_result(launched)
    if not_fetched is not None:
        if launched.run.status == "succeeded":
            raise not_fetched
        typer.echo(str(not_fetched), err=True)
    raise typer.Exit((_EXIT_CODES | (codes or {}))[launched.run.status])


def _print_result(launched: Launched) -> None:
    from multinode.cli.output import print_failure
    from multinode.report.run.outcome import launch_sentence, launch_verdict

    run = launched.run
    if run.first_failure is not None:
        print_failure(run.first_failure, str(launched.directory))
    typer.echo(launch_sentence(run, launched.summary))
    for line in launch_verdict(launched.summary):
        typer.echo(line)
    if run.status == "running":
        typer.echo(f"it goes on: multinode attach {run.run_id}; to end it: multinode stop {run.run_id}", err=True)
    typer.echo(f"everything of it: {launched.directory}", err=True)
