"""`multinode init`: a commented hostfile from what the nodes themselves say."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer

import multinode
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
        typer.Argument(
            metavar="NODE...",
            help="SSH names or aliases of the nodes, in the order of their node ranks, with optional hostfile keys.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help=(
                "File to write the hostfile to, or directory for --example. Default: stdout, or this directory with "
                "--example."
            ),
        ),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Python interpreter of the training environment on the nodes. By default, multinode searches for it.",
        ),
    ] = None,
    example: Annotated[
        bool,
        typer.Option(
            "--example",
            help="Copy sample hostfiles and training configurations to this directory, without probing nodes.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Probe the nodes and print an annotated hostfile with addr, ifname, slots, gpus and python filled in."""
    if example == bool(nodes):
        raise UsageError(
            "--example does not probe nodes, but nodes were given" if example else "no node was given",
            hint="use multinode init gpu-a gpu-b, or multinode init --example",
        )
    if example:
        _copy_example(output or Path(), as_json=as_json)
    else:
        lines = nodes or []
        if python is not None:
            lines = [f"{line} python={shlex.quote(python)}" for line in lines]
        _describe(lines, output, as_json=as_json)


def _copy_example(folder: Path, *, as_json: bool) -> None:
    files = copy_example(folder)
    if as_json:
        print_document({"schema": "multinode.init/2", "files": [str(path) for path in files]})
        return
    for path in files:
        typer.echo(path)
    where = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    note(f"Next        {where}multinode launch --hosts hostfiles/two4090.txt configs/lora_sft.yaml --dry-run")


def _describe(nodes: list[str], output: Path | None, *, as_json: bool) -> None:
    from multinode import api

    cluster = parse_hostfile("\n".join(nodes), "the command line")
    if output is not None and output.exists():
        raise UsageError(f"{output} already exists", hint="choose another file: -o FILE")
    with api.connect(cluster) as context, show_stage() as say:
        from multinode.check.check import describe_nodes

        say(f"probing {len(cluster.nodes)} nodes")
        described = describe_nodes(context.agent, cluster)
    if output is not None:
        write_new_text(output, described.text)
    if as_json:
        hostfile = str(output) if output is not None else None
        print_document({"schema": "multinode.init/2", "hostfile": hostfile, "nodes": described.cluster.nodes})
    elif output is None:
        typer.echo(described.text, nl=False)
        note(f"Next        multinode init {shlex.join(nodes)} -o hosts.txt")
    else:
        note(f"written to {output}")
        note(f"Next        multinode check --hosts {shlex.quote(str(output))}")


_PARTS = ("hostfiles", "configs", "scripts/make_tiny.py")


def copy_example(folder: Path) -> tuple[Path, ...]:
    """Copy the sample hostfiles, the configurations, and the generator of the smallest dataset.

    Args:
        folder: destination; created if missing.

    Returns:
        The copied files.

    Raises:
        UsageError: a part of it exists, or a file cannot be written.
    """
    # In a built package; otherwise beside the package, in the repository.
    package = Path(multinode.__file__).parent
    source = package / "example" if (package / "example").is_dir() else package.parent
    for part in _PARTS:
        if (folder / part).exists():
            raise UsageError(f"{folder / part} already exists", hint="choose another directory: -o DIR")
    paths = [path for part in _PARTS for path in (source / part, *(source / part).rglob("*")) if path.is_file()]
    names = sorted(path.relative_to(source) for path in paths if "__pycache__" not in path.parts)
    try:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            # Contents only: installed files may be read-only.
            shutil.copyfile(source / name, folder / name)
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be written: {error.strerror}", hint="choose another directory: -o DIR"
        ) from None
    return tuple(folder / name for name in names)
