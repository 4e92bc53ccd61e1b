"""`multinode completion`: the script that a shell completes the command with, and what is completed by name."""

from __future__ import annotations

from typing import Annotated, Literal

import typer


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command(
        epilog='\b\nIn bash, add this to ~/.bashrc: eval "$(multinode completion bash)"\n'
        "In fish, run: multinode completion fish | source",
    )(completion)


def completion(
    shell: Annotated[
        Literal["bash", "zsh", "fish"], typer.Argument(metavar="SHELL", help="Your shell: bash, zsh or fish.")
    ],
) -> None:
    """Print a shell script that completes commands, options, run ids and hostfiles."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    typer.echo(get_completion_script(prog_name="multinode", complete_var="_MULTINODE_COMPLETE", shell=shell))
