"""Bringing results home at the end of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from multinode.core.cluster import Cluster
    from multinode.workflows.launch import Launched, Outside

__all__ = ["fetch_results"]


def fetch_results(around: Outside, launched: Launched, cluster: Cluster, paths: list[str] | None) -> None:
    """Copy what `--fetch` names from node 0 into the run's directory, unless the run goes on."""
    if not paths or launched.run.status == "running":
        return
    from multinode.units import format_size
    from multinode.workflows.fetch import Wanted, fetch_files

    wanted = Wanted(node=cluster.nodes[0], paths=tuple(paths), cwd=launched.plan.nodes[0].command.cwd)
    fetched = fetch_files(around.agent, wanted, launched.directory / "fetched")
    typer.echo(
        f"fetched {len(fetched.files)} files, {format_size(fetched.size_bytes)}, into {fetched.directory}", err=True
    )
