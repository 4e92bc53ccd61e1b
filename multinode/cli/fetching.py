"""Bringing results home at the end of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from multinode.errors import ContactLost, MultinodeError

if TYPE_CHECKING:
    from multinode.core.cluster.cluster import Cluster
    from multinode.workflows.run.context import Launched, RunContext

__all__ = ["fetch_results"]


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
    from multinode.units import format_size
    from multinode.workflows.run.fetch import Wanted, fetch_files

    wanted = Wanted(node=node, paths=tuple(paths), cwd=launched.plan.nodes[0].command.cwd)
    try:
        fetched = fetch_files(context.agent, wanted, launched.directory / "fetched")
    except MultinodeError as error:
        return error
    typer.echo(
        f"fetched {len(fetched.files)} files, {format_size(fetched.size_bytes)}, into {fetched.directory}", err=True
    )
    return None
