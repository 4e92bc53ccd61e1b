"""`multinode init`: a commented hostfile from what the nodes themselves say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from multinode.cli.live import show_stage
from multinode.cli.options import Json
from multinode.cli.output import note, print_document
from multinode.cli.running import open_agent
from multinode.core.cluster.hostfile import parse_hostfile
from multinode.errors import UsageError
from multinode.store.text_file import write_new_text

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command(epilog="For example: multinode init gpu[1-2] 'bigbox user=alice port=2222' -o hostfile")(init)


def init(
    nodes: Annotated[
        list[str],
        typer.Argument(metavar="NODE...", help="Names or aliases for SSH, in node-rank order; each may carry keys."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The hostfile to write.")] = Path(
        "hostfile"
    ),
    as_json: Json = False,
) -> None:
    """Look at the nodes, and write a commented hostfile with addr, ifname, slots, gpus and python filled in."""
    cluster = parse_hostfile("\n".join(nodes), "the command line")
    if output.exists():
        raise UsageError(f"{output} already exists", hint="name another: -o FILE")
    with open_agent(cluster) as agent, show_stage() as say:
        from multinode.workflows.init import describe_nodes

        say(f"probing {len(cluster.nodes)} nodes")
        described = describe_nodes(agent, cluster)
    write_new_text(output, described.text)
    if as_json:
        nodes_found = described.cluster.nodes
        print_document({"schema": "multinode.init/1", "hostfile": str(output), "nodes": nodes_found})
    else:
        typer.echo(described.text, nl=False)
        note(f"written to {output}")
        note(f"next: multinode check --hosts {output}")
