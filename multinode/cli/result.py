"""The end of a run that was followed: its results fetched, how it ended, and the exit code that says it to a script."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import typer

from multinode.cli.output import print_directory, print_document, print_failure
from multinode.errors import ContactLost, MultinodeError
from multinode.units import format_size

if TYPE_CHECKING:
    from multinode.core.cluster.cluster import Cluster
    from multinode.workflows.run.context import Launched, RunContext

__all__ = ["fetch_results", "tell_result"]

_EXIT_CODES = {"running": 0, "succeeded": 0, "failed": 1, "lost": 3, "stopped": 130}


def fetch_results(
    context: RunContext, launched: Launched, cluster: Cluster, paths: list[str] | None
) -> MultinodeError | None:
    """Copy what `--fetch` names from node 0 into the run's directory, unless the run goes on.

    Returns:
        Why it could not be copied: an error to raise once the user has been told how the run ended.
    """
    run, node = launched.run, cluster.nodes[0]
    if not paths or run.status == "running":
        return None
    if run.nodes[0].state == "lost":
        return ContactLost("nothing was fetched: contact with it was lost", node=node.name)
    from multinode.workflows.run.fetch import Wanted, fetch_files

    wanted = Wanted(node=node, paths=tuple(paths), cwd=launched.plan.nodes[0].command.cwd)
    try:
        fetched = fetch_files(context.agent, wanted, launched.directory.path / "fetched")
    except MultinodeError as error:
        return error
    typer.echo(
        f"fetched {len(fetched.files)} files, {format_size(fetched.size_bytes)}, into {fetched.directory}", err=True
    )
    return None


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
    from multinode.report.run.outcome import launch_sentence, launch_verdict

    run = launched.run
    if run.first_failure is not None:
        print_failure(run.first_failure, str(launched.directory))
    typer.echo(launch_sentence(run, launched.summary))
    for line in launch_verdict(launched.summary):
        typer.echo(line)
    if run.status == "running":
        typer.echo(f"it goes on: multinode attach {run.run_id}; to end it: multinode stop {run.run_id}", err=True)
    print_directory(launched.directory)
