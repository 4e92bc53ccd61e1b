"""`multinode copy`: make files equal on all nodes, over the training network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from multinode.cli.live import show_stage
from multinode.cli.options import Hosts, Json, Nodes
from multinode.cli.output import note, print_blocks, print_document

if TYPE_CHECKING:
    from multinode.copy.chain import CopyProgress


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command()(copy)


def copy(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...", help="Files and directories to copy. Relative paths are relative to the job's directory."
        ),
    ],
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="NODE",
            help=(
                "Node to copy from, or `controller` for this machine. Default: the node that has all of the "
                "paths, otherwise this machine."
            ),
        ),
    ] = None,
    delete: Annotated[
        bool,
        typer.Option("--delete", help="Also remove files from these directories if the source does not have them."),
    ] = False,
    hosts: Hosts = None,
    nodes: Nodes = None,
    as_json: Json = False,
) -> None:
    """Copy a model or dataset from the node that has it to all other nodes, over the training network.

    Each node passes the data on to the next one. multinode sends only differences and verifies digests. It replaces a
    path only after all of its data has arrived.
    """
    from multinode import api
    from multinode.copy.paths import progress_text
    from multinode.copy.screen import show

    cluster, _ = api.load_nodes(hosts, nodes, note)
    request = api.CopyRequest(paths=tuple(paths), source=source, delete=delete)
    with api.connect(cluster) as context, show_stage(plain=True) as context.say:

        def observe(progress: CopyProgress) -> None:
            context.say(progress_text(progress))

        report = api.copy(cluster, context, request, observe)
    if as_json:
        print_document(report)
    else:
        print_blocks(show(report))
    raise typer.Exit(0 if report.ok else 3 if report.unreached else 1)
