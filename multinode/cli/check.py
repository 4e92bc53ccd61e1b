"""`multinode check`: what would make a training run fail on these nodes, and what fixes it."""

from __future__ import annotations

from typing import Annotated

import typer

from multinode.cli.inputs import fill
from multinode.cli.live import show_stage
from multinode.cli.options import (
    Details,
    Hosts,
    Json,
    Nodes,
    Overrides,
    ScriptCommand,
    Synthetic,
    TrainingOptions,
    WorkersPerNode,
    expand_options,
    given_options,
    propose,
    read_invocation,
)
from multinode.cli.output import fail_gate, note, print_blocks, print_document
from multinode.cli.panels import examples
from multinode.launch.inputs import CheckInput
from multinode.units import format_count


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command(
        cls=ScriptCommand,
        epilog=examples("check --hosts hosts.txt train.yaml", "check --hosts hosts.txt -- train.py --lr 1e-4"),
    )(expand_options(check))


def check(
    ctx: typer.Context,
    *,
    job: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="JOB.yaml [KEY=VALUE]...",
            help=(
                "LLaMA-Factory YAML, followed by keys to override (same as --set). For any other training job, put "
                "your usual command after --. Without a job, check only what every training job requires."
            ),
        ),
    ] = None,
    hosts: Hosts = None,
    nodes: Nodes = None,
    workers_per_node: WorkersPerNode = None,
    set_: Overrides = None,
    synthetic: Synthetic = False,
    training: TrainingOptions,
    bandwidth: Annotated[
        bool | None,
        typer.Option(
            help=(
                "Measure the bandwidth between all pairs of nodes with a short stream. Default: on if there are at "
                "most 8 nodes and no active run."
            ),
            show_default=False,
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Check even if the default hostfile describes a lab with an active run.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 1 even if there are only warnings.")] = False,
    details: Details = False,
    as_json: Json = False,
) -> None:
    """Check the nodes and their network for problems that would break a training job, and print fixes."""
    from multinode import api

    given = fill(
        CheckInput,
        ctx,
        job,
        training,
        hosts=hosts,
        nodes=nodes,
        workers_per_node=workers_per_node,
        set_=set_,
        synthetic=synthetic,
        bandwidth=bandwidth,
        force=force,
    )
    (cluster, _), training_job, options = given.read(note)
    with api.connect(cluster) as context, show_stage() as context.say:
        from multinode.check.screen import next_step, show

        report = api.check(cluster, context, training_job, options)
    severities = {"error", "warning"} if strict else {"error"}
    failures = [finding for finding in report.findings if finding.severity in severities]
    if as_json:
        print_document(report)
    else:
        step = next_step(failures, given_options(ctx), propose(read_invocation(ctx), "launch"))
        print_blocks((*show(report), step), details=details)
    if strict and report.ok and failures:
        fail_gate(f"{format_count(len(failures), 'warning')}; --strict allows none")
    raise typer.Exit(3 if report.unreached else 1 if failures else 0)
