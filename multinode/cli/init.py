"""`multinode init`: a commented hostfile from what the nodes themselves say."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from multinode.cli.live import show_stage
from multinode.cli.options import Json
from multinode.cli.output import note, print_document
from multinode.cli.panels import examples
from multinode.cluster.hostfile import parse_hostfile
from multinode.errors import UsageError
from multinode.records.files import write_new_text


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command(epilog=examples("init gpu[1-2] 'bigbox user=alice port=2222' -o hosts.txt"))(init)


def init(
    nodes: Annotated[
        list[str] | None,
        typer.Argument(metavar="NODE...", help="SSH names or aliases in node-rank order, with optional hostfile keys."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Hostfile to write, or directory for --example. Default: `hostfile`."
        ),
    ] = None,
    example: Annotated[
        bool,
        typer.Option(
            "--example", help="Copy sample hostfiles and training configurations here, without probing nodes."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Probe the nodes, and write a commented hostfile with addr, ifname, slots, gpus and python filled in."""
    if example == bool(nodes):
        raise UsageError(
            "--example probes no nodes, but nodes were given" if example else "no node was given",
            hint="use multinode init gpu-a gpu-b, or multinode init --example",
        )
    if example:
        _copy_example(output or Path(), as_json=as_json)
    else:
        _describe(nodes or [], output or Path("hostfile"), as_json=as_json)


def _copy_example(folder: Path, *, as_json: bool) -> None:
    from multinode.records.hostfile import copy_example

    files = copy_example(folder)
    if as_json:
        print_document({"schema": "multinode.init/1", "files": [str(path) for path in files]})
        return
    for path in files:
        typer.echo(path)
    where = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    note(f"Next        {where}multinode launch --hosts hostfiles/two4090.txt configs/lora_sft.yaml --dry-run")


def _describe(nodes: list[str], output: Path, *, as_json: bool) -> None:
    from multinode import api

    cluster = parse_hostfile("\n".join(nodes), "the command line")
    if output.exists():
        raise UsageError(f"{output} already exists", hint="choose another file: -o FILE")
    with api.connect(cluster) as context, show_stage() as say:
        from multinode.check.check import describe_nodes

        say(f"probing {len(cluster.nodes)} nodes")
        described = describe_nodes(context.agent, cluster)
    write_new_text(output, described.text)
    if as_json:
        nodes_found = described.cluster.nodes
        print_document({"schema": "multinode.init/1", "hostfile": str(output), "nodes": nodes_found})
    else:
        typer.echo(described.text, nl=False)
        note(f"written to {output}")
        note(f"Next        multinode check --hosts {output}")
