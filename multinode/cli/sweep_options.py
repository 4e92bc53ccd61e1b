"""The options that `multinode sweep` alone has, one type each; what they come to is read elsewhere."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

__all__ = [
    "Baseline",
    "DryRun",
    "Form",
    "Interleave",
    "Minutes",
    "New",
    "NodeCounts",
    "Repeats",
    "RetryFailed",
    "Settings",
    "Sort",
    "StallStop",
    "Steps",
    "WorkerCounts",
]

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=A,B,...",
        help="Values of a key to go through; with one, it is set in every cell. Each is read as YAML: [a,b] is one "
        "value, and '\"a,b\"' a text with a comma. Repeatable.",
    ),
]
NodeCounts = Annotated[
    str | None,
    typer.Option(metavar="1,2,4", help="How many of the hostfile's first nodes, each in turn; else all."),
]
WorkerCounts = Annotated[
    str | None, typer.Option(metavar="1,2", help="Workers on each node, each number in turn; else its slots.")
]
Steps = Annotated[
    int | None,
    typer.Option(min=3, help="Steps that count in each run, warm-up apart (max_steps); else 30, or all there are."),
]
Minutes = Annotated[
    float | None,
    typer.Option(min=0.05, help="Train each run for so long instead, from its first step on, and then stop it."),
]
Repeats = Annotated[int, typer.Option(min=1, max=20, help="Measure each cell so often, for a spread.")]
Interleave = Annotated[
    bool,
    typer.Option("--interleave/--no-interleave", help="Repeat in turns, so that what drifts hits all cells alike."),
]
StallStop = Annotated[
    float,
    typer.Option(
        "--stall", min=0.0, metavar="SECONDS", help="End a run without a step or log on any node for so long; 0: never."
    ),
]
New = Annotated[bool, typer.Option("--new", help="Begin anew, though the same command has measured some or all of it.")]
RetryFailed = Annotated[
    bool, typer.Option("--retry-failed", help="Measure again what failed; what ran out of memory is not.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="List the cells and start nothing.")]
Sort = Annotated[
    str | None, typer.Option(metavar="COLUMN", help="Sort the table by this value; -COLUMN: the greatest first.")
]
Baseline = Annotated[
    str | None, typer.Option(metavar="CELL", help="The cell that the others are relative to; else the first.")
]
Form = Annotated[Literal["table", "markdown", "csv"], typer.Option("--format", help="How the table is shown.")]
